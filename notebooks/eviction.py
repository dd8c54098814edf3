# %% [markdown]
# # Which tokens can be evicted?
#
# For readers whose cache is full. A token that no later token attends to costs memory and time.
# Four rules choose the tokens to keep, and a model reads with 50, 25 and 10 % of its cells. How
# much does its perplexity rise, and does it still find a number in its prompt?

# %%
import json
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import generation

# SmolLM2 has 135 million parameters in 30 layers. The third result of `model.forward` is the
# attention mass of each layer.
model = models.load(return_mass=True)
CHUNK = 32  # tokens of a step

# %% [markdown]
# ## The rules
#
# The attention mass of a cell is the sum of all weights of the softmax that tokens of a step give
# to the cell, `[S, H, N]` for S streams, H heads and N cells. All heads and layers share the cells,
# so the rules add their masses. In the caches below, each sequence has its own stream.

# %%
spec = model.cache_spec
score = {"score": ((), "float32")}  # a number for each cell
spec = jaxkv.CacheSpec.attention(
    spec.layers, spec.kv_heads, spec.head_dim, rope=spec.rope, fields=score
)


def is_best(cache, score, budget, recent):
    """Select the last `recent` tokens, and the tokens with the highest scores: `budget` in all."""
    position = cache.cell_positions()  # [S, N], -1 for an empty cell
    is_recent = position > cache.seq_pos_max()[:, None] - recent
    score = jnp.where(position < 0, -jnp.inf, jnp.where(is_recent, jnp.inf, score))
    return jnp.argsort(jnp.argsort(-score)) < budget


def keep_best(cache, score, budget, recent):
    return jaxkv.evict(cache, is_best(cache, score, budget, recent)).cache


def streaming(cache, mass, budget):
    """Keep the first four tokens and the last tokens (StreamingLLM)."""
    position = cache.cell_positions()
    return keep_best(cache, jnp.where(position < 4, jnp.inf, position), budget, 0)


