"""Minimal caches without a table, for comparison: B sequences of one length.

The tokens of each sequence are in order, and the cache stores only the common length. The models
run on them unchanged: `jaxkv.attend` requires of a table only the method `attend`, and a ubatch
made for it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.ops.attention.dispatch import attention

Layout = Literal["BNKD", "BKND"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class ByHand:
    """Replaces the table: the layout of L pairs of keys and values of B sequences.

    layout: `[B, N, K, D]`, as in most textbooks, or `[B, K, N, D]`.
    """

    layout: Layout = field(metadata={"static": True})
    spec: None = field(default=None, metadata={"static": True})

    def attend(
        self,
        buffers: tuple,
        layer: int,
        ubatch: jaxkv.Ubatch,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        implementation: None = None,
        causal: bool = True,
        bias: None = None,
        visible_until: None = None,
        **options: Any,
    ) -> tuple["ByHand", tuple, jax.Array]:
        """Write a token of each sequence, and attend to all before it."""
        del (
            implementation,
            causal,
            bias,
            visible_until,
        )  # the layout decides, and the model has no other options
        position, axis = ubatch.slots[:, 0], 1 if self.layout == "BNKD" else 2
        old = buffers[layer]
        batch, cells, heads = q.shape[0], old[0].shape[axis], k.shape[2]
        mask = jnp.broadcast_to(jnp.arange(cells) <= position[0], (batch, 1, cells))
        sequence, head = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
        cell = position[:, None]
        where = (sequence, cell, head) if self.layout == "BNKD" else (sequence, head, cell)
        new = k, v = tuple(
            array.at[where].set(one[:, 0], mode="drop", unique_indices=True)
            for array, one in zip(old, (k, v), strict=True)
        )
        buffers = (*buffers[:layer], new, *buffers[layer + 1 :])
        if self.layout == "BNKD":
            return self, buffers, jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
        return self, buffers, attention(q, k, v, mask, **options)


def make(
    layout: Layout, *, batch: int, layers: int, cells: int, kv_heads: int, head_dim: int
) -> jaxkv.Cache:
    """Make an empty cache."""
    shape = (batch, cells, kv_heads) if layout == "BNKD" else (batch, kv_heads, cells)
    buffers = tuple((jnp.zeros((*shape, head_dim)),) * 2 for _ in range(layers))
    buffers = jax.tree.map(jnp.copy, buffers)  # separate arrays, so that all can be donated
    return jaxkv.Cache(table=ByHand(layout=layout), buffers=buffers)


def step_ubatch(tokens: jax.Array, position: jax.Array) -> jaxkv.Ubatch:
    """Lay out one token of each sequence, `[B]`, at the same position."""
    batch = tokens.shape[0]
    everyone = jnp.arange(batch, dtype=jnp.int32)
    at = jnp.full((batch, 1), position, jnp.int32)
    return jaxkv.Ubatch(
        tokens=tokens[:, None],
        embeddings=None,
        positions=at,
        sequences=everyone[:, None],
        row_stream=everyone,
        row_sequence=everyone,
        slots=at,
        cell_hashes=jnp.zeros((batch, 1), jnp.uint32),
        valid=jnp.ones((batch, 1), bool),
        more=jnp.zeros((batch, 1), bool),
        outputs=everyone,
        output_index=everyone,
        hash_before=None,
        hash_after=None,
        spec=None,
        row_is_sequence=True,
    )
