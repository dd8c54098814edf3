"""Throughput of an engine, relative to fully used sequences. SmolLM2 in float32, greedy.

Run `python -m benchmarks.batching`. Requests of mixed lengths go through `serving.Engine` with a
stream for each sequence, and are compared with two sides that do the same work per token:

- one by one: each request alone, in a cache of one sequence; 8 requests with the same distribution,
  since the rate does not depend on their number;
- all busy: as many requests as sequences, all with the mean prompt and the mean limit. None waits,
  so this is the best possible rate of the sequences, prompts included.

The sides alternate in one process. Only requested tokens count.
"""

import argparse
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from jaxkv import generation
from jaxkv.generation.filters import make_sampler
from jaxkv.serving.engine import Engine, Request
from models.compiling import counting


def requests_of(count: int, *, prompt: int, limit: int, seed: int = 0) -> list[Request]:
    """Make requests with evenly distributed lengths up to the largest."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.linspace(8, prompt, count).round().astype(int))
    limits = rng.permutation(np.linspace(8, limit, count).round().astype(int))
    return [
        Request(prompt=rng.integers(100, 20_000, n), max_new_tokens=int(most))
        for n, most in zip(lengths, limits, strict=True)
    ]


def tokens_of(requests: list[Request]) -> int:
    return sum(request.max_new_tokens for request in requests)


def through_engine(engine: Engine, requests: list[Request]) -> float:
    """Run requests through an engine; milliseconds per token."""
    start = time.perf_counter()
    for request in requests:
        engine.submit(request)
    got = sum(len(result.tokens) for result in engine.results())
    assert got == tokens_of(requests)
    return 1e3 * (time.perf_counter() - start) / got


def together(model: models.Model, cache: Any, requests: list[Request], *, chunk: int) -> Any:
    """Run requests of equal lengths in one batch with the plain loops; return the cache."""
    run, sampler = (model.forward, model.params), make_sampler()
    batch = jaxkv.make_batch([request.prompt for request in requests])
    cache, logits, sequences, *_ = jaxkv.prefill(*run, cache, batch, ubatch_size=chunk, donate=True)
    limit = requests[0].max_new_tokens
    state = generation.init_decode(
        cache, logits=logits, sampler=sampler, sequences=sequences, max_new_tokens=limit
    ).state
    while np.asarray(state.active).any():
        cache, state, *_ = jaxkv.decode(
            model.forward, model.params, cache, state, num_tokens=8, donate=True, sampler=sampler
        )
    return jaxkv.clear(cache)


def side_of(
    model: models.Model, groups: list[list[Request]], *, cells: int, chunk: int
) -> Callable:
    """A side that runs groups of requests one after another; milliseconds per token."""
    rows = len(groups[0])
    cache = model.make_cache(cells=cells, sequences=rows, streams=rows)

    def side() -> float:
        nonlocal cache
        start = time.perf_counter()
        for group in groups:
            cache = together(model, cache, group, chunk=chunk)
        return 1e3 * (time.perf_counter() - start) / sum(map(tokens_of, groups))

    return side


def main() -> None:
    """Print the milliseconds per useful token of each side, and the ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=56, help="tokens of the longest prompt")
    parser.add_argument("--limit", type=int, default=120, help="tokens of the longest text")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each side")
    args = parser.parse_args()

    machine.main()
    model = models.load(args.model)
    requests = requests_of(args.requests, prompt=args.prompt, limit=args.limit)
    cells = -(-(args.prompt + args.limit) // 64) * 64
    cache = model.make_cache(cells=cells, sequences=args.sequences, streams=args.sequences)
    options = dict(prefill_chunk=args.chunk, tokens_per_step=args.steps, sampling_options=())
    engine = Engine(model.forward, model.params, cache, **options)
    engine.warm_up()
    with counting() as compiled:
        through_engine(engine, requests[: 2 * args.sequences])
        print(f"{compiled()} programs compiled after the warm-up")

    mean = {
        "prompt": round(np.mean([len(request.prompt) for request in requests])),
        "limit": round(np.mean([request.max_new_tokens for request in requests])),
    }
    equal = [
        Request(prompt=one.prompt[: mean["prompt"]], max_new_tokens=mean["limit"])
        for one in requests
        if len(one.prompt) >= mean["prompt"]
    ][: args.sequences]
    # The first turn does not count and the engine is warm, so it is short.
    queues = chain([requests[: args.sequences]], repeat(requests))
    sides = {
        "batching": lambda: through_engine(engine, next(queues)),
        "one by one": side_of(
            model,
            [[one] for one in requests_of(8, prompt=args.prompt, limit=args.limit)],
            cells=cells,
            chunk=args.chunk,
        ),
        "all busy": side_of(model, [equal] * 2, cells=cells, chunk=args.chunk * 4),
    }
    print(
        f"{len(requests)} requests, on average prompts of {mean['prompt']} tokens and texts of "
        f"{mean['limit']}, through {args.sequences} sequences; for a token that was asked for:"
    )
    middle = turns.table(turns.take_turns(sides, args.rounds), own=["batching"])
    print(f"{middle['one by one'] / middle['batching']:.2f} x the rate of one by one")
    print(f"{middle['all busy'] / middle['batching']:.2f} of the rate of all sequences busy")


if __name__ == "__main__":
    main()
