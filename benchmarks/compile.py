"""Time until the first step: tracing, lowering and compiling, measured separately.

Run `python -m benchmarks.compile`; `--model smollm2` uses a whole model instead of its attention
alone. Shapes suffice, since the time depends on the program and not on the contents of arrays. All
JAX caches are empty at the start of every turn.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64  # of SmolLM2-135M
PARTS = ("trace", "lower", "compile")


def attention_alone(tokens: int, cells: int) -> tuple[Callable, tuple]:
    """Plan, apply, and attend in each layer: a function, and its arguments as shapes."""
    spec = jaxkv.CacheSpec.attention(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    make = partial(jaxkv.make_cache, spec, cells=cells, sequences=tokens)

    def step(cache: object, token: jax.Array) -> tuple:
        everyone = jnp.arange(tokens, dtype=jnp.int32)
        step = jaxkv.apply(cache, jaxkv.plan_step(cache, token, sequences=everyone))
        x = jnp.ones((*step.valid.shape, HEADS, HEAD_DIM))
        for layer in range(LAYERS):
            k, v = x[:, :, :KV_HEADS], x[:, :, KV_HEADS : 2 * KV_HEADS]
            step, out = jaxkv.attend(step, layer, x, k, v)
            x = x + out
        return step.cache, x

    return step, (jax.eval_shape(make), jax.ShapeDtypeStruct((tokens,), jnp.int32))


def whole_model(name: str, tokens: int, cells: int) -> tuple[Callable, tuple]:
    """The same for a model with its weights."""
    model = models.load(name)

    def step(params: object, cache: object, token: jax.Array) -> tuple:
        everyone = jnp.arange(tokens, dtype=jnp.int32)
        plan = jaxkv.plan_step(cache, token, sequences=everyone)
        step, logits = model.forward(params, jaxkv.apply(cache, plan))
        return step.cache, logits

    cache = jax.eval_shape(lambda: model.make_cache(cells=cells, sequences=tokens))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    return step, (params, cache, jax.ShapeDtypeStruct((tokens,), jnp.int32))


def one_turn(step: Callable, shapes: tuple) -> tuple[list[float], int]:
    """Seconds of each part, and the lines of the lowered program."""
    jax.clear_caches()
    times = [time.perf_counter()]
    # The cache is donated, as in a loop; it is the argument before the tokens.
    traced = jax.jit(step, donate_argnums=len(shapes) - 2).trace(*shapes)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    lowered.compile()
    times.append(time.perf_counter())
    return np.diff(times).tolist(), lowered.as_text().count("\n")


def main() -> None:
    """Print the seconds of each part: the median, the lowest and the highest."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", help="a whole model, by default attention alone")
    parser.add_argument("--tokens", type=int, default=8, help="one of each sequence")
    parser.add_argument("--cells", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    if args.model:
        step, shapes = whole_model(args.model, args.tokens, args.cells)
    else:
        step, shapes = attention_alone(args.tokens, args.cells)
    one_turn(step, shapes)  # imports, and programs that compile once per process
    turns = [one_turn(step, shapes) for _ in range(args.turns)]
    print(f"{turns[0][1]} lines of StableHLO; seconds:")
    for name, took in zip(PARTS, np.transpose([times for times, _ in turns]), strict=True):
        print(f"  {name:8s} {np.median(took):6.2f}  ({took.min():.2f} to {took.max():.2f})")


if __name__ == "__main__":
    main()
