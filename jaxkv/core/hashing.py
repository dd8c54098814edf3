"""Stamps and digests: numbers that tell one content from every other.

What the buffers hold for a token depends on the token and on all that came before it, so its stamp
does too. Two plans that would put different tokens into the same cells are told apart by it, and so
is what stands in a cell today from what an earlier table knew. A digest is the same for
all of a stream: equal digests, equal content. Like every hash they may err once in 2**32 times.
"""

from collections.abc import Mapping
from zlib import crc32

import jax
import jax.numpy as jnp


def mix(value: jax.Array) -> jax.Array:
    """Scramble uint32 so that every bit depends on every other: MurmurHash3's last step."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def chain_hashes(*fields: jax.Array) -> jax.Array:
    """Make one number of several of 32 bits, elementwise; their order counts. uint32."""
    value = jnp.uint32(0)
    for field in fields:
        value = mix(value * jnp.uint32(31) + field.astype(jnp.uint32))
    return value


def hash_overwritten_cells(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the stamps of cells whose content, stamped `old`, is written over by a copy of `new`.

    Both go into it: the cell holds other bytes than before, in another place than those copied.
    uint32, elementwise.
    """
    return mix(old + mix(new + 1))


def sum_hashes(*numbers: jax.Array) -> jax.Array:
    """Make one number of several that are hashes already, elementwise; uint32.

    A digest of little is made of single numbers, which compilers compute again wherever they are
    used: here, in each layer. What a sum along an axis gives they keep.
    """
    return jnp.sum(mix(jnp.stack(numbers)), axis=0, dtype=jnp.uint32)


def hash_contents(
    tokens: jax.Array | None,
    embeddings: jax.Array | None,
    extra: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Make a number of each token; uint32.

    Args:
      tokens: `[R, T]` int32, or None where embeddings come instead.
      embeddings: `[R, T, d]`, or None where tokens come instead.
      extra: `[R, T, ...]` by name, what else a model is told of each token.

    Returns:
      `[R, T]` uint32.
    """
    if tokens is not None:
        found = mix(tokens.astype(jnp.uint32))
    else:
        assert embeddings is not None
        found = _hash_numbers(embeddings)
    for name, numbers in sorted((extra or {}).items()):
        found = chain_hashes(found, jnp.uint32(crc32(name.encode())), _hash_numbers(numbers))
    return found


def _hash_numbers(numbers: jax.Array) -> jax.Array:
    """Make a number of those of each token, `[R, T, ...]`; `[R, T]` uint32."""
    numbers = jax.lax.stop_gradient(numbers)
    if numbers.dtype.itemsize < 4:
        floating = jnp.issubdtype(numbers.dtype, jnp.floating)
        numbers = numbers.astype(jnp.float32 if floating else jnp.int32)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    bits = bits.reshape(*numbers.shape[:2], -1)  # numbers of 64 bits are two words each
    place = mix(jnp.arange(bits.shape[-1], dtype=jnp.uint32))
    place = place.reshape((1,) * (bits.ndim - 1) + (-1,))
    return jnp.sum(mix(bits ^ place), axis=-1, dtype=jnp.uint32)


def token_hashes(
    contents: jax.Array,
    positions: jax.Array,
    sequences: jax.Array,
    valid: jax.Array,
    context: jax.Array,
) -> jax.Array:
    """Make the stamps of tokens that are written together.

    Args:
      contents: `[R, T]` uint32, see `hash_contents`.
      positions: `[R, T]` int32.
      sequences: `[R, T]` int32.
      valid: `[R, T]` bool, the tokens that are there.
      context: `[R]` uint32, the digest of all that each row's tokens go on from.

    Returns:
      `[R, T]` uint32.
    """
    token = chain_hashes(contents, positions, sequences)
    together = jnp.sum(jnp.where(valid, token, 0), dtype=jnp.uint32)
    return mix(token ^ mix(together + mix(context))[:, None])
