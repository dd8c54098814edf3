"""Generating: one token after another for each of several sequences, in a loop on the device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.loops.forward import Forward, take_step
from jaxkv.loops.programs import copied, program_of
from jaxkv.memory import Memory, join, split
from jaxkv.places import flags, integers, is_concrete
from jaxkv.planning.init import plan_step

Sample = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(logits [T, V], sequences [T], positions [T]) -> tokens [T]`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeState:
    """How far T sequences have come in a generation. Where they stand, the memory knows.

    token: `[T]` int32, the token that was picked last and is not in the memory yet.
    sequence: `[T]` int32, the sequence it belongs to, each at most once.
    active: `[T]` bool, the sequences that go on.
    full: `[]` bool, whether the loop stopped because the memory had no room for the next tokens.
    """

    token: jax.Array  # [T]
    sequence: jax.Array  # [T]
    active: jax.Array  # [T]
    full: jax.Array  # []


def decode(
    forward: Forward,
    sample: Sample,
    weights: Any,
    memory: Memory,
    state: DecodeState,
    stop: Any,
    *,
    steps: int,
    donate: bool = False,
) -> tuple[Any, DecodeState, jax.Array]:
    """Generate up to `steps` tokens for each sequence, in one loop on the device.

    A sequence ends with its stop token, which is not put into the memory. When there is no room for
    the next tokens the loop ends, nothing is overwritten, and `full` says so.

    Args:
      forward: see `prefill`.
      sample: `(logits, sequences, positions) -> tokens`, `positions` being where they will stand: a
        tree that can be called, such as a `Sampler`, whose arrays may change from call to call; or
        a function, which is kept as `forward` is.
      weights: whatever the model wants.
      memory: the memory after the prompts.
      state: how far each sequence has come.
      stop: `[n]` int32, the tokens that end a sequence; may be empty.
      steps: the most tokens to generate for each sequence, static.
      donate: give up the buffers of the memory passed in, see `prefill`.

    Returns:
      The memory, how far each sequence has come now, and the tokens that were picked, `[T, steps]`,
      -1 where a sequence had ended.

    Raises:
      ValueError: when the arrays of the state differ in shape, a sequence comes twice or is none of
        the memory, as far as that is known while tracing; when `steps` is below 1; or when `sample`
        gives something else than tokens `[T]`. It is raised before anything runs.

    Examples:
      >>> def forward(weights, memory, ubatch):
      ...     x = weights[ubatch.tokens][:, :, None]
      ...     memory, _ = attend(memory, 0, ubatch, x, x, x)
      ...     return memory, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[ubatch.outputs]
      >>> best = lambda logits, sequences, positions: jnp.argmax(logits, axis=-1)
      >>> memory = make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=4, sequences=2)
      >>> state = DecodeState(
      ...     token=jnp.array([0, 2]),
      ...     sequence=jnp.array([0, 1]),
      ...     active=jnp.array([True, True]),
      ...     full=jnp.array(False),
      ... )
      >>> memory, state, tokens = decode(forward, best, jnp.eye(4), memory, state, [3], steps=3)
      >>> tokens.tolist(), state.active.tolist(), seq_pos_max(memory, [0, 1]).tolist()
      ([[1, 2, 3], [3, -1, -1]], [False, False], [2, 0])
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    state, stop = _checked(memory, state), integers(stop, "stop")
    if not is_concrete(sample, weights, memory, state, stop):
        return _decode(forward, sample, weights, memory, state, stop, steps)
    tree = not jax.tree_util.all_leaves([sample])
    program = program_of(_decoding, forward, *(() if tree else (sample,)))
    table, buffers = split(memory)
    table, buffers, now, tokens = program(
        sample if tree else None,
        weights,
        table,
        buffers if donate else copied(buffers),
        state,
        stop,
        steps=steps,
    )
    # The sequences stay those that were passed in: to look at a result is to wait for it.
    return join(table, buffers), replace(now, sequence=state.sequence), tokens


def _decoding(forward: Callable[[], Forward], sample: Callable[[], Sample] | None = None) -> Any:
    @partial(jax.jit, static_argnames="steps", donate_argnames="buffers")
    def loop(
        tree: Any,
        weights: Any,
        table: Any,
        buffers: Any,
        state: DecodeState,
        stop: jax.Array,
        *,
        steps: int,
    ) -> tuple:
        pick = tree if sample is None else sample()
        memory = join(table, buffers)
        memory, state, tokens = _decode(forward(), pick, weights, memory, state, stop, steps)
        return *split(memory), state, tokens

    return loop


def _checked(memory: Memory, state: DecodeState) -> DecodeState:
    """Make arrays of what a state holds, and refuse what cannot be."""
    table, _ = split(memory)
    state = DecodeState(
        token=integers(state.token, "token"),
        sequence=table.facts.sequence_ids(state.sequence),
        active=flags(state.active, "active"),
        full=flags(state.full, "full"),
    )
    shapes = [x.shape for x in (state.token, state.sequence, state.active, state.full)]
    if len(shapes[0]) != 1 or shapes != [shapes[0]] * 3 + [()]:
        raise ValueError(
            f"wanted token, sequence and active of one shape [T], and full of shape [], got "
            f"{', '.join(map(str, shapes))}"
        )
    if is_concrete(state.sequence):
        ids, counts = np.unique(np.asarray(state.sequence), return_counts=True)
        if np.any(counts > 1):
            raise ValueError(
                f"sequence {ids[counts > 1][0]} comes twice: a sequence goes on in one way at a "
                f"time; fork it with seq_cp to go on in several"
            )
    return state


def _decode(
    forward: Forward,
    sample: Sample,
    weights: Any,
    memory: Memory,
    state: DecodeState,
    stop: Any,
    steps: int,
) -> tuple[Any, DecodeState, jax.Array]:
    """Do what `decode` says, as a part of the program that is being traced."""
    count = state.token.shape[0]
    # The first token that is picked stands one past that of the state, which is not placed yet.
    table, _ = split(memory)
    reached = table.inspect(jnp.ones(table.facts.sequences, bool)).last
    first = reached[state.sequence] + 2

    def goes_on(carry: tuple) -> jax.Array:
        _, state, _, i = carry
        return (i < steps) & jnp.any(state.active) & ~state.full

    def body(carry: tuple) -> tuple:
        memory, state, out, i = carry
        ubatch, ok = plan_step(memory, state.token, state.sequence, state.active)
        memory, logits = take_step(forward, weights, memory, ubatch)
        token = sample(logits, state.sequence, first + i)
        if token.shape != (count,) or not jnp.issubdtype(token.dtype, jnp.integer):
            raise ValueError(
                f"wanted tokens [T] from sample, integers of shape {(count,)}, got "
                f"{token.dtype}{list(token.shape)}"
            )
        token = token.astype(jnp.int32)
        goes = state.active & ok
        ended = jnp.any(token[:, None] == stop[None], axis=1)
        out = out.at[:, i].set(jnp.where(goes, token, -1))
        state = replace(
            state,
            token=jnp.where(goes, token, state.token),
            active=state.active & ~(ok & ended),
            full=~ok,
        )
        return memory, state, out, i + 1

    out = jnp.full((count, steps), -1, jnp.int32)
    start = memory, jax.tree.map(jnp.asarray, state), out, jnp.int32(0)
    memory, state, out, _ = jax.lax.while_loop(goes_on, body, start)
    return memory, state, out
