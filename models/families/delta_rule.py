"""Gated delta rule: a recurrence over the tokens of a row, computed in chunks.

See Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024. All sums are float32. H value heads are
in G groups, and the heads of a group share queries and keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

CHUNK = 64
"""Number of tokens of a chunk."""


def scan_gated_delta(
    q: Float[Array, "R T G M"],
    k: Float[Array, "R T G M"],
    v: Float[Array, "R T H D"],
    log_decay: Float[Array, "R T H"],
    beta: Float[Array, "R T H"],
    state: Float[Array, "R H M D"],
    counts: Int32[Array, "R n"],
    *,
    chunk: int = CHUNK,
) -> tuple[Float[Array, "R T H D"], Float[Array, "R n H M D"]]:
    """Run the gated delta rule over time.

    Each token changes the state in two steps. The first step is `state = decay * state`, and the
    second step is `state = state + outer(k, beta * (v - k @ state))`. The output of the token is
    `q @ state` after both steps. The values `beta * (v - k @ state)` of all tokens in a chunk are
    the solution of a triangular system. With these values the recurrence is linear. The outputs are
    then computed as in attention, but without softmax: weights are query-key products, multiplied
    by the decay between the two tokens.

    Args:
      q: queries.
      k: keys, finite also at padding.
      v: values, finite also at padding.
      log_decay: logarithms of decays, 0 at padding.
      beta: factors of the differences between values and `k @ state`, 0 at padding.
      state: state before the first token of each row.
      counts: for each returned state, the number of tokens of its row that the state includes, as
        in `Ubatch.state_write_steps`.
      chunk: number of tokens of a chunk.

    Returns:
      The outputs, and the state after each number of tokens in `counts`, both float32.

    Examples:
      >>> one, half = jnp.ones((1, 3, 1, 1)), jnp.full((1, 3, 1), 0.5)
      >>> state, counts = jnp.full((1, 1, 1, 1), 8.0), jnp.array([[2, 3]])
      >>> out, states = scan_gated_delta(one, one, one, jnp.log(half), half, state, counts)
      >>> out.ravel(), states.ravel()
      (Array([2.5    , 1.125  , 0.78125], dtype=float32), Array([1.125  , 0.78125], dtype=float32))
    """
    rows, length, groups, _ = q.shape
    kept = min(counts.shape[1] - 1, length)
    counts, missing = counts[:, counts.shape[1] - 1 - kept :], counts.shape[1] - 1 - kept

    def by_head(x: jax.Array) -> jax.Array:  # [R, G, J, T, n], with J = H / G or 1
        x = x.astype(jnp.float32).reshape(rows, length, groups, -1, x.shape[-1])
        return jnp.moveaxis(x, 1, 3)

    tokens = tuple(map(by_head, (q, k, v, log_decay[..., None], beta[..., None])))
    start = state.astype(jnp.float32).reshape(rows, groups, -1, *state.shape[2:])
    soon = (jnp.arange(length)[None] < counts[:, :1])[:, None, None, :, None]

    def body(carry: tuple, part: tuple) -> tuple:
        state, early = carry
        *tokens, soon = part
        _, k, _, log_decay, _ = tokens
        added, out = _chunk(state, *tokens)
        if kept:
            early = _state_after(early, k, log_decay * soon, added * soon)
        return (_state_after(state, k, log_decay, added), early), out

    def step(state: jax.Array, turn: tuple) -> tuple:
        at, is_within = (x[:, None, None, None, None] for x in turn)
        token = [jnp.take_along_axis(x, at, axis=3) for x in tokens]
        added, _ = _chunk(state, *token)
        state = jnp.where(is_within, _state_after(state, token[1], token[3], added), state)
        return state, state

    chunks = tuple(_split_into_chunks(x, min(chunk, length)) for x in (*tokens, soon))
    (last, early), out = jax.lax.scan(body, (start, start), chunks)
    out = jnp.moveaxis(out, 0, 3)  # [R, G, J, chunks, t, D]
    out = jnp.moveaxis(out.reshape(*out.shape[:3], -1, out.shape[-1])[:, :, :, :length], 3, 1)
    states = [start] * missing
    if kept:
        turns = counts[:, :-2].T, (counts[:, 1:-1] > counts[:, :-2]).T
        states += [early, *jax.lax.scan(step, early, turns)[1]]
    states = jnp.stack([*states, last], axis=1)
    return out.reshape(v.shape), states.reshape(rows, -1, *state.shape[1:])


def _chunk(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the values that the tokens of a chunk add to the state, and the outputs.

    The arrays of tokens are `[R, G, J, t, n]`: J = H / G, or 1 for `q` and `k`; t is the number of
    tokens of the chunk; n is the size of a vector. The state before the chunk is `[R, G, J, M, D]`.
    """
    length = k.shape[3]
    total = jnp.cumsum(log_decay, axis=3)
    causal = jnp.tri(length, dtype=bool)[None, None, None]
    between = jnp.exp(jnp.where(causal, total - total.swapaxes(3, 4), -jnp.inf))
    added = beta * (v - jnp.exp(total) * (k @ state))
    if length > 1:
        overlap = beta * (k @ k.swapaxes(3, 4)) * between
        added = solve_triangular(overlap, added, lower=True, unit_diagonal=True)
    scores = (q @ k.swapaxes(3, 4)) * between
    return added, scores @ added + jnp.exp(total) * (q @ state)


def _state_after(
    state: jax.Array, k: jax.Array, log_decay: jax.Array, added: jax.Array
) -> jax.Array:
    """Return the state after the tokens of a chunk; `added` has the values that the tokens add."""
    total = jnp.cumsum(log_decay, axis=3)
    last = total[:, :, :, -1:]
    return jnp.exp(last) * state + k.swapaxes(3, 4) @ (jnp.exp(last - total) * added)


def _split_into_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """Cut `[R, G, J, T, n]` into `[chunks, R, G, J, chunk, n]`, with zeros as padding."""
    x = jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % chunk), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:3], -1, chunk, x.shape[4]), 3, 0)
