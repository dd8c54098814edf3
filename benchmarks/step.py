"""Time of a whole decode step of a model with 8 billion random weights, in bfloat16.

Run `python -m benchmarks.step` on a GPU. The model has `--layers` of the 32 layers of Llama 3.1 8B,
without embedding and head. A step is a plan, `apply`, and in each layer norms, products, a write
and attention. The cache is filled except for a few cells, with a stream for each sequence, or with
`--pool` one for all. Sides differ only in `implementation=`; `params` is the same step without a
cache.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from benchmarks import machine, turns

WIDTH, HIDDEN, HEADS, GROUP, SIZE = 4096, 14336, 8, 4, 128


def weights_of(layers: int) -> list[dict[str, jax.Array]]:
    """Random weights, separate for each layer."""
    shapes = {
        "qkv": (HEADS * (GROUP + 2) * SIZE, WIDTH),
        "out": (WIDTH, HEADS * GROUP * SIZE),
        "up": (2 * HIDDEN, WIDTH),
        "down": (WIDTH, HIDDEN),
    }
    draw = jax.jit(
        lambda key, shape: 0.02 * jax.random.normal(key, shape, "bfloat16"), static_argnums=1
    )
    keys = jax.random.split(jax.random.key(0), (layers, len(shapes)))
    return [
        {name: draw(key, shape) for key, (name, shape) in zip(row, shapes.items(), strict=True)}
        for row in keys
    ]


def norm(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))).astype("bfloat16")


def forward(params: list, step: jaxkv.Step, x: jax.Array, attend: Any) -> tuple:
    """Run the layers on `[R, T, WIDTH]`."""
    for layer, w in enumerate(params):
        y = norm(x) @ w["qkv"].T
        y = y.reshape(*y.shape[:2], HEADS, GROUP + 2, SIZE)
        q = y[..., :GROUP, :].reshape(*y.shape[:2], HEADS * GROUP, SIZE)
        step, out = attend(step, layer, q, y[..., GROUP, :], y[..., GROUP + 1, :])
        x = x + out.reshape(*x.shape[:2], -1) @ w["out"].T
        gate, up = jnp.split(norm(x) @ w["up"].T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ w["down"].T
    return step, x


def side(params: list, batch: int, cells: int, pool: bool, implementation: str | None) -> Any:
    """A step that is repeated from the same table, so that each is the first one."""
    layers, everyone = len(params), jnp.arange(batch, dtype=jnp.int32)
    cache = jaxkv.make_cache(
        jaxkv.CacheSpec.attention(layers=layers, kv_heads=HEADS, head_dim=SIZE),
        cells=cells * batch if pool else cells,
        sequences=batch,
        streams=1 if pool else batch,
        dtype="bfloat16",
    )
    for seq in range(batch):
        prompt = jaxkv.make_batch([1] * (cells - 32), sequences=seq)
        for ubatch in jaxkv.init_batch(cache, prompt, ubatch_size=cells).check().ubatches:
            step = jaxkv.apply(cache, ubatch)
            cache = jaxkv.Cache(
                table=step.table, buffers=step.buffers
            )  # buffers of zeros suffice for a time
    table, buffers = cache.table, cache.buffers
    attend = partial(jaxkv.attend, implementation=implementation)

    @partial(jax.jit, donate_argnames="buffers")
    def step(params: list, table: Any, buffers: Any, token: jax.Array) -> tuple:
        cache = jaxkv.Cache(table=table, buffers=buffers)
        step = jaxkv.apply(cache, jaxkv.plan_step(cache, token, sequences=everyone))
        x = jnp.ones((*step.valid.shape, WIDTH), "bfloat16")
        step, x = forward(params, step, x, attend)
        return step.cache.buffers, x

    def again() -> jax.Array:
        nonlocal buffers
        buffers, x = step(params, table, buffers, jnp.ones(batch, jnp.int32))
        return x

    return again


def without_cache(params: list, batch: int) -> Any:
    def attend(step: jaxkv.Step, layer: int, q: jax.Array, k: Any, v: Any) -> tuple:
        return step, q

    x = jnp.ones((1, batch, WIDTH), "bfloat16")
    step = jax.jit(lambda params, x: forward(params, None, x, attend)[1])
    return partial(step, params, x)


def main() -> None:
    """Print the milliseconds of a step of each side."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--cells", type=int, default=8192, help="for each sequence")
    parser.add_argument("--pool", action="store_true")
    parser.add_argument("--sides", nargs="*", default=["None", "whole"])
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    print(f"device     {jax.devices()[0].device_kind}, jax {jax.__version__}")
    read = machine.device_copy(gigabytes=4.0)
    print(f"bandwidth  {read:.0f} GB/s copied by the device, read and written")
    params = weights_of(args.layers)
    for batch in args.batch:
        sides = {
            name: side(params, batch, args.cells, args.pool, None if name == "None" else name)
            for name in args.sides
        }
        sides["weights"] = without_cache(params, batch)
        held = sum(x.nbytes for x in jax.tree.leaves(params)) / 1e6
        cached = 2 * 2 * args.layers * batch * args.cells * HEADS * SIZE / 1e6
        print(
            f"batch {batch}, {held:.0f} MB of weights, {cached:.0f} MB of keys and values; a step:"
        )
        took = turns.take_turns(
            {n: turns.milliseconds(s, repeats=10) for n, s in sides.items()}, args.rounds
        )
        turns.table(took, own=["None"], megabytes=held + cached, read=read)


if __name__ == "__main__":
    main()
