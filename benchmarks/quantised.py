"""Bytes and time of keys and values of 8 and 4 bits, in attention and writes.

Run `python -m benchmarks.quantised`. Keys and values have SmolLM2's shape, 3 heads of 64 in groups
of 3, in layers that fill four times the last-level cache in float32. `jaxkv.attend` writes a token
of each of `--batch` sequences, a stream each, and attends to all cells. Every dtype stores the same
numbers; those of 8 bits have a scale for each head and cell. "+rotate" stores rotated heads.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import machine, turns

HEADS, GROUP, SIZE = 3, 3, 64
DTYPES = ("float32", "bfloat16", "int8", "float8_e4m3fn", "int8+rotate", "int4", "int4+rotate")


def side_of(
    dtype: str, batch: int, cells: int, layers: int, queries: str
) -> tuple[Callable[[], object], int]:
    """Make a step of a token for each sequence in a full cache; return it and the cache's bytes."""
    cache = jaxkv.make_cache(
        jaxkv.CacheSpec.attention(layers=layers, kv_heads=HEADS, head_dim=SIZE),
        cells=cells,
        sequences=batch,
        streams=batch,
        dtype=dtype.removesuffix("+rotate"),
        rotate=dtype.endswith("+rotate"),
    )

    def numbers(rows: int, tokens: int, heads: int, seed: int) -> jax.Array:
        drawn = np.random.default_rng(seed).standard_normal((rows, tokens, heads, SIZE))
        return jnp.asarray(drawn, jnp.float32)

    @partial(jax.jit, donate_argnames="cache")
    def fill(cache: jaxkv.Cache, ubatch: jaxkv.Ubatch, k: jax.Array) -> jaxkv.Cache:
        step = jaxkv.apply(cache, ubatch)
        for layer in range(layers):
            step = jaxkv.write_kv(step, layer, k, k)
        return step.cache

    told = jaxkv.make_batch([[0] * (cells - 1)] * batch)
    for ubatch in jaxkv.init_batch(cache, told, ubatch_size=512 * batch).check().ubatches:
        cache = fill(cache, ubatch, numbers(*ubatch.valid.shape, HEADS, 0))

    @partial(jax.jit, donate_argnames="buffers")
    def step(table: object, buffers: object, q: jax.Array, k: jax.Array) -> tuple:
        cache = jaxkv.Cache(table=table, buffers=buffers)
        every = jnp.arange(batch)
        step = jaxkv.apply(cache, jaxkv.plan_step(cache, every, sequences=every))
        for layer in range(layers):
            step, out = jaxkv.attend(step, layer, q, k, k)
            q = q + out * 0.01
        return step.cache.buffers, q

    table, held, size = cache.table, cache.buffers, cache.buffers.nbytes
    q = numbers(batch, 1, HEADS * GROUP, 1).astype(queries)
    k = numbers(batch, 1, HEADS, 2)

    def work() -> object:  # writes the same cell each time, since the table stays
        nonlocal held
        held, out = step(table, held, q, k)
        return out

    return work, size


def main() -> None:
    """Print bytes and milliseconds per layer for each dtype, and the ratios to float32."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--megabytes", type=float, default=160, help="of all layers in float32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--queries", default="float32", help="dtype of the queries")
    args = parser.parse_args()
    machine.main()
    for batch, cells in itertools.product(args.batch, args.cells):
        layer = 2 * batch * HEADS * cells * SIZE * 4 / 1e6
        layers = max(2, -(-int(args.megabytes) // int(layer + 1)))
        sides = {name: side_of(name, batch, cells, layers, args.queries) for name in args.dtypes}
        print(f"batch {batch}, {cells} cells, {layers} layers; ms a layer, and bytes of buffers:")
        took = turns.take_turns(
            {n: turns.milliseconds(w, repeats=2, units=layers) for n, (w, _) in sides.items()},
            args.rounds,
        )
        turns.table(took, own=args.dtypes[:1])
        for name, (_, size) in sides.items():
            print(f"  {name:13s}  {size:,} bytes, {size / sides[args.dtypes[0]][1]:.3f}")


if __name__ == "__main__":
    main()
