# %% [markdown]
# # States, and going back
#
# For readers who know a cache of keys and values, and meet a model with recurrent layers: Mamba-2,
# Granite 4, RecurrentGemma. At the end you will know what such a layer remembers, why a text cannot
# be cut anywhere any more, what `max_rollback=` buys, who refuses a cut and how to ask beforehand,
# and how texts fork.
#
# The model is tiny and is trained here in a few seconds, so that its states mean something.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxkv
from jaxkv import draw
from models.families import granite_hybrid, mamba2
from models.families.caches import make_cache

# %% [markdown]
# ## A hybrid model
#
# Two layers of the Granite 4 family: a Mamba-2 mixer, which recurs, then attention. It reads
# brackets, `(` as token 0 and `)` as token 1, and says after each one how deep the text is: one of
# nine answers.

# %%
config = granite_hybrid.Config(
    attends=(False, True),
    width=32,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=16,
    vocabulary=9,
    eps=1e-5,
    mixer=mamba2.Sizes(width=32, heads=4, head_dim=16, state=8),
    rope=None,
    scale=0.25,
)
graph, variables = nnx.split(granite_hybrid.GraniteHybrid(config, rngs=nnx.Rngs(0)))
params = nnx.to_pure_dict(variables)


def forward(params, cache, ubatch):
    return nnx.merge(graph, params)(cache, ubatch)


def make(**options):
    return make_cache(granite_hybrid.layers_of(config, jnp.float32), **options)


cache = make(cells=64, sequences=4, max_rollback=4)
states, keys = cache.parts
print(cache)
print(states)
print(keys)

# %% [markdown]
# The cache has two parts that step together. The part with keys has a cell for each token. The
# part with states has a cell for each *state*: of each of the 4 texts the current one, and the 4
# before it. A state has one size, whatever the length of the text:

# %%
for cells in (64, 4096):
    states, keys = (part.nbytes for part in make(cells=cells, sequences=4).parts)
    print(f"{cells} tokens: {states:,} bytes of states, {keys:,} of keys and values")

# %% [markdown]
# ## Training it
#
# Each step makes 16 random texts of 24 brackets and an empty cache for them, and the gradient goes
# through the cache. At depth 0 a text opens a bracket, and at 8 it closes one.


# %%
def texts_of(key, count, length):
    """Random brackets, `[count, length]`, and the depth after each."""

    def add(depth, closes):
        closes = jnp.where(depth == 0, False, jnp.where(depth == 8, True, closes))
        depth = depth + jnp.where(closes, -1, 1)
        return depth, (closes.astype(jnp.int32), depth)

    draws = jax.random.bernoulli(key, shape=(length, count))
    _, (tokens, depths) = jax.lax.scan(add, jnp.zeros(count, jnp.int32), draws)
    return tokens.T, depths.T


def answers(params, tokens):
    """Logits after each token of texts that begin, `[texts, length, 9]`."""
    texts, length = tokens.shape
    cache = make(cells=length, sequences=texts, streams=texts)
    batch = jaxkv.make_batch(tokens, outputs=jnp.ones(tokens.shape, bool))
    plan = jaxkv.init_batch(cache, batch)
    ubatch = plan.ubatches[0]
    _, logits = forward(params, jaxkv.apply(cache, ubatch), ubatch)
    return plan.gather_outputs([logits])[: tokens.size].reshape(texts, length, -1)


optimizer = optax.adam(1e-2)


@jax.jit
def train(params):
    def step(carry, key):
        params, state = carry

        def loss(params):
            tokens, depths = texts_of(key, 16, 24)
            logits = answers(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, depths).mean()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(1), 1000)
    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    return params, losses


params, losses = train(params)
tokens, depths = texts_of(jax.random.key(2), 20, 24)
right = np.mean(np.argmax(answers(params, tokens), axis=-1) == depths)
assert right > 0.98
print("it says the depth of texts that it has not seen")

