"""Minimal caches without a table, for comparison: B sequences of one length.

The tokens of each sequence are in order, and the cache stores only the common length. The models
run on them unchanged, in `replace_attend`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.ops.attention.dispatch import attention

Layout = Literal["BNKD", "BKND"]


class ByHand(NamedTuple):
    """Replaces a step: one token of each of B sequences, at the same position.

    layout: `[B, N, K, D]`, as in most textbooks, or `[B, K, N, D]`.
    buffers: L pairs of keys and values.
    """

    layout: Layout
    buffers: tuple
    token: jax.Array
    position: jax.Array
    embeddings: None = None

    @property
    def tokens(self) -> jax.Array:
        """Token ids, `[B, 1]`."""
        return self.token[:, None]

    @property
    def positions(self) -> jax.Array:
        """Position of each token, `[B, 1]`."""
        return jnp.full(self.tokens.shape, self.position, jnp.int32)

    @property
    def outputs(self) -> jax.Array:
        """Indices of the tokens."""
        return jnp.arange(self.token.size, dtype=jnp.int32)


def attend(
    step: ByHand,
    layer: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    implementation: None = None,
    causal: bool = True,
    bias: None = None,
    visible_until: None = None,
    return_mass: bool = False,
    **options: Any,
) -> tuple[ByHand, jax.Array]:
    """Write a token of each sequence, and attend to all before it."""
    del implementation, causal, bias, visible_until, return_mass  # models here pass the defaults
    position, axis = step.positions[:, 0], 1 if step.layout == "BNKD" else 2
    old = step.buffers[layer]
    batch, cells, heads = q.shape[0], old[0].shape[axis], k.shape[2]
    mask = jnp.broadcast_to(jnp.arange(cells) <= position[0], (batch, 1, cells))
    sequence, head = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    cell = position[:, None]
    where = (sequence, cell, head) if step.layout == "BNKD" else (sequence, head, cell)
    new = k, v = tuple(
        array.at[where].set(one[:, 0], mode="drop", unique_indices=True)
        for array, one in zip(old, (k, v), strict=True)
    )
    step = step._replace(buffers=(*step.buffers[:layer], new, *step.buffers[layer + 1 :]))
    if step.layout == "BNKD":
        return step, jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])
    return step, attention(q, k, v, mask, **options)


@contextmanager
def replace_attend() -> Iterator[None]:
    """Replace `jaxkv.attend` while a model is traced."""
    with patch.object(jaxkv, "attend", attend):
        yield


def make(
    layout: Layout, *, batch: int, layers: int, cells: int, kv_heads: int, head_dim: int
) -> tuple:
    """Make the buffers of an empty cache."""
    shape = (batch, cells, kv_heads) if layout == "BNKD" else (batch, kv_heads, cells)
    buffers = tuple((jnp.zeros((*shape, head_dim)),) * 2 for _ in range(layers))
    return jax.tree.map(jnp.copy, buffers)  # separate arrays, so that all can be donated
