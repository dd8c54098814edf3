"""Cost of other sequences, pools and windows: one pool for all sequences, several, or one for each.

Run `python -m benchmarks.modes`. It measures whole decode steps of SmolLM2 in float32, one token of
each active sequence. Gemma 3, where its weights are installed, has cells for its windows only, or
for the whole text in every layer. All cases alternate in one run, so ratios are valid on a machine
with drifting speed. Only modes are compared, not peers. `--only busy forks` selects the cases with
one of these words in their names.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns


class Case:
    """A cache with sequences of given lengths, some of which take part in a step.

    The first `shared` tokens of all are the same, in the same cells if in one pool. The last
    `grown` tokens are interleaved, as if the sequences were generated together.
    """

    def __init__(
        self,
        model: models.Model,
        lengths: Sequence[int],
        active: Sequence[int],
        *,
        shared: int = 0,
        grown: int = 0,
        **options: Any,
    ):
        self.model, self.active = model, jnp.asarray(active, jnp.int32)
        cache = model.make_cache(sequences=len(lengths), **options)

        def fed(cache: Any, sequences: Sequence[int]) -> Any:
            # Only the table affects the time, so the buffers stay zeros.
            batch = jaxkv.make_batch(np.zeros(len(sequences), np.int32), sequences=sequences)
            for ubatch in jaxkv.init_batch(cache, batch).check().ubatches:
                step = jaxkv.apply(cache, ubatch)
                cache = jaxkv.Cache(table=step.table, buffers=step.buffers)
            return cache

        if shared:
            cache, _ = jaxkv.seq_cp(fed(cache, [0] * shared), 0, [*range(1, len(lengths))])
        for seq, length in enumerate(lengths):
            if length:
                cache = fed(cache, [seq] * (length - shared - grown))
        if grown:
            cache = fed(cache, [*range(len(lengths))] * grown)
        self.table, self.buffers = cache.table, cache.buffers

        @partial(jax.jit, donate_argnames="buffers")
        def step(params: Any, table: Any, buffers: Any, token: jax.Array) -> tuple:
            cache = jaxkv.Cache(table=table, buffers=buffers)
            valid = jnp.ones(token.shape, bool)
            plan = jaxkv.plan_step(cache, token, sequences=self.active, active=valid)
            step, logits = model.forward(params, jaxkv.apply(cache, plan))
            return step.cache.buffers, jnp.argmax(logits, axis=-1).astype(jnp.int32), plan.ok

        self._step = step
        self.token = jnp.zeros(len(active), jnp.int32)

    def run(self) -> jax.Array:
        """Run a step, always from the same table."""
        self.buffers, self.token, ok = self._step(
            self.model.params, self.table, self.buffers, self.token
        )
        assert bool(ok), "the cache is full"
        return self.token


def windowed(positions: int) -> dict[str, Callable[[], Case]]:
    """Gemma 3 with one sequence, in caches of both sizes."""
    try:
        model = models.load("gemma3")
    except models.ModelError as error:
        print(error)
        return {}
    case = partial(Case, model, [positions - 32], [0], cells=positions)
    return {
        "Gemma 3, cells for its windows": partial(case, full_windows=False),
        "Gemma 3, cells for all": partial(case, full_windows=True),
    }


def main() -> None:
    """Print the milliseconds of a step in each mode, and the important ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--positions", type=int, default=1024, help="of each sequence")
    parser.add_argument("--windowed", type=int, default=8192, help="positions of Gemma 3")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each case")
    parser.add_argument("--only", nargs="+", default=[""], help="words in the names of cases")
    args = parser.parse_args()
    machine.main()
    model, n = models.load(), args.positions
    full = [n - 32] * 8
    idle = [64] + [n - 32] * 7

    def case(
        lengths: Sequence[int], active: Sequence[int], streams: int, of: int = 8, **options: Any
    ) -> Callable[[], Case]:
        """Distribute the same cells among streams, n cells for each of `of` sequences."""
        cells = of * n // streams
        return partial(Case, model, lengths, active, streams=streams, cells=cells, **options)

    striped = partial(case, full[:1], [0], 1, placement="striped:4")
    untiled = {"placement": "any"}

    def busy(streams: int, sequences: int = 8, **options: Any) -> Callable[[], Case]:
        """Distribute 8 * n cells among busy sequences."""
        size = 8 * n // sequences
        options = {"grown": size // 4, **options}
        return case([size - 32] * sequences, range(sequences), streams, **options)

    forks = partial(busy, shared=7 * n // 8, grown=n // 16)

    cases = {
        **{f"8 busy, streams {s}": busy(s, **untiled) for s in (1, 2, 4, 8)},
        "8 busy, streams 1, tiled": busy(1, placement="tiled"),
        **{f"{q} busy, streams {q}": busy(q, q) for q in (16, 32)},
        **{f"{q} busy, streams 1": busy(1, q, **untiled) for q in (16, 32)},
        **{f"{q} busy, streams 1, tiled": busy(1, q, placement="tiled") for q in (16, 32)},
        "8 forks, streams 1": forks(1, **untiled),
        "8 forks, streams 1, tiled": forks(1, placement="tiled"),
        "8 forks, streams 8": forks(8),
        **{
            f"sequences 0 1 2 of 8, streams {s}": case(full, [0, 1, 2], s, **untiled)
            for s in (1, 2, 4, 8)
        },
        "sequences 0 2 5 of 8, streams 8": case(full, [0, 2, 5], 8),
        "3 streams, no others": case(full[:3], range(3), 3, of=3),
        "1 short, alone, streams 8": case(idle[:1] + [0] * 7, [0], 8),
        "1 short, 7 idle, streams 8": case(idle, [0], 8),
        "1 short, alone, streams 1": case(idle[:1] + [0] * 7, [0], 1, **untiled),
        "1 short, 7 idle, streams 1": case(idle, [0], 1, **untiled),
        "1 alone, pool x 1": case(full[:1], [0], 1, of=1),
        "1 alone, pool x 16": case(full[:1], [0], 1, of=16),
        "1 alone, pool x 1, striped": striped(of=1),
        "1 alone, pool x 16, striped": striped(of=16),
        "sequences 0 1 2 of 8, streams 1, tiled": case(full, [0, 1, 2], 1, placement="tiled"),
        **windowed(args.windowed),
    }
    cases = {
        name: make() for name, make in cases.items() if any(word in name for word in args.only)
    }
    print(f"SmolLM2-135M float32, {n - 32} positions of {n} cells a sequence; milliseconds a step:")
    took = turns.take_turns(
        {name: turns.milliseconds(one.run, repeats=args.steps) for name, one in cases.items()},
        args.rounds,
    )
    middle = turns.table(took)
    for one, other in [
        *((f"8 busy, streams {s}", "8 busy, streams 1") for s in (2, 4, 8)),
        ("8 busy, streams 1", "8 busy, streams 8"),
        ("8 busy, streams 1, tiled", "8 busy, streams 8"),
        *((f"{q} busy, streams 1", f"{q} busy, streams {q}") for q in (16, 32)),
        *((f"{q} busy, streams 1, tiled", f"{q} busy, streams {q}") for q in (16, 32)),
        ("8 forks, streams 1", "8 forks, streams 8"),
        ("8 forks, streams 1, tiled", "8 forks, streams 8"),
        ("sequences 0 1 2 of 8, streams 1", "sequences 0 1 2 of 8, streams 8"),
        ("sequences 0 1 2 of 8, streams 1, tiled", "sequences 0 1 2 of 8, streams 8"),
        *(
            (f"sequences 0 1 2 of 8, streams {s}", "sequences 0 1 2 of 8, streams 1")
            for s in (2, 4, 8)
        ),
        ("sequences 0 2 5 of 8, streams 8", "sequences 0 1 2 of 8, streams 8"),
        ("sequences 0 2 5 of 8, streams 8", "3 streams, no others"),
        ("1 short, 7 idle, streams 8", "1 short, alone, streams 8"),
        ("1 short, 7 idle, streams 1", "1 short, alone, streams 1"),
        ("1 alone, pool x 16", "1 alone, pool x 1"),
        ("1 alone, pool x 1, striped", "1 alone, pool x 1"),
        ("1 alone, pool x 16, striped", "1 alone, pool x 16"),
        ("Gemma 3, cells for all", "Gemma 3, cells for its windows"),
    ]:
        if one in middle and other in middle:
            ratio = np.median(np.divide(took[one], took[other]))  # turn by turn
            print(f"  {one}  /  {other}: {ratio:.2f}")


if __name__ == "__main__":
    main()