# %% [markdown]
# ## What a state is
#
# Texts of 24 brackets go in, into a cache that keeps all 24 states of each. A state of the mixer
# is 512 numbers, sums over all tokens so far, beside the end of its inputs. Does the layer count?
# Then some direction in its states is the depth. A linear fit to the states of 99 texts finds one,
# and below it is read out of the states of another text.

# %%
tokens, depths = texts_of(jax.random.key(3), 100, 24)
cache = make(cells=24, sequences=100, streams=100, max_rollback=23)
(ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch(tokens), ubatch_size=2400).check().ubatches
cache, _ = jax.jit(forward)(params, jaxkv.apply(cache, ubatch), ubatch)

states, _ = cache.parts
after = states.cells().position  # the token that each cell's state stands after
buffers = states.buffers
kept = np.asarray(buffers[0]["ssm"]).reshape(100, 24, -1)
kept = np.take_along_axis(kept, np.argsort(after)[..., None], axis=1)
kept = np.append(kept, np.ones((100, 24, 1)), axis=2)  # and a constant
direction, *_ = np.linalg.lstsq(kept[1:].reshape(99 * 24, -1), np.ravel(depths[1:]), rcond=1e-4)
said = kept[0] @ direction
assert np.corrcoef(said, depths[0])[0, 1] > 0.7

fig, ax = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
at = np.arange(24)
ax.bar(at, depths[0], color="#56b4e9", label="depth of the text")
ax.plot(at, said, "o-", color="#d55e00", ms=4, label="read out of the state")
ax.set(xticks=at, xticklabels=["()"[token] for token in tokens[0]], xlabel="token", ylabel="depth")
fig.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# It does, and its error grows along the text. The attention after it makes the answer exact.
#
# ## Going back
#
# A key belongs to one token, so of a text of keys any end can be cut off. A state has seen all
# tokens and cannot forget one; the way back is a state that was kept. This cache keeps 4 before
# the current one.


# %%
@jax.jit
def step(params, cache, tokens, going):
    """Feed a token to each of the four texts that go on; the depth that is said after it."""
    ubatch = jaxkv.plan_step(cache, tokens, active=going).ubatch
    cache, logits = forward(params, jaxkv.apply(cache, ubatch), ubatch)
    return cache, jnp.argmax(logits, axis=-1)


def tell(cache, brackets, text=0):
    """Feed brackets to one text, one after another."""
    said = []
    for bracket in brackets:
        token = jnp.full(4, "()".index(bracket), jnp.int32)
        cache, depth = step(params, cache, token, jnp.arange(4) == text)
        said.append(int(depth[text]))
    return cache, said


empty = make(cells=32, sequences=4, max_rollback=4)
cache, said = tell(empty, "((()(((")
print(said)
print(jaxkv.show(cache.parts[0]))

# %% [markdown]
# Seven tokens, at positions 0 to 6, and states after the last five. Who would agree to cut at each
# position, so that what comes before it stays?

# %%
for name, part in zip(("states", "keys", "both"), (*cache.parts, cache), strict=True):
    print(f"{name:6}", [bool(jaxkv.seq_rm(part, 0, p0)[1]) for p0 in range(8)])

# %% [markdown]
# A cut at 3 needs the state after position 2, which is kept. One at 2 needs that after position 1,
# which is gone. At 0 the whole text goes, which needs no state, and at 7 nothing goes. What one
# part refuses, no part does: `seq_rm` changes nothing and says so.

# %%
refused, ok = jaxkv.seq_rm(cache, 0, 2)
assert not ok and jaxkv.show(refused) == jaxkv.show(cache)
print("cut at 2:", bool(ok))

# %% [markdown]
# A cut that is granted is exact: the text goes on, bit for bit, as one that never had the rest.

# %%
cut, ok = jaxkv.seq_rm(cache, 0, 3)
went_on, said = tell(cut, "))")
never, same = tell(empty, "(((" + "))")
print("cut at 3:", bool(ok), "- then", said, "as in", same)


def state_of(cache):
    """The states after the last token of text 0, by name."""
    states, _ = cache.parts
    view = states.cells()
    cell = int(np.argmax(np.where(view.owner[0] == 0, view.position[0], -1)))
    return {name: array[0, cell] for name, array in states.buffers[0].items()}


