"""Cost of a complete defragmentation, relative to a plain copy of the moved bytes.

Run `python -m benchmarks.defrag`. Every second cell is empty, which is the worst case: no two
neighbours move together. Each number of moves per plan is repeated until no cell must move.
"""

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import machine


def gappy(cells: int, layers: int) -> jaxkv.Cache:
    """Make a cache of SmolLM2's shape in which every second cell is empty."""
    cache = jaxkv.make_cache(
        jaxkv.CacheSpec.attention(layers=layers, kv_heads=3, head_dim=64), cells=cells, sequences=2
    )
    batch = jaxkv.make_batch(np.zeros(cells, np.int32), sequences=np.arange(cells) % 2)
    for ubatch in jaxkv.init_batch(cache, batch, ubatch_size=512).check().ubatches:
        step = jaxkv.apply(cache, ubatch)
        cache = jaxkv.Cache(table=step.table, buffers=step.buffers)
    return jaxkv.seq_rm(cache, 1)[0]


def defragged(cache: jaxkv.Cache, max_moves: int | None) -> tuple[jaxkv.Cache, int, float]:
    """Close all gaps; the cache, the number of plans, and the seconds."""
    plans, start = 0, time.perf_counter()
    while True:
        plan = jaxkv.defrag_plan(cache, max_moves=max_moves)
        if plan.is_empty:
            jax.block_until_ready(cache)
            return cache, plans, time.perf_counter() - start
        cache = jaxkv.apply(cache, plan, donate=True)
        plans += 1


@partial(jax.jit, donate_argnames="buffers")
def copied(buffers: Any) -> Any:
    """Copy a quarter of the cells (those that must move) in one block each."""

    def half(x: jax.Array) -> jax.Array:
        count = x.shape[2] // 4
        part = jax.lax.dynamic_slice_in_dim(x, 2 * count, count, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(x, part, 0, axis=2)

    return jax.tree.map(half, buffers)


def main() -> None:
    """Print the time of a complete defragmentation for several sizes of chunk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--cells", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    machine.main()
    chunks = [None, 256, 16, 1]
    took: dict[int | None, list[float]] = {chunk: [] for chunk in chunks}
    plain = []
    for turn in range(args.rounds + 1):  # the first compiles
        for chunk in chunks if turn % 2 else chunks[::-1]:
            if chunk == 1 and turn > 1:  # a thousand plans: once suffices
                continue
            cache = gappy(args.cells, args.layers)
            used = int(cache.num_used_cells())
            jax.block_until_ready(cache)
            cache, plans, seconds = defragged(cache, chunk)
            assert bool(jnp.all(cache.table.position[0, :used] >= 0)), "a gap is left"
            took[chunk].append((seconds, plans))
            start = time.perf_counter()
            buffers = jax.block_until_ready(copied(cache.buffers))
            plain.append(time.perf_counter() - start)
            del cache, buffers
    moved = args.cells // 4
    size = moved * args.layers * 2 * 3 * 64 * 4
    base = 1e3 * np.median(plain[1:])
    print(f"{args.cells} cells, every second one empty, {args.layers} layers: {moved} cells move,")
    print(f"{size / 1e6:.0f} MB; copying as much in one piece takes {base:.1f} ms")
    for chunk, runs in took.items():
        times = [1e3 * seconds for seconds, _ in runs[1:] or runs]
        middle = np.median(times)
        print(
            f"  {'all' if chunk is None else chunk:>4} moves a plan  {runs[0][1]:5d} plans  "
            f"{middle:8.1f} ms  ({min(times):.1f} to {max(times):.1f})  "
            f"{base / middle:.2f} x the speed of the copy"
        )


if __name__ == "__main__":
    main()
