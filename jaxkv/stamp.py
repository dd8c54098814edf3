"""Stamps: numbers that tell one writing of a row from every other.

The row of a token depends on the token and on all that came before it, so its stamp does too. Two
plans that would put different tokens into the same cells are told apart by it, and so are the rows
of today from those that an earlier table knew. Like every hash it may err once in 2**32 times.
"""

import jax
import jax.numpy as jnp

from jaxkv.batch import Batch


def mix(value: jax.Array) -> jax.Array:
    """Scramble uint32 so that every bit depends on every other: MurmurHash3's last step."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def content(batch: Batch) -> jax.Array:
    """Number what comes in, token by token; uint32, the shape of `batch.valid`."""
    if batch.embeddings is None:
        return mix(batch.tokens.astype(jnp.uint32))
    numbers = jax.lax.stop_gradient(batch.embeddings).astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    place = mix(jnp.arange(bits.shape[-1], dtype=jnp.uint32)).reshape(
        (1,) * (bits.ndim - 1) + (-1,)
    )
    return jnp.sum(mix(bits ^ place), axis=-1, dtype=jnp.uint32)


def stamps(batch: Batch, before: jax.Array) -> jax.Array:
    """Make the stamps of tokens that are written together.

    Args:
      batch: the tokens of one ubatch, positions and all.
      before: `[]` uint32, a number for all that was written before.

    Returns:
      uint32, the shape of `batch.valid`.
    """
    token = mix(content(batch) ^ mix(batch.positions.astype(jnp.uint32)))
    token = mix(token ^ mix(batch.sequences.astype(jnp.uint32) + 1))
    together = jnp.sum(jnp.where(batch.valid, token, 0), dtype=jnp.uint32)
    return mix(token ^ mix(together + mix(before)))
