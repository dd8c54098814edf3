"""Time of attention alone, relative to the cache's memory bandwidth. Arrays only.

Run `python -m benchmarks.attention`. The default shape is that of SmolLM2, 3 heads of 64 in groups
of 3. `--shape 8b` has 8 heads of 128 in groups of 4 in bfloat16, for GPUs, where jaxkv runs its
kernel. The distinct layers fill four times the last-level cache, so all reads come from memory.
`jaxkv` is the attention of `jaxkv.attend`, in several implementations. The others are
`jax.nn.dot_product_attention`, which takes `[B, N, K, D]`, and torch where it is installed.

By default one token of each of `--batch` streams attends to all cells. `--tokens` sets the number
of prompt tokens per stream, and `--seen` the fraction of cells that they attend to. With `--pool`
each token is of another sequence, and they share the visible cells of their stream in runs of 64.
These options compare jaxkv's implementations only. `jaxkv, mass` also computes the attention
mass, and with `--select n`, `jaxkv, selected` reads n random cells of each token.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine, turns
from jaxkv.kv.attend_lists import attend_lists
from jaxkv.kv.layer_kv import HeadSizes, make_layer_kv
from jaxkv.ops.attention.dispatch import finalize, partial_attention
from jaxkv.ops.attention.softmax import AttentionOptions
from jaxkv.ops.attention.visibility import Visibility

SHAPES = {"smollm2": (3, 3, 64, jnp.float32), "8b": (8, 4, 128, jnp.bfloat16)}


def layers_of(one: Callable, layers: int) -> Callable[..., jax.Array]:
    """Run one implementation of attention over all layers, each after the one before."""

    @jax.jit
    def run(q: jax.Array, k: list[jax.Array], v: list[jax.Array], *others: Any) -> jax.Array:
        for layer in range(layers):
            q = q + one(q, k[layer], v[layer], *others) * jnp.asarray(0.01, q.dtype)
        return q

    return run


def torch_side(q: np.ndarray, k: list[np.ndarray], v: list[np.ndarray], group: int) -> Callable:
    """Torch's attention on its fastest layout, `[B, H, N, D]`."""
    import torch

    torch.set_num_threads(machine.threads())
    query = torch.from_numpy(q.transpose(0, 2, 1, 3).copy())
    pairs = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(k, v, strict=True)]

    def run() -> object:
        with torch.inference_mode():
            for a, b in pairs:
                torch.nn.functional.scaled_dot_product_attention(query, a, b, enable_gqa=group > 1)

    return run


@partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, visibility, options, implementation=None):
    """Attend from each list of queries to the stream of the list."""
    return finalize(partial_attention(q, k, v, visibility, options, implementation), q, options)


def attend_lists_of(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visibility: Visibility,
    options: AttentionOptions,
    select: jax.Array | None = None,
) -> jax.Array:
    """Attend as `jaxkv.attend` does, and use the mass if the options require it."""
    layer_kv = make_layer_kv(k, v, HeadSizes(k.shape[1], k.shape[3], v.shape[3]))
    out, mass = attend_lists(layer_kv, q, visibility, select, options, (), None)
    return out if mass is None else out + 0 * jnp.sum(mass).astype(q.dtype)


