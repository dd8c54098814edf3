"""A `Visibility` for a mask: each token has a separate owner."""

import jax.numpy as jnp
import numpy as np

from jaxkv.ops.attention.visibility import Visibility


def make_visibility(mask, streams, count):
    """A `Visibility` of `count` streams for a mask `[P, T, N]`; lists share none."""
    mask, streams = np.asarray(mask), np.asarray(streams, np.int32)
    lists, tokens, cells = mask.shape
    owners = np.zeros((count, -(-tokens // 32), cells), np.uint32)
    for t in range(tokens):
        owners[streams, t // 32] |= mask[:, t].astype(np.uint32) << np.uint32(t % 32)
    token = np.broadcast_to(np.arange(tokens), (lists, tokens))
    return Visibility(
        position=jnp.zeros((count, cells), jnp.int32),
        owners=jnp.asarray(owners),
        streams=jnp.asarray(streams),
        at=jnp.zeros((lists, tokens), jnp.int32),
        word=jnp.asarray(token // 32, jnp.int32),
        bit=jnp.uint32(1) << jnp.asarray(token % 32, jnp.uint32),
        window=None,
        causal=True,
        all_streams=lists == count,
    )
