"""Recurrence with a diagonal transition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


def scan_diagonal(
    decay: Float[Array, "R T C"],
    x: Float[Array, "R T C"],
    state: Float[Array, "R C"],
    counts: Int32[Array, "R n"],
) -> tuple[Float[Array, "R T C"], Float[Array, "R n C"]]:
    """Run `state = decay * state + x` over time.

    Args:
      decay: decays, 1 at padding.
      x: inputs, 0 at padding.
      state: state before the first token of each row.
      counts: for each returned state, the number of tokens of its row that it includes, 0 to T.

    Returns:
      Two float32 arrays: the states after each token, and the states after `counts` tokens.

    Examples:
      >>> decay, x = jnp.full((1, 3, 1), 0.5), jnp.ones((1, 3, 1))
      >>> out, states = scan_diagonal(decay, x, jnp.full((1, 1), 8.0), jnp.array([[0, 3]]))
      >>> out.ravel(), states.ravel()
      (Array([5.  , 3.5 , 2.75], dtype=float32), Array([8.  , 2.75], dtype=float32))
    """

    def combine(early: tuple, late: tuple) -> tuple:
        # Two steps state -> a * state + b, applied one after the other, are one step of the same
        # form.
        return early[0] * late[0], late[0] * early[1] + late[1]

    state = state.astype(jnp.float32)
    decays, sums = jax.lax.associative_scan(combine, (decay, x), axis=1)
    out = decays * state[:, None] + sums
    # The states are the outputs, so some of them are selected with a gather.
    every = jnp.concatenate([state[:, None], out], axis=1)
    return out, jnp.take_along_axis(every, counts[..., None], axis=1)
