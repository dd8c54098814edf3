"""Time saved by a prefix store: an engine with and without it. SmolLM2 in float32.

Run `python -m benchmarks.prefix`. The sides alternate in one process:

- the first token: a prompt of stored common tokens and 32 new ones, until the result of a request
  for one token, which includes storing the prompt;
- 16 prompts: 512 common tokens that are not stored yet, 32 different ones and texts of 16, through
  8 sequences;
- a conversation of 20 turns, each with a message of 24 tokens and an answer of 24.
"""

import argparse
import time
from collections.abc import Callable
from itertools import count

import numpy as np

import models
from benchmarks import machine, turns
from jaxkv.serving.engine import Engine, Request

OWN, TEXT = 32, 16
"""The different tokens of each prompt, and the tokens of its text."""


def tokens_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 20_000, size)


def make_engine(model: models.Model, *, kept: bool, cells: int, sequences: int) -> Engine:
    """Make an engine in a pool, with a store and two more sequences for it, or without."""
    holders = [sequences, sequences + 1]
    cache = model.make_cache(cells=cells, sequences=sequences + 2)
    engine = Engine(
        model.forward,
        model.params,
        cache,
        prefill_chunk=128,
        sampling_options=(),
        prefix_sequences=holders if kept else None,
    )
    engine.warm_up()
    return engine


def run(engine: Engine, requests: list[Request]) -> tuple[float, list, int]:
    """Run requests; the milliseconds, the results, and the largest number of used cells."""
    start, results, cells = time.perf_counter(), [], 0
    for request in requests:
        engine.submit(request)
    while engine.busy:
        results += engine.step()
        cells = max(cells, int(engine.cache.num_used_cells()))
    return 1e3 * (time.perf_counter() - start), results, cells


def first_token(engine: Engine, common: np.ndarray, seeds: count) -> Callable[[], float]:
    """A side: a prompt that starts with common tokens and has a different end each time."""

    def side() -> float:
        prompt = np.append(common, tokens_of(next(seeds), OWN))
        return run(engine, [Request(prompt=prompt, max_new_tokens=1)])[0]

    return side


def many(engine: Engine, requests: int, seeds: count, most: dict[str, int], name: str) -> Callable:
    """A side: prompts with a common prefix that is new in each turn."""

    def side() -> float:
        common = tokens_of(next(seeds), 512)
        prompts = [np.append(common, tokens_of(next(seeds), OWN)) for _ in range(requests)]
        took, _, most[name] = run(
            engine, [Request(prompt=one, max_new_tokens=TEXT) for one in prompts]
        )
        return took

    return side


def conversation(engine: Engine, seeds: count) -> Callable[[], float]:
    """A side: 20 turns, each a request with the whole conversation."""

    def side() -> float:
        took, text = 0.0, np.zeros(0, int)
        for _ in range(20):
            text = np.append(text, tokens_of(next(seeds), 24))
            more, results, _ = run(engine, [Request(prompt=text, max_new_tokens=24)])
            took, text = took + more, np.append(text, results[0].tokens)
        return took

    return side


def main() -> None:
    """Print the milliseconds of each side, and the ratio without to with a store."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--common", type=int, nargs="+", default=[128, 512, 1536])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    args = parser.parse_args()

    machine.main()
    model, seeds = models.load(args.model), count()
    for common in args.common:
        text, sides = tokens_of(next(seeds), common), {}
        for name in ("with a store", "without"):
            size = {"cells": 3 * (common + 64), "sequences": 1}
            engine = make_engine(model, kept=name != "without", **size)
            run(engine, [Request(prompt=text, max_new_tokens=1)])
            sides[name] = first_token(engine, text, seeds)
        print(f"the first token after {common} common tokens and {OWN} of its own:")
        turns.table(turns.take_turns(sides, 3 * args.rounds), own=["with a store"])

    most: dict[str, int] = {}
    sides = {
        name: many(
            make_engine(model, kept=name != "without", cells=6144, sequences=8),
            args.requests,
            seeds,
            most,
            name,
        )
        for name in ("with a store", "without")
    }
    took = turns.take_turns(sides, args.rounds)
    print(f"{args.requests} prompts with 512 common tokens; cells in use at most: {most}")
    turns.table(took, own=["with a store"])

    sides = {
        name: conversation(
            make_engine(model, kept=name != "without", cells=2048, sequences=1), seeds
        )
        for name in ("with a store", "without")
    }
    print("a conversation of 20 turns:")
    turns.table(turns.take_turns(sides, args.rounds), own=["with a store"])


if __name__ == "__main__":
    main()
