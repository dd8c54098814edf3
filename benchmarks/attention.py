"""How near to the memory's speed is attention alone? One token of each sequence, arrays only.

Run `python -m benchmarks.attention`. Keys and values of SmolLM2's shape, 3 heads of 64 in groups of
3, all visible, or `--shape 8b` for 8 heads of 128 in groups of 4 in bfloat16, which says something
on a GPU. As many distinct layers follow each other as fill four times the last-level cache, so
nothing is read from a cache. `jaxkv` is what `jaxkv.attend` runs, in several ways; the others are
`jax.nn.dot_product_attention`, which takes `[B, N, K, D]`, and torch where it is installed.
"""

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine, turns
from jaxkv.ops.attention.api import attend
from jaxkv.ops.attention.sight import Sight
from jaxkv.ops.attention.softmax import Options

SHAPES = {"smollm2": (3, 3, 64, jnp.float32), "8b": (8, 4, 128, jnp.bfloat16)}


def layers_of(one: Callable, layers: int) -> Callable[..., jax.Array]:
    """Run one form of attention over all layers, each waiting for the one before."""

    @jax.jit
    def run(q: jax.Array, k: list[jax.Array], v: list[jax.Array], *others: Any) -> jax.Array:
        for layer in range(layers):
            q = q + one(q, k[layer], v[layer], *others) * jnp.asarray(0.01, q.dtype)
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


def sight_of_all(batch: int, cells: int) -> Sight:
    """A stream for each of the batch, and a token in each that sees all cells."""
    one = jnp.zeros((batch, 1), jnp.int32)
    return Sight(
        position=jnp.broadcast_to(jnp.arange(cells), (batch, cells)),
        owners=jnp.ones((batch, 1, cells), jnp.uint32),
        streams=jnp.arange(batch),
        at=one + cells - 1,
        word=one,
        bit=one.astype(jnp.uint32) + 1,
        window=None,
        causal=True,
        all_streams=True,
    )


def sides_of(
    shape: tuple[int, int, int, Any], batch: int, cells: int, layers: int
) -> dict[str, Callable[[], object]]:
    """All sides that can take part here, on the same arrays, after a look that they agree."""
    heads, group, size, dtype = shape
    rng = np.random.default_rng(0)
    k, v = (
        [rng.random((batch, heads, cells, size), np.float32) for _ in range(layers)]
        for _ in range(2)
    )
    q = rng.random((batch, 1, heads * group, size), np.float32)
    sight = sight_of_all(batch, cells)
    forms: dict[str, Callable] = {
        "jaxkv": partial(attend, implementation=None),
        "jaxkv, whole": partial(attend, implementation="whole"),
        "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
    }
    if jax.default_backend() == "gpu":
        forms["jaxkv, cudnn"] = partial(attend, implementation="cudnn")
        forms["the same, cudnn"] = partial(jax.nn.dot_product_attention, implementation="cudnn")
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), (q, k, v))
    turned = (arrays[0], *jax.tree.map(lambda x: x.swapaxes(1, 2) + 0, arrays[1:]))
    # The sight is no constant: the compiler would leave out what a cache has to do.
    ours = (*arrays, sight, Options())
    sides: dict[str, Callable[[], object]] = {
        name: partial(layers_of(form, layers), *(ours if name.startswith("jaxkv") else turned))
        for name, form in forms.items()
    }
    wanted, *others = (np.asarray(side(), np.float32) for side in sides.values())
    for other in others:
        np.testing.assert_allclose(other, wanted, atol=1e-4 if dtype == jnp.float32 else 2e-2)
    if jax.default_backend() == "cpu":
        if find_spec("torch") is not None:
            sides["torch, scaled dot product"] = torch_side(q, k, v, group)
        else:
            print("torch is not installed here: pip install torch")
    return sides


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
    if jax.default_backend() == "cpu":
        read = machine.bandwidth()["read"]
    else:
        read = machine.device_copy()
        print(f"bandwidth  {read:.0f} GB/s copied by the device, read and written")
    heads, _, size, dtype = SHAPES[args.shape]
    for batch, cells in itertools.product(args.batch, args.cells):
        layer = 2 * batch * heads * cells * size * jnp.dtype(dtype).itemsize / 1e6
        layers = max(2, -(-int(args.megabytes) // int(layer + 1)))
        sides = sides_of(SHAPES[args.shape], batch, cells, layers)
        print(f"batch {batch}, {cells} cells, {layers} layers of {layer:.1f} MB; ms a layer:")
        took = turns.take_turns(
            {n: turns.milliseconds(s, repeats=2, units=layers) for n, s in sides.items()},
            args.rounds,
        )
        turns.table(took, own=["jaxkv"], megabytes=layer, read=read)


if __name__ == "__main__":
    main()
