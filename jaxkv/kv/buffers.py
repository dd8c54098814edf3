"""The keys and values that lie beside a table of cells: all the bytes of an attention memory."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxkv.rope import Rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Buffers:
    """One array of keys and one of values for each layer, with a key and a value for each cell.

    Layers stay apart: an array that holds them all is copied, layer by layer, at every step. Heads
    come before cells, so that attention reads a head's keys in one piece.

    k: L arrays `[S, K, N, D]`, keys as they were rotated for the cell's position less its shift.
    v: L arrays `[S, K, N, Dv]`, values.
    ropes: the rotary embedding of each layer's keys; None where keys carry no position.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    ropes: tuple[Rope | None, ...] = field(metadata={"static": True})


def write(
    rows: Buffers, layer: int, streams: jax.Array, slots: jax.Array, k: jax.Array, v: jax.Array
) -> Buffers:
    """Write the keys and values of a ubatch into their cells.

    Stored values are always finite, so that a hidden one is harmless: 0 times it is 0. Where a
    head's key or value is not finite in the dtype of the buffers, its value is stored as zero and
    its key as NaN, which shows in every token that sees it; hidden by a choice, it shows in none.

    Args:
      rows: the buffers.
      layer: which layer they are of, static.
      streams: `[R]` int32, the stream of each row of tokens.
      slots: `[R, T]` int32, the cell of each token; a token past the last cell is left out.
      k: `[R, T, K, D]`, keys, rotated.
      v: `[R, T, K, Dv]`, values.

    Returns:
      The buffers after it.
    """
    k, v = k.astype(rows.k[layer].dtype), v.astype(rows.v[layer].dtype)
    # What is not finite, less itself, is NaN, and all else 0: a sum, where `all` would take more.
    finite = jnp.isfinite(sum(jnp.sum(x - x, axis=3, keepdims=True) for x in (k, v)))
    k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)
    if slots.size * k.shape[2] == 1:
        # A write of one cell of one head becomes an update of a slice, which the compiler does
        # twice: in place, and in a copy of the array for attention to read. A second one, which is
        # left out, keeps it a scatter.
        slots = jnp.pad(slots, [(0, 0), (0, 1)], constant_values=jnp.iinfo(jnp.int32).max)
        k, v = (jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]) for x in (k, v))

    def put(old: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
        # Every index is spelled out: with a slice among them the write becomes copies of the array.
        where = (streams[:, None, None], jnp.arange(new.shape[2])[None, None], slots[..., None])
        array = old[layer].at[where].set(new, mode="drop", unique_indices=True)
        return (*old[:layer], array, *old[layer + 1 :])

    return replace(rows, k=put(rows.k, k), v=put(rows.v, v))
