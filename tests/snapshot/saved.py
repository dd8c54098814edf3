"""Caches to save, and randomly damaged files."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import merge


def damage(data, rng, stop):
    """Bytes with something before `stop` overwritten or removed, or the end cut off."""
    data, at = bytearray(data), rng.randrange(stop)
    match rng.randrange(8):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + rng.randrange(1, 9)]
        case 2:
            data[at : at + 8] = rng.choice([2**64 - 1, 2**62, 2**31, 0, 5]).to_bytes(8, "little")
        case 3:
            data[at : at + 4] = rng.choice([2**32 - 1, 2**31, 0, 9]).to_bytes(4, "little")
        case _:
            data[at] = rng.randrange(256)
    return bytes(data)


def randomize(cache, seed=0):
    """A cache with random numbers in every cell of all layers."""

    def draw(x):
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)

    rng = np.random.default_rng(seed)
    return merge(cache.table, jax.tree.map(draw, cache.buffers))
