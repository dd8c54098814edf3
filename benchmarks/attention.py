"""How near to the memory's speed is attention alone? One token of each sequence, arrays only.

Run `python -m benchmarks.attention`. Keys and values of SmolLM2's shape, 3 heads of 64 in groups of
3, all visible, or `--shape 8b` for 8 heads of 128 in groups of 4 in bfloat16, which says something
on a GPU. As many distinct layers follow each other as fill four times the last-level cache, so
nothing is read from a cache. `jaxkv` is what `jaxkv.attend` runs; the others are
`jax.nn.dot_product_attention`, which takes `[B, N, K, D]`, and torch where it is installed.
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine, turns
from jaxkv.tiles import attention_by_tiles

SHAPES = {"smollm2": (3, 3, 64, jnp.float32), "8b": (8, 4, 128, jnp.bfloat16)}


def layers_of(one: Callable, layers: int) -> Callable[..., jax.Array]:
    """Run one form of attention over all layers, each waiting for the one before."""

    @jax.jit
    def run(q: jax.Array, k: tuple[jax.Array, ...], v: tuple[jax.Array, ...]) -> jax.Array:
        for layer in range(layers):
            q = q + one(q, k[layer], v[layer]) * jnp.asarray(0.01, q.dtype)
        return q

    return run


def torch_side(q: np.ndarray, k: list[np.ndarray], v: list[np.ndarray], group: int) -> Callable:
    """Torch's own attention on its favourite layout, `[B, H, N, D]`."""
    import torch

    torch.set_num_threads(machine.threads())
    query = torch.from_numpy(q.transpose(0, 2, 1, 3).copy())
    pairs = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(k, v, strict=True)]

    def run() -> object:
        with torch.inference_mode():
            for a, b in pairs:
                torch.nn.functional.scaled_dot_product_attention(query, a, b, enable_gqa=group > 1)

    return run


def main() -> None:
    """Print the time of a layer in each form, and the fraction of the bandwidth."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--megabytes", type=float, default=160, help="of all layers together")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    machine.main()
    read = machine.bandwidth()["read"] if jax.default_backend() == "cpu" else None
    heads, group, size, dtype = SHAPES[args.shape]
    rng = np.random.default_rng(0)
    for batch in args.batch:
        for cells in args.cells:
            layer = 2 * batch * heads * cells * size * jnp.dtype(dtype).itemsize / 1e6
            layers = max(2, -(-int(args.megabytes) // int(layer + 1)))
            shape = (batch, heads, cells, size)
            k, v = ([rng.random(shape, np.float32) for _ in range(layers)] for _ in range(2))
            q = rng.random((batch, 1, heads * group, size), np.float32)
            mask = jnp.ones((batch, 1, cells), bool)
            pools = jnp.arange(batch)
            ours = layers_of(
                lambda q, k, v, m=mask, p=pools: attention_by_tiles(q, k, v, m, p), layers
            )
            theirs = layers_of(jax.nn.dot_product_attention, layers)
            device_q, device_k, device_v = jax.tree.map(
                lambda x: jnp.asarray(x, dtype), (q, tuple(k), tuple(v))
            )
            turned = jax.tree.map(lambda x: x.swapaxes(1, 2) + 0, (device_k, device_v))
            np.testing.assert_allclose(
                np.asarray(ours(device_q, device_k, device_v), np.float32),
                np.asarray(theirs(device_q, *turned), np.float32),
                atol=1e-4 if dtype == jnp.float32 else 2e-2,
            )
            sides = {
                "jaxkv": lambda r=ours, a=(device_q, device_k, device_v): r(*a),
                "jax.nn.dot_product_attention": lambda r=theirs, a=(device_q, *turned): r(*a),
            }
            if jax.default_backend() == "gpu":
                cudnn = layers_of(
                    lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn"),
                    layers,
                )
                sides["the same, cudnn"] = lambda r=cudnn, a=(device_q, *turned): r(*a)
            elif find_spec("torch") is not None:
                sides["torch, scaled dot product"] = torch_side(q, k, v, group)
            else:
                print("torch is not installed here: pip install torch")

            def timed(work: Callable, layers: int = layers) -> Callable[[], float]:
                def side() -> float:
                    start = time.perf_counter()
                    jax.block_until_ready(work())
                    return 1e3 * (time.perf_counter() - start) / layers

                return side

            print(f"batch {batch}, {cells} cells, {layers} layers of {layer:.1f} MB; ms a layer:")
            took = turns.take_turns({n: timed(w) for n, w in sides.items()}, args.rounds)
            turns.table(took, own=["jaxkv"], megabytes=layer, read=read)


if __name__ == "__main__":
    main()
