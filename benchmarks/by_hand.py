"""Caches as one writes them by hand, for benchmarks to compare with: B sequences of one length.

There is no table: every sequence is as long as every other, its tokens stand in order, and all that
is known is that length. The models run on them as they are, since a memory is whatever `attend`
understands.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.ops.attention.api import attention

Layout = Literal["BNKD", "BKND"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class ByHand:
    """Keys and values of B sequences with N cells each.

    k, v: L arrays; `[B, N, K, D]`, the form of most textbooks, or `[B, K, N, D]`.
    layout: which.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    layout: Layout = field(metadata={"static": True})


def make(layout: Layout, *, batch: int, layers: int, cells: int, heads: int, size: int) -> ByHand:
    """Make an empty cache."""
    shape = (batch, cells, heads, size) if layout == "BNKD" else (batch, heads, cells, size)
    k, v = (tuple(jnp.zeros(shape) for _ in range(layers)) for _ in range(2))
    return ByHand(k=k, v=v, layout=layout)


def step_ubatch(tokens: jax.Array, position: jax.Array) -> jaxkv.Ubatch:
    """Lay out one token of each sequence, `[B]`, all at the same position."""
    batch = tokens.shape[0]
    everyone = jnp.arange(batch, dtype=jnp.int32)
    at = jnp.full((batch, 1), position, jnp.int32)
    return jaxkv.Ubatch(
        tokens=tokens[:, None],
        embeddings=None,
        positions=at,
        sequences=everyone[:, None],
        streams=everyone,
        slots=at,
        stamps=jnp.zeros((batch, 1), jnp.uint32),
        valid=jnp.ones((batch, 1), bool),
        outputs=everyone,
        order=everyone,
        last=at[:, 0] - 1,
    )


@jaxkv.attend.register
def _attend(
    memory: ByHand,
    layer: int,
    ubatch: jaxkv.Ubatch,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    implementation: None = None,
    **options: Any,
) -> tuple[ByHand, jax.Array]:
    del implementation  # the layout decides
    position, axis = ubatch.slots[:, 0], 1 if memory.layout == "BNKD" else 2
    batch, cells, heads = q.shape[0], memory.k[layer].shape[axis], k.shape[2]
    mask = jnp.broadcast_to(jnp.arange(cells) <= position[0], (batch, 1, cells))
    sequence, head = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    cell = position[:, None]
    where = (sequence, cell, head) if memory.layout == "BNKD" else (sequence, head, cell)

    def put(old: tuple[jax.Array, ...], new: jax.Array) -> tuple[jax.Array, ...]:
        array = old[layer].at[where].set(new[:, 0], mode="drop", unique_indices=True)
        return (*old[:layer], array, *old[layer + 1 :])

    memory = ByHand(k=put(memory.k, k), v=put(memory.v, v), layout=memory.layout)
    k, v = memory.k[layer], memory.v[layer]
    if memory.layout == "BNKD":
        return memory, jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
    return memory, attention(q, k, v, mask, **options)
