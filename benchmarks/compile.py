"""Size of a compiled decode step, and the CPU seconds until it is compiled.

Run `python -m benchmarks.compile`. It compares a cache by hand with streams and with one pool. Only
shapes are used, and nothing runs, so that the compilers of GPUs and TPUs need no device (wheels:
`docs/kernels.md`). The counts are the same in each run; all JAX caches are empty before a program.
"""

import argparse
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

import jaxkv
from benchmarks import by_hand

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 9, 3, 64, 512  # of SmolLM2-135M, with fewer tokens
WIDTH = HEADS * HEAD_DIM
PROGRAMS = "by hand", "streams", "one pool"
H100 = Path(__file__).parents[1] / "tests" / "data" / "h100.txt"
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}


def shape_of_params(layers: int) -> dict:
    """Shapes of a transformer without rotary embeddings."""
    wide, narrow = (WIDTH, WIDTH), (WIDTH, KV_HEADS * HEAD_DIM)
    sizes = {"q": wide, "k": narrow, "v": narrow, "o": wide, "up": (WIDTH, 4 * WIDTH)}
    layer = {name: array(*size) for name, size in sizes.items()} | {"down": array(4 * WIDTH, WIDTH)}
    return {"embed": array(VOCABULARY, WIDTH), "layers": [layer] * layers}


def array(*sizes: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape of an array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def forward(params: dict, step: jaxkv.Step) -> tuple[jaxkv.Step, jax.Array]:
    """The transformer, for a step or for `by_hand.ByHand`."""
    x = jnp.take(params["embed"], step.tokens, axis=0)
    for layer, w in enumerate(params["layers"]):
        h = normalize(x)
        q, k, v = ((h @ w[n]).reshape(*step.tokens.shape, -1, HEAD_DIM) for n in "qkv")
        step, out = jaxkv.attend(step, layer, q, k, v)
        x = x + out.reshape(x.shape) @ w["o"]
        x = x + jax.nn.relu(normalize(x) @ w["up"]) @ w["down"]
    return step, x.reshape(-1, WIDTH)[step.outputs] @ params["embed"].T


def normalize(x: jax.Array) -> jax.Array:
    """Divide by the root of the mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def program_of(name: str, layers: int, sequences: int, cells: int) -> tuple[Callable, tuple]:
    """A decode step and the shapes of its arguments; the second argument is the cache."""
    tokens, sizes = array(sequences, dtype=jnp.int32), {"kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    if name == "by hand":

        def step_by_hand(params: dict, cache: tuple, tokens: jax.Array) -> tuple:
            buffers, position = cache
            with by_hand.replace_attend():
                step, logits = forward(params, by_hand.ByHand("BKND", buffers, tokens, position))
            return (step.buffers, position + 1), jnp.argmax(logits, axis=-1)

        make = partial(by_hand.make, "BKND", batch=sequences, layers=layers, cells=cells, **sizes)
        cache = jax.eval_shape(make), array(dtype=jnp.int32)
        return step_by_hand, (shape_of_params(layers), cache, tokens)

    def step(params: dict, cache: jaxkv.Cache, tokens: jax.Array) -> tuple:
        plan = jaxkv.plan_step(cache, tokens)
        step, logits = forward(params, jaxkv.apply(cache, plan.ubatch))
        tokens = jnp.where(plan.ok, jnp.argmax(logits, axis=-1), tokens)
        return step.cache, tokens, plan.reason

    spec = jaxkv.CacheSpec.attention(layers=layers, **sizes)
    split = {"cells": cells, "streams": sequences}
    split = split if name == "streams" else {"cells": cells * sequences}
    cache = jax.eval_shape(lambda: jaxkv.make_cache(spec, sequences=sequences, **split))
    return step, (shape_of_params(layers), cache, tokens)


def device_of(platform: str) -> jax.Device | None:
    """A device that a compiler needs no hardware for; None for the CPU."""
    if platform == "cpu":
        return None
    found = {"topology_name": "v5e:2x2"}
    if platform == "cuda":
        one = {"topology_name": "1x1x1", "topology": "1x1x1"}
        found = {**one, "target_config": H100.read_text()}
    return topologies.get_topology_desc(platform=platform, **found).devices[0]


def measure(step: Callable, shapes: tuple, device: jax.Device | None = None) -> dict[str, float]:
    """Counts in the compiled program, and CPU seconds to trace, lower and compile it."""
    named = nullcontext()
    if device is not None:
        sharding = SingleDeviceSharding(device)
        shapes = jax.tree.map(lambda x: x.update(sharding=sharding), shapes)
        if device.platform in ("cuda", "gpu"):
            h100 = AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu")
            named = use_abstract_mesh(AbstractMesh((), (), abstract_device=h100))
    jax.clear_caches()
    times = [time.process_time()]
    with named:
        traced = jax.jit(step, donate_argnums=1).trace(*shapes)
        times.append(time.process_time())
        lowered = traced.lower()
    times.append(time.process_time())
    text = lowered.compile().as_text()
    times.append(time.process_time())
    seconds = [end - start for start, end in pairwise(times)]
    return counts_of(text) | dict(zip(("trace", "lower", "compile"), seconds, strict=True))


def counts_of(text: str) -> dict[str, int]:
    """Instructions, kernels of the main computation, loops and branches of a compiled program."""
    entry = text[text.index("\nENTRY") :]
    names = re.findall(r"= (?:\([^=]*\)|\S+) ([a-z\-]+)\(", entry[: entry.index("\n}")])
    return {
        "instructions": text.count(" = "),
        "kernels": sum(name not in FREE for name in names),
        "loops": text.count(" while("),
        "branches": text.count(" conditional("),
    }


def main() -> None:
    """Print a line for each program, platform and number of sequences."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--cells", type=int, default=1024, help="of each sequence")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--platforms", nargs="+", default=["cpu"], help="of cpu, cuda and tpu")
    args = parser.parse_args()
    columns = "instructions", "kernels", "loops", "branches", "trace", "lower", "compile"
    for platform in args.platforms:
        device = device_of(platform)
        for sequences in args.sequences:
            print(f"{platform}, {sequences} x {args.cells} cells", *columns, sep="  ")
            for name in PROGRAMS:
                found = measure(*program_of(name, args.layers, sequences, args.cells), device)
                values = (f"{found[x]:{len(x)}.{2 * (found[x] % 1 != 0)}f}" for x in columns)
                print(f"  {name:20s}", *values, sep="  ", flush=True)


if __name__ == "__main__":
    main()
