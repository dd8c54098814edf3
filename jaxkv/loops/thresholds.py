"""Finding how good a logit must be to be among the best, without sorting a vocabulary.

A float's bits, turned so that they rise with the number, are an unsigned integer; the threshold is
found bit by bit, exactly, in 32 looks at each row.
"""

import jax
import jax.numpy as jnp


def keep_best(logits: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return which logits are among the best that weigh enough together.

    Args:
      logits: `[T, V]` float32.
      weights: `[T, V]`, at least 0: ones to count, probabilities to add up.
      wanted: `[T]`, what the best must weigh together at least; all are kept where they cannot.

    Returns:
      `[T, V]` bool. Equal logits are kept together.

    >>> logits = jnp.array([[0.5, -1.0, 2.0, 0.5]])
    >>> keep_best(logits, jnp.ones((1, 4)), jnp.array([2.0])).tolist()
    [[True, False, True, True]]
    """
    rank = _rising(logits)
    top = jnp.uint32(1 << 31)

    def bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (top >> i.astype(jnp.uint32))
        weight = jnp.sum(jnp.where(rank >= higher[:, None], weights, 0), axis=1)
        return jnp.where(weight >= wanted, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, bit, jnp.zeros(rank.shape[0], jnp.uint32))
    return rank >= threshold[:, None]


def _rising(x: jax.Array) -> jax.Array:
    """Return uint32, the shape of `x`, that are in the order of floats."""
    x = jnp.where(x == 0, 0, x.astype(jnp.float32))  # of the two zeros the positive one
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits & top, ~bits, bits | top)
