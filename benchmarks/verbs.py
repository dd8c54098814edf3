"""Cost of each verb, and its growth with the number of cells.

Run `python -m benchmarks.verbs`. The cache is a pool that is three quarters full, shared by 32
sequences. For the next plan it is also 8 empty streams with as many cells, of one sequence each.
For each verb it prints the time until the call returns, the time until the result is ready, and the
slope. The slope is the power of the number of cells with which the time grows (1 is linear).
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import machine

SEQUENCES = 32
STREAMS = 8


def filled(cells: int) -> jaxkv.Cache:
    """Make a pool, three quarters full, with equally many tokens of each sequence."""
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, rope=None)
    cache = jaxkv.make_cache(spec, cells=cells, sequences=SEQUENCES)
    batch = jaxkv.make_batch(
        np.zeros(cells * 3 // 4, np.int32), sequences=np.arange(cells * 3 // 4) % SEQUENCES
    )
    for ubatch in jaxkv.init_batch(cache, batch, ubatch_size=4096).check().ubatches:
        step = jaxkv.apply(cache, ubatch)
        cache = jaxkv.Cache(table=step.table, buffers=step.buffers)
    return cache


def next_plan(cells: int, window: jaxkv.Window | None = None) -> Callable[[], object]:
    """Plan a token for each of some sequences with a stream each."""
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, window=window)
    sizes = {"cells": cells, "sequences": STREAMS, "streams": STREAMS}
    cache = jaxkv.make_cache(spec, **sizes, max_rollback=cells)
    step, ids, ones = jax.jit(jaxkv.plan_step), jnp.arange(STREAMS), jnp.ones(STREAMS, bool)
    return lambda: step(cache, ids, sequences=ids, active=ones)


def verbs(cache: jaxkv.Cache) -> dict[str, Callable[[], object]]:
    """All verbs of a cache, by name."""
    each = jaxkv.make_batch([[1]] * SEQUENCES)
    prompt = jaxkv.make_batch(np.zeros(512, np.int32), sequences=np.arange(512) % SEQUENCES)
    ids, ones = jnp.arange(SEQUENCES), jnp.ones(SEQUENCES, bool)
    step = jax.jit(jaxkv.plan_step)
    plan = jaxkv.init_batch(cache, each)
    begun = jaxkv.apply(cache, plan)
    later = jaxkv.Cache(table=begun.table, buffers=begun.buffers)
    table = cache.table
    cells = cache.table.num_cells
    middle = cells // SEQUENCES // 2
    return {
        "init_batch, a token each": lambda: jaxkv.init_batch(cache, each),
        "init_batch, 512 tokens": lambda: jaxkv.init_batch(cache, prompt),
        "plan_step, a token each": lambda: step(cache, ids, sequences=ids, active=ones),
        "plan_step, a stream each": next_plan(cells),
        "and a window": next_plan(cells, jaxkv.Window.sliding(cells // 8)),
        "apply": lambda: jaxkv.apply(cache, plan),
        "seq_rm": lambda: jaxkv.seq_rm(cache, 3, middle, -1),
        "seq_cp": lambda: jaxkv.seq_cp(cache, 3, 4, 0, middle).cache,
        "seq_keep": lambda: jaxkv.seq_keep(cache, 3),
        "seq_add": lambda: jaxkv.seq_add(cache, 3, middle, -1, delta=5).cache,
        "seq_div": lambda: jaxkv.seq_div(cache, 3, middle, -1, divisor=2).cache,
        "seq_pos_min": lambda: cache.seq_pos_min(3),
        "seq_pos_max": lambda: cache.seq_pos_max(3),
        "can_resume": lambda: cache.can_resume(3, middle),
        "used": lambda: cache.num_used_cells(),
        "clear": lambda: jaxkv.clear(cache),
        "rewind": lambda: jaxkv.rewind(later, to=table),
        "init_update": lambda: jaxkv.init_update(cache),
        "defrag_plan": lambda: jaxkv.defrag_plan(cache),
    }


def microseconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median time until a call returns, and until its result is ready."""
    returned, there = [], []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        done = work()
        returned.append(time.perf_counter() - start)
        jax.block_until_ready(done)
        there.append(time.perf_counter() - start)
    return 1e6 * float(np.median(returned[2:])), 1e6 * float(np.median(there[2:]))


def main() -> None:
    """Print the microseconds of each verb."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cells", type=int, nargs="+", default=[1024, 4096, 8192, 65536])
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    machine.main()
    took = {}
    for cells in args.cells:
        for name, work in verbs(filled(cells)).items():
            took.setdefault(name, []).append(microseconds(work, args.repeats))
    print(
        f"{SEQUENCES} sequences; microseconds until the call returns / until the result is there:"
    )
    print(f"  {'cells':26s}" + "".join(f"{cells:>16d}" for cells in args.cells) + "    slope")
    grows = np.log(args.cells[-1] / args.cells[0])
    for name, times in took.items():
        slope = np.log(times[-1][1] / times[0][1]) / grows
        cells = "".join(f"{returned:8.0f} /{there:6.0f}" for returned, there in times)
        print(f"  {name:26s}{cells}   {slope:6.2f}")


if __name__ == "__main__":
    main()
