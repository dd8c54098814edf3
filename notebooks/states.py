# %% [markdown]
# # Recurrent states and rollback
#
# For readers who know a KV cache and use a model with recurrent layers: Mamba-2, Granite 4 or
# RecurrentGemma. What does a recurrent state contain, and at which positions can such a sequence be
# cut?
#
# The model is tiny and is trained here in a few seconds, so its states are meaningful.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import jaxkv
from jaxkv import plot
from models.families import granite_hybrid, mamba2
from models.families.caches import make_cache

# %% [markdown]
# ## Make a hybrid model
#
# The model has two layers of the Granite 4 family: a recurrent Mamba-2 mixer, then attention. Its
# input is brackets, `(` as token 0 and `)` as token 1. After each bracket it predicts the nesting
# depth, one of nine classes.

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


def forward(params, step):
    return nnx.merge(graph, params)(step)


def make(**options):
    return make_cache(granite_hybrid.layers_of(config, jnp.float32), **options)


cache = make(cells=64, sequences=4, max_rollback=4)
states, keys = cache.parts
print(cache)
print(states)
print(keys)

# %% [markdown]
# The cache has two parts. The part with keys has a cell for each token. The part with states has a
# cell for each *state*: for each of 4 sequences the current one and the 4 before it.
#
# How large is a state? Compare two lengths, without `max_rollback`:

# %%
for cells in (64, 4096):
    states, keys = (part.nbytes for part in make(cells=cells, sequences=4).parts)
    print(f"{cells} tokens: {states:,} bytes of states, {keys:,} of keys and values")

# %% [markdown]
# The size of a state does not depend on the length.
#
# ## Train the model
#
# Each step makes 16 random sequences of 24 brackets and an empty cache, and differentiates through
# the cache. At depth 0 a sequence always opens a bracket, and at depth 8 it always closes one.


# %%
def texts_of(key, count, length):
    """Return random brackets, `[count, length]`, and the depth after each."""

    def add(depth, closes):
        closes = jnp.where(depth == 0, False, jnp.where(depth == 8, True, closes))
        depth = depth + jnp.where(closes, -1, 1)
        return depth, (closes.astype(jnp.int32), depth)

    draws = jax.random.bernoulli(key, shape=(length, count))
    _, (tokens, depths) = jax.lax.scan(add, jnp.zeros(count, jnp.int32), draws)
    return tokens.T, depths.T


def answers(params, tokens):
    """Return the logits after each token of new sequences, `[texts, length, 9]`."""
    texts, length = tokens.shape
    cache = make(cells=length, sequences=texts, streams=texts)
    batch = jaxkv.make_batch(tokens, outputs=jnp.ones(tokens.shape, bool))
    plan = jaxkv.init_batch(cache, batch)
    _, logits = forward(params, jaxkv.apply(cache, plan))
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
print("it predicts the depth of texts that it was not trained on")

# %% [markdown]
# ## Does a state contain the depth?
#
# Prefill 100 sequences of 24 brackets into a cache that stores all 24 states of each. A state of
# the mixer is 512 numbers (sums over all tokens so far) and the last inputs of its convolution. If
# the layer counts, some direction in its states is the depth. A linear fit to the states of 99
# sequences finds one. The picture applies it to the last sequence.

# %%
tokens, depths = texts_of(jax.random.key(3), 100, 24)
cache = make(cells=24, sequences=100, streams=100, max_rollback=23)
plan = jaxkv.init_batch(cache, jaxkv.make_batch(tokens), ubatch_size=2400).check()
whole, _ = jax.jit(forward)(params, jaxkv.apply(cache, plan))

states, _ = whole.cache.parts
after = states.cells().position  # position of the last token of each state
buffers = states.buffers
kept = np.asarray(buffers[0]["ssm"]).reshape(100, 24, -1)
kept = np.take_along_axis(kept, np.argsort(after)[..., None], axis=1)
kept = np.append(kept, np.ones((100, 24, 1)), axis=2)  # a constant column
direction, *_ = np.linalg.lstsq(kept[1:].reshape(99 * 24, -1), np.ravel(depths[1:]), rcond=1e-4)
said = kept[0] @ direction
assert np.corrcoef(said, depths[0])[0, 1] > 0.7

fig, ax = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
at = np.arange(24)
ax.bar(at, depths[0], color="#56b4e9", label="depth of the text")
ax.plot(at, said, "o-", color="#d55e00", ms=4, label="read from the state")
ax.set(xticks=at, xticklabels=["()"[token] for token in tokens[0]], xlabel="token", ylabel="depth")
fig.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=9)
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# It does: the line follows the depth, with an error that grows along the sequence. The attention
# layer after it makes the answer exact.
#
# ## Where can a sequence be cut?
#
# A key belongs to one token, so a sequence of keys can be cut at any position. A state summarises
# all tokens so far, and no token can be subtracted from it. A rollback needs a stored earlier
# state. This cache stores 4 states before the current one.


# %%
@jax.jit
def step(params, cache, tokens, going):
    """Compute a token of each active sequence; return the predicted depths."""
    step, logits = forward(params, jaxkv.apply(cache, jaxkv.plan_step(cache, tokens, active=going)))
    return step.cache, jnp.argmax(logits, axis=-1)