assert jax.tree.all(jax.tree.map(np.array_equal, state_of(went_on), state_of(never)))

# %% [markdown]
# ## What max_rollback= buys
#
# Each token that can be taken back is one more state for each text. After 12 tokens:

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.2), layout="constrained")
granted, labels = [], []
for max_rollback in (0, 2, 4, 8):
    kept = make(cells=16, max_rollback=max_rollback)
    (ubatch,) = jaxkv.init_batch(kept, jaxkv.make_batch(tokens[0, :12])).ubatches
    kept, _ = jax.jit(forward)(params, jaxkv.apply(kept, ubatch), ubatch)
    granted.append([bool(jaxkv.seq_rm(kept, 0, p0)[1]) for p0 in range(13)])
    kib = kept.parts[0].nbytes / 1024
    labels.append(f"max_rollback={max_rollback}, {kib:.0f} KiB")
assert [sum(row) - 2 for row in granted] == [0, 2, 4, 8]  # besides nothing, and all
colours = plt.matplotlib.colors.ListedColormap(["#dddddd", "#009e73"])
ax.pcolormesh(np.array(granted), cmap=colours, edgecolors="white", linewidth=2)
handles = [
    plt.matplotlib.patches.Patch(color="#009e73", label="granted"),
    plt.matplotlib.patches.Patch(color="#dddddd", label="refused"),
]
fig.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
ax.set(
    xticks=np.arange(13) + 0.5, xticklabels=range(13), yticks=np.arange(4) + 0.5, yticklabels=labels
)
ax.set_xlabel("cut from this position on")
ax.invert_yaxis()
ax.tick_params(length=0)
ax.spines[:].set_visible(False)

# %% [markdown]
# ## Back to anywhere: keep the cache
#
# A cache is a value. One that is kept has all its states, however far its texts go elsewhere. The
# price is a second set of buffers.

# %%
checkpoint = cache
elsewhere, _ = tell(cache, "))))((((")
print("elsewhere a cut at 3:", bool(jaxkv.seq_rm(elsewhere, 0, 3)[1]))
_, here = tell(checkpoint, ")")
print("from the checkpoint:", here)
assert here == [4]

# %% [markdown]
# ## Forks
#
# `seq_cp` gives a text to others, and they share its cells, those of states as well: no byte is
# moved. A state that is shared is never written over; each text writes its own next one.

# %%
forked, ok = jaxkv.seq_cp(cache, 0, [1, 2])
print(
    "cells of states in use:",
    *(int(m.parts[0].num_used_cells()) for m in (cache, forked)),
)
for text, brackets in enumerate(("((", "))", "()")):
    forked, said = tell(forked, brackets, text)
    print(f"text {text} goes on with {brackets} and is at {said}")

fig, axes = plt.subplots(2, 1, figsize=(7.2, 3.6), layout="constrained")
for ax, part, name in zip(axes, forked.parts, ("states", "keys"), strict=True):
    draw.plot.cells(part, ax)
    ax.set_title(name, fontsize=10, loc="right")

# %% [markdown]
# A fork at an earlier place gets the state that stands there, if it is kept. Where none is, the
# fork is refused and nothing changes.

# %%
same, ok = jaxkv.seq_cp(forked, 0, 3, 0, 2)  # positions 0 and 1; the state after 1 is gone
print(ok, same.seq_pos_max(3))
assert not ok

# %% [markdown]
# ## What to try next
#
# - Keep one state for long, cheaply: `seq_cp(cache, 0, 3)`, to a text that is not used otherwise.
# - `generation.speculate` takes back what was guessed wrong: it wants `max_rollback=` as large as
#   `tries`, and says so.
# - Keep the table alone, and undo with `rewind`: see "Going back" in `docs/explanation/states.md`.
# - A real model: `models.load("ibm-granite/granite-4.0-h-350m")`, with
#   `make_cache(max_rollback=8)`.
