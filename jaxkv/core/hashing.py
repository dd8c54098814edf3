"""Hashes of cells and streams.

The hash of a cell depends on its token and on all preceding tokens. Two cells with different tokens
have equal hashes with a probability of 2**-32.
"""

from collections.abc import Mapping
from zlib import crc32

import jax
import jax.numpy as jnp


def mix(value: jax.Array) -> jax.Array:
    """Mix the bits of uint32 numbers with the last step of MurmurHash3."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


def chain_hashes(*fields: jax.Array) -> jax.Array:
    """Hash several 32-bit arrays elementwise to one uint32 array; the order of arrays matters."""
    value = jnp.uint32(0)
    for field in fields:
        value = mix(value * jnp.uint32(31) + field.astype(jnp.uint32))
    return value


def hash_overwritten_cells(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the hashes of cells after an overwrite, from old hashes and hashes of new contents."""
    return mix(old + mix(new + 1))


def sum_hashes(*numbers: jax.Array) -> jax.Array:
    """Combine several hash arrays elementwise into a uint32 array, regardless of order."""
    # A reduction is used because compilers would repeat elementwise operations in each layer.
    return jnp.sum(mix(jnp.stack(numbers)), axis=0, dtype=jnp.uint32)


def hash_contents(
    tokens: jax.Array | None,
    embeddings: jax.Array | None,
    extra: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Return a hash of each token or embedding and its additional inputs, `[R, T]` uint32."""
    if tokens is not None:
        found = mix(tokens.astype(jnp.uint32))
    else:
        assert embeddings is not None
        found = _hash_numbers(embeddings)
    for name, numbers in sorted((extra or {}).items()):
        found = chain_hashes(found, jnp.uint32(crc32(name.encode())), _hash_numbers(numbers))
    return found


def _hash_numbers(numbers: jax.Array) -> jax.Array:
    """Hash the numbers of each token, `[R, T, ...]`, to `[R, T]` uint32."""
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
    """Return the cell hashes of tokens that are written together, `[R, T]` uint32.

    The argument `contents` is the result of `hash_contents`. The argument `context`, `[R]` uint32,
    is the hash of each row's stream before the write. All arguments but `context` are `[R, T]`.
    """
    token = chain_hashes(contents, positions, sequences)
    together = jnp.sum(jnp.where(valid, token, 0), dtype=jnp.uint32)
    return mix(token ^ mix(together + mix(context))[:, None])