def tell(cache, brackets, text=0):
    """Compute brackets of one sequence, one by one; return the predicted depths."""
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
# The sequence has seven tokens, at positions 0 to 6, and states after the last five. Which parts
# accept a cut at each position, so that earlier tokens stay?

# %%
for name, part in zip(("states", "keys", "both"), (*cache.parts, cache), strict=True):
    print(f"{name:6}", [bool(jaxkv.seq_rm(part, 0, p0)[1]) for p0 in range(8)])

# %% [markdown]
# - A cut at 3 needs the state after position 2, which is stored.
# - A cut at 1 or 2 needs the state after position 0 or 1, which the cache no longer stores.
# - A cut at 0 removes the whole sequence and needs no state. A cut at 7 removes no tokens.
#
# If one part rejects a cut, `seq_rm` changes no part and returns `ok` as False.

# %%
refused, ok = jaxkv.seq_rm(cache, 0, 2)
assert not ok and jaxkv.show(refused) == jaxkv.show(cache)
print("cut at 2:", bool(ok))

# %% [markdown]
# An accepted cut is exact: the sequence continues bit for bit like one that never contained the
# removed tokens.

# %%
cut, ok = jaxkv.seq_rm(cache, 0, 3)
went_on, said = tell(cut, "))")
never, same = tell(empty, "(((" + "))")
print("cut at 3:", bool(ok), "- then", said, "as in", same)


def state_of(cache):
    """Return the states after the last token of sequence 0, by name."""
    states, _ = cache.parts
    view = states.cells()
    cell = int(np.argmax(np.where(view.owner[0] == 0, view.position[0], -1)))
    return {name: array[0, cell] for name, array in states.buffers[0].items()}


assert jax.tree.all(jax.tree.map(np.array_equal, state_of(went_on), state_of(never)))

# %% [markdown]
# ## What does max_rollback= cost?
#
# Each further token of rollback stores one more state for each sequence. The picture shows the
# accepted cuts after 12 tokens:

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.2), layout="constrained")
granted, labels = [], []
for max_rollback in (0, 2, 4, 8):
    kept = make(cells=16, max_rollback=max_rollback)
    plan = jaxkv.init_batch(kept, jaxkv.make_batch(tokens[0, :12]))
    whole, _ = jax.jit(forward)(params, jaxkv.apply(kept, plan))
    kept = whole.cache
    granted.append([bool(jaxkv.seq_rm(kept, 0, p0)[1]) for p0 in range(13)])
    kib = kept.parts[0].nbytes / 1024
    labels.append(f"max_rollback={max_rollback}, {kib:.0f} KiB")
assert [sum(row) - 2 for row in granted] == [0, 2, 4, 8]  # without 0 and 12
colours = plt.matplotlib.colors.ListedColormap(["#dddddd", "#009e73"])
ax.pcolormesh(np.array(granted), cmap=colours, edgecolors="white", linewidth=2)
handles = [
    plt.matplotlib.patches.Patch(color="#009e73", label="ok"),
    plt.matplotlib.patches.Patch(color="#dddddd", label="refused"),
]
fig.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
ax.set(
    xticks=np.arange(13) + 0.5, xticklabels=range(13), yticks=np.arange(4) + 0.5, yticklabels=labels
)
ax.set_xlabel("first removed position")
ax.invert_yaxis()
ax.tick_params(length=0)
ax.spines[:].set_visible(False)

# %% [markdown]
# A cache with `max_rollback=n` accepts cuts of up to n tokens. The part with states grows from 3
# KiB to 27 KiB for 8 tokens.
#
# ## Roll back to any position
#
# A cache is an immutable value. A cache that you keep has all its states. The cost is a second set
# of buffers.

# %%
checkpoint = cache
elsewhere, _ = tell(cache, "))))((((")
print("elsewhere a cut at 3:", bool(jaxkv.seq_rm(elsewhere, 0, 3)[1]))
_, here = tell(checkpoint, ")")
print("from the checkpoint:", here)
assert here == [4]

# %% [markdown]
# ## Do forks share states?
#
# `seq_cp` adds owners to the cells of a sequence, including cells of states. No bytes are copied. A
# shared state is never overwritten: each sequence writes its next state to another cell.

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
    plot.cells(part, ax)
    ax.set_title(name, fontsize=10, loc="right")

# %% [markdown]
# Yes: the hatched cells are shared, and each sequence has its own cells after them.
#
# A fork at an earlier position uses the state there. If it is not stored, the fork is refused and
# the cache is unchanged.

# %%
same, ok = jaxkv.seq_cp(forked, 0, 3, 0, 2)  # positions 0 and 1; the state after 1 is gone
print(ok, same.seq_pos_max(3))
assert not ok

# %% [markdown]
# ## Try next
#
# - Store one state for long at low cost: `seq_cp(cache, 0, 3)`, to an otherwise unused sequence.
# - `generation.speculate` rolls back rejected draft tokens. It raises if `max_rollback` is below
#   `num_draft_tokens`.
# - Store only the table, and undo with `rewind`: see "Going back" in `docs/explanation/states.md`.
# - Use a real model: `models.load("ibm-granite/granite-4.0-h-350m")`, with
#   `make_cache(max_rollback=8)`.