def h2o(cache, mass, budget):
    """Keep the tokens with the largest mass since they were written (H2O)."""
    mass = sum(of_layer.sum(axis=1) for of_layer in mass)
    cache = cache.with_fields(score=cache.fields["score"] + mass)
    return keep_best(cache, cache.fields["score"], budget, budget // 2)


def snapkv(cache, mass, budget):
    """Keep the tokens to which the tokens of this step attend, and their neighbours (SnapKV)."""
    return keep_best(cache, mass_nearby(mass), budget, CHUNK)


def mass_nearby(mass):
    mass = sum(of_layer.sum(axis=1) for of_layer in mass)
    return jax.lax.reduce_window(mass, -jnp.inf, jax.lax.max, (1, 7), (1, 1), "SAME")


def at_random(cache, mass, budget):
    """Keep the last tokens, and random tokens before them."""
    key = jax.random.fold_in(jax.random.key(0), cache.seq_pos_max()[0])
    score = jax.random.uniform(key, cache.cell_positions().shape)
    return keep_best(cache, score, budget, budget // 2)


RULES = {"StreamingLLM": streaming, "H2O": h2o, "SnapKV": snapkv, "random": at_random}
COLOURS = dict(zip(RULES, ("#0072b2", "#e69f00", "#009e73", "#999999"), strict=True))

# %% [markdown]
# A rule is the argument `edit` of a step: it is called after the step, inside of the compiled
# loop. StreamingLLM, H2O and the random rule evict after each step. SnapKV evicts once, after the
# prompt; until then its budget is all cells.


# %%
@partial(jax.jit, static_argnames="rule")
def read(params, cache, chunks, following, budgets, rule):
    """Read chunks `[n, Z, 32]`; return the loss of each following token, and kept positions."""

    def step(cache, x):
        tokens, targets, budget = x
        plan = jaxkv.plan_step(cache, tokens)
        cache, logits = generation.model_step(
            model.forward,
            params,
            cache,
            plan.ubatch,
            edit=lambda cache, mass: rule(cache, mass, budget),
        )
        logprobs = jax.nn.log_softmax(logits.reshape(*tokens.shape, -1))
        losses = -jnp.take_along_axis(logprobs, targets[..., None], axis=2)[..., 0]
        return cache, (losses, cache.parts[0].cell_positions())

    return jax.lax.scan(step, cache, (chunks, following, budgets))[1]


def run(texts, rule, share, prompt, spec=spec):
    """Read texts `[Z, n + 1]`; keep a share of the tokens of the prompt."""
    count = (texts.shape[1] - 1) // CHUNK
    cells = (count + 1) * CHUNK
    cache = jaxkv.make_cache(spec, cells=cells, sequences=len(texts), streams=len(texts))
    chunks, following = (
        np.reshape(x, (len(texts), count, CHUNK)).swapaxes(0, 1)
        for x in (texts[:, :-1], texts[:, 1:])
    )
    budgets = np.full(count, int(share * prompt))
    if rule not in (streaming, h2o, at_random) or share == 1:
        budgets[np.arange(1, count + 1) * CHUNK != prompt] = cells
    losses, kept = read(model.params, cache, chunks, following, budgets, rule)
    return np.asarray(losses).swapaxes(0, 1).reshape(len(texts), -1), np.asarray(kept)


# %% [markdown]
# ## Perplexity of a long text
#
# The text is a licence. After a prompt of 512 tokens, the model predicts 256 tokens, with a share
# of the cells of the prompt. SnapKV keeps the 256 new tokens in addition.

# %%
PROMPT = 512
SHARES = (1, 0.5, 0.25, 0.1)
recorded = Path(models.__file__).parent.parent / "tests" / "data" / "golden" / "models.json"
tokens = np.array(json.loads(recorded.read_text())["smollm2_nll"]["tokens"])
full_losses, _ = run(tokens[None, : PROMPT + 257], streaming, 1, PROMPT)

perplexity, kept = {}, {}
for name, rule in RULES.items():
    perplexity[name] = [np.exp(full_losses[:, PROMPT:].mean())]
    for share in SHARES[1:]:
        losses, kept[name, share] = run(tokens[None, : PROMPT + 257], rule, share, PROMPT)
        perplexity[name].append(np.exp(losses[:, PROMPT:].mean()))
    print(f"{name:12}", *(f"{value:6.2f}" for value in perplexity[name]))

# %% [markdown]
# A random choice is bad at once (40 to 70): it evicts the first tokens. Their keys take most of the
# weight of many heads in every text (attention sinks). Without them, the softmax gives this weight
# to other tokens. The other rules keep the first tokens: StreamingLLM by their position, H2O and
# SnapKV by their mass.


# %%
def draw_shares(values, label):
    fig, ax = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, of_share in values.items():
        ax.plot(SHARES, of_share, "o-", color=COLOURS[name], label=name)
    ax.set(xscale="log", xlabel="share of the cells", ylabel=label)
    ax.set_xticks(SHARES, [f"{share:.0%}" for share in SHARES])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return ax


draw_shares(perplexity, "perplexity").set(ylim=(10, 30))
plt.show()

# %% [markdown]
# ## Which tokens are kept?
#
# A row is a step of 32 tokens, and a column is a position in the text. A position is blue if its
# token is in the cache after the step, with 25 % of the cells.

# %%
fig, axes = plt.subplots(2, 2, figsize=(6.4, 4), sharex=True, sharey=True, layout="constrained")
for name, ax in zip(RULES, axes.flat, strict=True):
    positions = kept[name, 0.25][:, 0]  # [steps, N]
    is_kept = np.zeros((len(positions), PROMPT + 256), bool)
    for row, of_step in zip(is_kept, positions, strict=True):
        row[of_step[of_step >= 0]] = True
    ax.imshow(is_kept, aspect="auto", cmap="Blues", interpolation="nearest", vmax=1.3)
    ax.set_title(name, loc="left", fontsize=9)
for ax in axes[:, 0]:
    ax.set_ylabel("step")
for ax in axes[1]:
    ax.set_xlabel("position")
plt.show()

# %% [markdown]
# ## A number in a prompt
#
# A sentence with a number of four digits is somewhere in a prompt of 384 tokens, whose last words
# ask for the number. The step that reads these words predicts the first digit before it evicts
# cells, so the picture shows the probability of the three other digits.

# %%
LENGTH, DEPTHS, NUMBERS = 384, (0.1, 0.4, 0.7), ("7241", "3986", "5170")


def make_text(depth, number):
    encode = model.tokenizer.encode
    sentence = encode("\nThe secret number of the library is " + number + ".\n")
    question = encode("\nThe secret number of the library is ")
    before = int(depth * LENGTH)
    after = LENGTH - before - len(sentence) - len(question)
    answer = np.resize(encode(number), CHUNK + 1)  # the four digits, repeated
    return [*tokens[:before], *sentence, *tokens[before : before + after], *question, *answer]


texts = np.array([make_text(*pair) for pair in zip(DEPTHS, NUMBERS, strict=True)])


def number_probability(rule, share, spec=spec):
    losses, _ = run(texts, rule, share, LENGTH, spec)
    return np.exp(-losses[:, LENGTH : LENGTH + 3].sum(axis=1)).mean()


probability = {}
full_probability = number_probability(streaming, 1)
for name, rule in RULES.items():
    shares = (number_probability(rule, share) for share in SHARES[1:])
    probability[name] = [full_probability, *shares]
    print(f"{name:18}", *(f"{value:6.3f}" for value in probability[name]))

# %% [markdown]
# StreamingLLM finds a number only if it is near the end, and H2O has evicted the number before the
# question is read. SnapKV reads the question first, and finds all numbers with half of the cells.
# With a quarter it finds none: few layers attend to the number, and the masses of all layers are
# added. `group_layers` gives each five layers their own cells, so each group keeps the tokens to
# which its own layers attend. With a quarter of the cells the model then finds some numbers, but
# with half it finds fewer: groups keep different tokens of a number.

# %%
SIZE = 5
groups = [range(first, first + SIZE) for first in range(0, spec.layers, SIZE)]


def snapkv_by_layers(cache, mass, budget):
    """Keep, in each group of layers, the tokens to which the tokens of this step attend."""
    masks = tuple(
        is_best(part, mass_nearby([mass[layer] for layer in group]), budget, CHUNK)
        for part, group in zip(cache.parts, groups, strict=True)
    )
    return jaxkv.evict(cache, masks).cache


name, grouped = "SnapKV by 5 layers", spec.group_layers(*groups)
COLOURS[name] = "#d55e00"
probability[name] = [
    full_probability,
    *(number_probability(snapkv_by_layers, share, grouped) for share in SHARES[1:]),
]
print(f"{name:18}", *(f"{value:6.3f}" for value in probability[name]))
draw_shares(probability, "probability of the number").set(ylim=(0, 1))
plt.show()

# %% [markdown]
# ## Less memory, more tokens a second
#
# Evicted cells are free, but the buffers are as large as before. `extract` copies sequences into a
# smaller cache, in which each step reads fewer cells. Eight sequences continue one prompt.

# %%
first = jaxkv.make_cache(spec, cells=2048)
prompt = np.resize(tokens, 2032)
result = jaxkv.prefill(model.forward, model.params, first, prompt)
first = jaxkv.make_cache(spec, cells=2048, sequences=8, streams=8)
first = jaxkv.insert(first, result.cache, [0] * 8, list(range(8))).check()
for share in (1, 0.25):
    budget = int(share * 2032)
    evicted = streaming(first, None, budget)
    cache = jaxkv.make_cache(spec, cells=budget + 16, sequences=8, streams=8)
    cache = jaxkv.insert(cache, evicted, list(range(8)), list(range(8))).check()
    state = generation.init_decode(cache, tokens=[1] * 8).state
    decode = partial(generation.decode, model.forward, model.params, cache, state, num_tokens=8)
    decode().tokens.block_until_ready()  # compile
    start = time.perf_counter()
    decode().tokens.block_until_ready()
    speed = 64 / (time.perf_counter() - start)
    size = cache.nbytes / 2**20
    print(f"{share:4.0%} of the cells: {size:4.0f} MiB, {speed:3.0f} tokens a second")
