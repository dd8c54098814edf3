"""Cost and saving of a scan over layers: stacked layers in one array, against separate layers.

Run `python -m benchmarks.stacked`. It uses random weights of SmolLM2-135M's sizes without embedding
and head. Both sides run the same function for a layer: one in a Python loop over separate layers,
the other in a `jax.lax.scan` over stacked layers. Their outputs are compared. `--attention` omits
the weights: only planning, writing and attending remain. Compilers start with empty caches, and
steps alternate.
"""

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import machine, turns
from models.families.linear import linear

LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 1536, 9, 3, 64  # of SmolLM2-135M
PARTS = ("trace", "lower", "compile")


def weights_of(layers: int) -> dict[str, jax.Array]:
    """Random weights of all layers."""
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (2 * HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, (layers, *shape)) / shape[1] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def plain(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w.T


def layer(product: Any, step: jaxkv.Step, x: jax.Array, w: Any, number: Any) -> tuple:
    """Run a layer on `[R, T, WIDTH]`; without weights it only attends."""
    tokens = x.shape[:2]
    if w is None:
        qkv = jnp.concatenate([x, x[..., : 2 * KV_HEADS * HEAD_DIM]], axis=2)
    else:
        qkv = product(norm(x), w["qkv"])
    qkv = qkv.reshape(*tokens, -1, HEAD_DIM)
    q, k, v = jnp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=2)
    step, out = jaxkv.attend(step, number, q, k, v)
    if w is None:
        return step, x + out.reshape(x.shape)
    x = x + product(out.reshape(x.shape), w["out"])
    gate, up = jnp.split(product(norm(x), w["up"]), 2, axis=-1)
    return step, x + product(jax.nn.silu(gate) * up, w["down"])


def step(product: Any, params: Any, table: Any, buffers: Any, token: jax.Array) -> tuple:
    """Plan, apply, and run all layers: in a scan where they are stacked."""
    cache, everyone = (
        jaxkv.Cache(table=table, buffers=buffers),
        jnp.arange(len(token), dtype=jnp.int32),
    )
    begun = jaxkv.apply(cache, jaxkv.plan_step(cache, token, sequences=everyone))
    of_layer, carry = partial(layer, product), (begun, jnp.ones((*begun.valid.shape, WIDTH)))
    if buffers.stacked:
        carry, _ = jax.lax.scan(
            lambda carry, own: (of_layer(*carry, *own), None),
            carry,
            (params, jnp.arange(buffers.layers)),
        )
    else:
        for number in range(buffers.layers):
            carry = of_layer(*carry, None if params is None else params[number], number)
    return carry[0].cache.buffers, carry[1]


def side(
    product: Any, params: Any, batch: int, cells: int, used: int, dtype: str, stacked: bool
) -> tuple:
    """A step that is repeated, and the seconds of tracing, lowering and compiling it."""
    cache = jaxkv.make_cache(
        jaxkv.CacheSpec.attention(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM),
        cells=cells,
        sequences=batch,
        streams=batch,
        dtype=dtype,
        stacked=stacked,
    )
    for seq in range(batch):
        prompt = jaxkv.make_batch([1] * used, sequences=seq)
        for ubatch in jaxkv.init_batch(cache, prompt, ubatch_size=used).check().ubatches:
            step = jaxkv.apply(cache, ubatch)
            cache = jaxkv.Cache(
                table=step.table, buffers=step.buffers
            )  # buffers of zeros suffice for a time
    table, buffers = cache.table, cache.buffers
    if params is not None and not stacked:
        params = [jax.tree.map(lambda w, i=i: w[i], params) for i in range(LAYERS)]
    token = jnp.ones(batch, jnp.int32)
    jax.clear_caches()
    times = [time.perf_counter()]
    program = jax.jit(partial(step, product), donate_argnums=2)
    traced = program.trace(params, table, buffers, token)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    program = lowered.compile()
    times.append(time.perf_counter())

    def again() -> jax.Array:
        nonlocal buffers
        buffers, x = program(params, table, buffers, token)
        return x

    return again, np.diff(times)


def main() -> None:
    """Print the seconds until a step may run, and the milliseconds of a step, of each side."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, default=1, help="sequences, a stream for each")
    parser.add_argument("--cells", type=int, default=4096, help="for each sequence")
    parser.add_argument("--used", type=int, default=2048, help="tokens that a sequence has")
    parser.add_argument("--dtype", nargs="+", default=["float32", "int8", "bfloat16"])
    parser.add_argument("--attention", action="store_true", help="without weights")
    parser.add_argument("--plain", action="store_true", help="x @ w.T, and not that of models")
    parser.add_argument("--compiles", type=int, default=3, help="how often each is compiled")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    if jax.config.jax_compilation_cache_dir:
        parser.error("expected no compilation cache: unset JAX_COMPILATION_CACHE_DIR")
    machine.main()
    params = None if args.attention else weights_of(LAYERS)
    for dtype in args.dtype:
        product = plain if args.plain else linear
        sizes = product, params, args.batch, args.cells, args.used, dtype
        side(*sizes, True)  # imports, and programs that compile once per process
        sides, seconds = {}, {}
        for _ in range(args.compiles):
            for name, stacked in {"apart": False, "stacked": True}.items():
                sides[name], took = side(*sizes, stacked)
                seconds.setdefault(name, []).append(took)
        print(f"{dtype}, {args.used} of {args.cells} cells, batch {args.batch}; until it runs:")
        for name, found in seconds.items():
            parts = dict(zip(PARTS, np.median(found, axis=0), strict=True))
            shown = ", ".join(f"{part} {took:.2f}" for part, took in parts.items())
            print(f"  {name:8s} {sum(parts.values()):6.2f}  ({shown})")
        np.testing.assert_allclose(sides["stacked"](), sides["apart"](), rtol=2e-2, atol=2e-2)
        took = {name: turns.milliseconds(run, repeats=5) for name, run in sides.items()}
        turns.table(turns.take_turns(took, args.rounds), own=["apart"])


if __name__ == "__main__":
    main()