def visibility_of(
    batch: int, cells: int, tokens: int = 1, seen: float = 1.0, pool: bool = False
) -> Visibility:
    """Tokens of each stream that attend to its first cells, see the module docstring."""
    live = round(seen * cells)
    cell = np.arange(cells)
    owner = cell // 64 % tokens if pool else np.zeros_like(cell)
    at = np.full(tokens, live) if pool else live - tokens + np.arange(tokens)
    text = np.arange(tokens) if pool else np.zeros(tokens, int)
    words = -(-tokens // 32) if pool else 1
    owns = (owner // 32 == np.arange(words)[:, None]) & (cell < live)
    owners = np.where(owns, np.uint32(1) << (owner % 32).astype(np.uint32), np.uint32(0))

    def for_each(x: np.ndarray, dtype: Any) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, dtype), (batch, *x.shape))

    return Visibility(
        position=for_each(cell, jnp.int32),
        owners=for_each(owners, jnp.uint32),
        streams=jnp.arange(batch),
        at=for_each(at, jnp.int32),
        word=for_each(text // 32, jnp.int32),
        bit=for_each(np.uint32(1) << (text % 32).astype(np.uint32), jnp.uint32),
        window=None,
        causal=True,
        all_streams=True,
    )


def sides_of(
    shape: tuple[int, int, int, Any],
    visibility: Visibility,
    layers: int,
    names: list[str] | None,
    count: int | None,
) -> dict[str, Callable[[], object]]:
    """All available sides on the same arrays, after a check that their outputs agree.

    count: of the selected cells.
    """
    heads, group, size, dtype = shape
    (batch, tokens), cells = visibility.at.shape, visibility.position.shape[1]
    rng = np.random.default_rng(0)
    k, v = (
        [rng.random((batch, heads, cells, size), np.float32) for _ in range(layers)]
        for _ in range(2)
    )
    q = rng.random((batch, tokens, heads * group, size), np.float32)
    gpu = jax.default_backend() == "gpu"
    forms: dict[str, Callable] = {"jaxkv": partial(attend, implementation=None)}
    for name in ("tiles", "whole", "xla", *["cudnn"] * gpu):
        forms[f"jaxkv, {name}"] = partial(attend, implementation=name)
    forms["jaxkv, mass"] = lambda *args: attend_lists_of(
        *args[:4], replace(args[4], keep_weights=True)
    )
    plain = tokens == 1 and bool((np.asarray(visibility.owners) != 0).all())
    if plain:
        forms["jax.nn.dot_product_attention"] = jax.nn.dot_product_attention
    if plain and gpu:
        forms["the same, cudnn"] = partial(jax.nn.dot_product_attention, implementation="cudnn")
    if names is not None:
        forms = {name: form for name, form in forms.items() if name in names}
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), (q, k, v))
    turned = (arrays[0], *jax.tree.map(lambda x: x.swapaxes(1, 2) + 0, arrays[1:]))
    # The `Visibility` is an argument: as a constant, the compiler would remove a cache's work.
    ours = (*arrays, visibility, AttentionOptions())
    sides: dict[str, Callable[[], object]] = {
        name: partial(layers_of(form, layers), *(ours if name.startswith("jaxkv") else turned))
        for name, form in forms.items()
    }
    wanted, *others = (np.asarray(side(), np.float32) for side in sides.values())
    for other in others:
        np.testing.assert_allclose(other, wanted, atol=1e-4 if dtype == jnp.float32 else 2e-2)
    if count is not None:
        select = rng.random((batch, tokens, cells), np.float32).argsort(axis=2)[..., :count]
        side = layers_of(attend_lists_of, layers)
        sides["jaxkv, selected"] = partial(side, *ours, jnp.asarray(select, jnp.int32))
    if plain and jax.default_backend() == "cpu":
        if find_spec("torch") is not None:
            sides["torch, scaled dot product"] = torch_side(q, k, v, group)
        else:
            print("torch is not installed here: pip install torch")
    return sides


def main() -> None:
    """Print the time of a layer in each implementation, and the fraction of the bandwidth."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--tokens", type=int, default=1, help="of each stream")
    parser.add_argument("--seen", type=float, default=1.0, help="share of the cells")
    parser.add_argument("--select", type=int, help="number of selected cells of each token")
    parser.add_argument("--pool", action="store_true", help="each token is of another sequence")
    parser.add_argument("--sides", nargs="*", help="those to compare, all by default")
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
        visibility = visibility_of(batch, cells, args.tokens, args.seen, args.pool)
        sides = sides_of(SHAPES[args.shape], visibility, layers, args.sides, args.select)
        print(
            f"batch {batch} x {args.tokens}, {cells} cells, {args.seen:.0%} seen, {layers} layers "
            f"of {layer:.1f} MB; ms a layer:"
        )
        took = turns.take_turns(
            {n: turns.milliseconds(s, repeats=2, units=layers) for n, s in sides.items()},
            args.rounds,
        )
        turns.table(took, own=["jaxkv"], megabytes=layer * args.seen, read=read)


if __name__ == "__main__":
    main()
