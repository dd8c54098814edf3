"""Recurrence of Mamba-2, computed in chunks. The H heads form G groups of J heads each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

CHUNK = 64
"""Number of tokens of a chunk: a smaller chunk needs more products, a larger one more scores."""


def scan_ssd(
    x: Float[Array, "R T H D"],
    steps: Float[Array, "R T H"],
    rate: Float[Array, " H"],
    b: Float[Array, "R T G M"],
    c: Float[Array, "R T G M"],
    state: Float[Array, "R H D M"],
    counts: Int32[Array, "R n"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H D"], Float[Array, "R n H D M"]]:
    """Run the recurrence of Mamba-2: `state = exp(step * rate) * state + step * x * b`.

    The output of a token is `state @ c`. Tokens are computed in chunks, see Dao and Gu,
    Transformers are SSMs, 2024, section 6. llama.cpp: `ggml_ssm_scan`.

    Args:
      x: inputs, finite also at padding.
      steps: step sizes, 0 at padding. A step of size 0 leaves the state unchanged.
      rate: decay rate of each head, below 0.
      b: projection of the input into the state. G, the number of groups of heads, divides H.
      c: projection of the state to the output.
      state: state before the first token of each row.
      counts: for each returned state, the number of tokens of its row that the state includes. The
        counts must be the ones that `Ubatch.state_write_steps` returns.
      chunk: number of tokens of a chunk.

    Returns:
      The outputs, and the state after each number of tokens in the argument `counts`, in float32.

    Examples:
      >>> x, step, one = jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1)), jnp.ones((1, 3, 1, 1))
      >>> half = jnp.log(jnp.array([0.5]))
      >>> state, counts = jnp.full((1, 1, 1, 1), 8.0), jnp.array([[2, 3]])
      >>> out, states = scan_ssd(x, step, half, one, one, state, counts)
      >>> out.ravel(), states.ravel()
      (Array([5.  , 3.5 , 2.75], dtype=float32), Array([3.5 , 2.75], dtype=float32))
    """
    rows, length, heads, size = x.shape
    groups = b.shape[2]
    grouped = (groups, heads // groups)
    steps = steps.astype(jnp.float32)
    logs = (steps * rate.astype(jnp.float32)[None, None]).reshape(rows, length, *grouped)
    x = (x.astype(jnp.float32) * steps[..., None]).reshape(rows, length, *grouped, size)
    b, c = b.astype(jnp.float32), c.astype(jnp.float32)
    state = state.astype(jnp.float32).reshape(rows, *grouped, size, -1)

    def body(carry: tuple, part: tuple) -> tuple:
        state, early = carry
        x, logs, b, c, soon = part
        total = jnp.cumsum(logs, axis=1)
        # With total_t, the sum of log decays up to t, the state after t is exp(total_t) * state +
        # the sum over s <= t of exp(total_t - total_s) * x_s * b_s. The output is its product with
        # c_t.
        by_head = jnp.moveaxis(total, 1, -1)  # [R, G, J, t]
        causal = jnp.tri(x.shape[1], dtype=bool)[None, None, None]
        between = jnp.where(causal, by_head[..., :, None] - by_head[..., None, :], -jnp.inf)
        scores = jnp.einsum("rtgm,rsgm->rgts", c, b)[:, :, None] * jnp.exp(between)
        out = jnp.einsum("rgjts,rsgjd->rtgjd", scores, x)
        out += jnp.einsum("rtgm,rgjdm->rtgjd", c, state) * jnp.exp(total)[..., None]
        # `early` is the state after the first count of tokens. Zeros in `soon` give later tokens a
        # step of 0, which leaves the state unchanged.
        if 0 < kept < length:
            soon = soon[..., None, None]
            early = _state_after_chunk(early, x * soon[..., None], logs * soon, b)
        return (_state_after_chunk(state, x, logs, b), early), out

    # The last `kept` counts differ from their predecessors by at most one token, so these states
    # are computed token by token from `early`. If `kept` is `length`, `early` is the state before
    # the row.
    kept = min(counts.shape[1] - 1, length)
    soon = (jnp.arange(length)[None] < counts[:, :1]).astype(jnp.float32)
    carry, parts = (state, state), (x, logs, b, c, soon)
    if length <= chunk:
        carry, out = body(carry, parts)
    else:
        carry, out = jax.lax.scan(
            body, carry, tuple(_split_into_chunks(part, chunk) for part in parts)
        )
        out = jnp.moveaxis(out, 0, 1).reshape(rows, -1, *out.shape[3:])[:, :length]
    last, early = carry
    states = (
        _states_after_counts(early, x, logs, b, counts[:, -kept - 1 :]) if kept else last[:, None]
    )
    before = jnp.broadcast_to(state[:, None], (rows, counts.shape[1] - 1 - kept, *state.shape[1:]))
    states = jnp.concatenate([before, states], axis=1)
    return out.reshape(rows, length, heads, size), states.reshape(*counts.shape, heads, size, -1)


def _state_after_chunk(state: jax.Array, x: jax.Array, logs: jax.Array, b: jax.Array) -> jax.Array:
    """Return the state after a chunk, from inputs times steps (`x`) and log decays (`logs`)."""
    total = jnp.cumsum(logs, axis=1)
    # After token s, its input decays by the factors of all later tokens of the chunk.
    x = x * jnp.exp(total[:, -1:] - total)[..., None]
    added = jnp.einsum("rsgjd,rsgm->rgjdm", x, b)
    return jnp.exp(total[:, -1])[..., None, None] * state + added


def _states_after_counts(
    state: jax.Array, x: jax.Array, logs: jax.Array, b: jax.Array, counts: jax.Array
) -> jax.Array:
    """Return, for each i, the state after `counts[:, i]` tokens; for i = 0 this is `state`."""

    def body(state: jax.Array, step: tuple) -> tuple:
        at, advances = step
        x_, logs_, b_ = (
            jnp.take_along_axis(part, at.reshape(-1, *[1] * (part.ndim - 1)), axis=1)
            for part in (x, logs, b)
        )
        new = _state_after_chunk(state, x_, logs_, b_)
        state = jnp.where(advances.reshape(-1, *[1] * (state.ndim - 1)), new, state)
        return state, state

    at, advances = counts[:, :-1].T, (counts[:, 1:] > counts[:, :-1]).T
    _, states = jax.lax.scan(body, state, (at, advances))
    return jnp.concatenate([state[:, None], jnp.moveaxis(states, 0, 1)], axis=1)


def _split_into_chunks(part: jax.Array, chunk: int) -> jax.Array:
    """Cut `[R, T, ...]` into `[chunks, R, chunk, ...]`, with zeros as padding."""
    missing = -part.shape[1] % chunk
    part = jnp.pad(part, [(0, 0), (0, missing)] + [(0, 0)] * (part.ndim - 2))
    return jnp.moveaxis(part.reshape(part.shape[0], -1, chunk, *part.shape[2:]), 1, 0)
