"""Hashes of tokens and of streams, and the versions of streams that are made from them.

The version of a stream is a number that each ubatch and each edit of the stream changes. Streams
with different contents have equal versions with a probability of 2**-32.
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
    value = mix(fields[0].astype(jnp.uint32))
    for field in fields[1:]:
        value = mix(value * jnp.uint32(31) + field.astype(jnp.uint32))
    return value


def mix_linearly(*fields: jax.Array) -> jax.Array:
    """Hash several 32-bit arrays elementwise to one uint32 array, in fewer operations.

    The products of the fields with odd numbers are added before the bits are mixed.
    """
    value = fields[0].astype(jnp.uint32)
    for field in fields[1:]:
        # 0x9E3779B1 is a prime close to 2**32 divided by the golden ratio. A product with an odd
        # number loses no bits.
        value = value * jnp.uint32(0x9E3779B1) + field.astype(jnp.uint32)
    return mix(value)


def cell_stamps(version: jax.Array, cell: jax.Array) -> jax.Array:
    """Return the stamps of cells that a ubatch fills, from the version of the stream after it."""
    # The cells of a ubatch in a stream have different indices, so their stamps are different.
    return version * jnp.uint32(0x9E3779B1) + cell.astype(jnp.uint32)


def overwrite_stamps(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the stamps of cells after an overwrite, from old stamps and stamps of new cells."""
    # `mix(0)` is 0. Without the 1, an overwrite of stamp 0 by stamp 0 would give 0 again.
    return mix(old + mix(new + 1))


def hash_contents(
    tokens: jax.Array | None,
    embeddings: jax.Array | None,
    extra: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Return a hash of each token or embedding and its additional inputs, `[R, T]` uint32."""
    if tokens is not None:
        hashes = mix(tokens.astype(jnp.uint32))
    else:
        assert embeddings is not None
        hashes = _hash_numbers(embeddings)
    for name, numbers in sorted((extra or {}).items()):
        hashes = chain_hashes(hashes, jnp.uint32(crc32(name.encode())), _hash_numbers(numbers))
    return hashes


def _hash_numbers(numbers: jax.Array) -> jax.Array:
    """Hash the numbers of each token, `[R, T, ...]`, to `[R, T]` uint32."""
    numbers = jax.lax.stop_gradient(numbers)
    if numbers.dtype.itemsize < 4:
        floating = jnp.issubdtype(numbers.dtype, jnp.floating)
        numbers = numbers.astype(jnp.float32 if floating else jnp.int32)
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint32)
    bits = bits.reshape(*numbers.shape[:2], -1)  # numbers of 64 bits are two words each
    # A sum does not depend on order, so each word is first combined with a hash of its index.
    place = mix(jnp.arange(bits.shape[-1], dtype=jnp.uint32))
    place = place.reshape((1,) * (bits.ndim - 1) + (-1,))
    return jnp.sum(mix(bits ^ place), axis=-1, dtype=jnp.uint32)


def hash_rows(*fields: jax.Array) -> jax.Array:
    """Hash the rows of 32-bit arrays `[S, n]`, and the order of their elements, to `[S]` uint32."""
    # The index is hashed too, since a sum does not depend on the order of its terms.
    place = jnp.arange(fields[0].shape[1], dtype=jnp.uint32)[None]
    return jnp.sum(mix_linearly(place, *fields), axis=1, dtype=jnp.uint32)


def next_version(version: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    """Return the versions of streams after an edit, from hashes of the streams before and after."""
    # The arguments of an edit do not suffice: a copy also depends on the stream of its source.
    return jnp.where(old == new, version, chain_hashes(version, new))
