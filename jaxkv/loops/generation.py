"""The loops: run prompts through a model, and pick one token after another.

Every loop takes the same function of a model, `forward(weights, memory, ubatch) -> memory, logits`,
and calls it for a ubatch that the loop has applied. Called outside of `jax.jit`, a loop compiles
itself, once for each function; called inside, it is traced as part of the caller's program. What is
donated is always the buffers of a memory and never its table, which may be gone back to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch, Ubatch, bucket, is_concrete, make_batch
from jaxkv.kv.slots import unless
from jaxkv.loops.programs import copied, program_of
from jaxkv.memory import join, split
from jaxkv.planning.init import checked_size, init_batch, plan_step
from jaxkv.verbs.apply import apply
from jaxkv.verbs.ask import seq_pos_max
from jaxkv.verbs.ids import checked_ids, whole

Memory = TypeVar("Memory")
Forward = Callable[[Any, Any, Ubatch], tuple[Any, jax.Array]]
"""`(weights, memory, ubatch) -> memory, logits [O, V]`, for a ubatch that has been applied."""
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


def prefill(
    forward: Forward,
    weights: Any,
    memory: Any,
    batch: Batch,
    *,
    ubatch_size: int | None = None,
    donate: bool = False,
) -> tuple[Any, ...]:
    """Run a batch through a model, ubatch by ubatch.

    Args:
      forward: `(weights, memory, ubatch) -> memory, logits [O, V]`, called for a ubatch that has
        been applied; one that applies it once more does no harm. It is compiled once for each shape
        of a ubatch and kept for as long as the function lives, so pass the same one every time: a
        method of the same object counts as the same, a new lambda does not.
      weights: whatever the model wants.
      memory: a memory with room for the batch.
      batch: the tokens, `make_batch` makes it.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      donate: give up the buffers of the memory passed in, whose bytes the returned one then holds.
        By default they are copied once, since forks and checkpoints share them. The table stays in
        either case. Inside of `jit` nothing is copied, and what is donated is up to the caller.

    Returns:
      The memory after the batch, and the logits of its output tokens, `[n, V]`, in its order.

      Inside of `jit`, where a refusal cannot be raised, a third: `ok`, `[]` bool. When it is False
      the memory is the one passed in, bit for bit, and the logits mean nothing. Rows of the logits
      that only pad come last there.

    Raises:
      RefusedError: when there is no room or the batch is at fault. It is raised before anything
        runs or is copied, so the memory is still there.
      ValueError: when `forward` gives back something else than a memory that it has written and
        logits `[O, V]`.

    Examples:
      A model of one layer, whose tokens look at those before them:

      >>> def forward(weights, memory, ubatch):
      ...     x = weights[ubatch.tokens][:, :, None]
      ...     memory, x = attend(memory, 0, ubatch, x, x, x)
      ...     return memory, x.reshape(-1, 4)[ubatch.outputs] @ weights.T
      >>> memory = make_kv_cache(layers=1, cells=8, heads=1, size=4)
      >>> memory, logits = prefill(forward, jnp.eye(4), memory, make_batch([1, 2, 3]))
      >>> logits.shape, used(memory).item()
      ((1, 4), 3)

      As a part of one's own program:

      >>> @jax.jit
      ... def feed(weights, memory, tokens):
      ...     return prefill(forward, weights, memory, make_batch(tokens))
      >>> memory, logits, ok = feed(jnp.eye(4), memory, jnp.arange(6))
      >>> used(memory).item(), ok.item()
      (3, False)

    llama.cpp: `llama_decode`.
    """
    plan = init_batch(memory, batch, ubatch_size=ubatch_size)
    known = is_concrete(plan.ok)
    if known:
        plan.check()
    logits = []
    if known and is_concrete(weights, memory, batch):
        step = step_of(forward)
        table, buffers = split(memory)
        buffers = buffers if donate else copied(buffers)
        for ubatch in plan.ubatches:
            table, buffers, out = step(weights, table, buffers, ubatch)
            logits.append(out)
        memory = join(table, buffers)
    else:
        for ubatch in plan.ubatches:
            memory, out = _step(forward, weights, memory, ubatch)
            logits.append(out)
    return memory, plan.collect(logits), *(() if known else (plan.ok,))


def step_of(forward: Forward) -> Any:
    """Find the program that `prefill` runs for each ubatch: for loops in Python of one's own.

    Args:
      forward: see `prefill`.

    Returns:
      What `jax.jit` gives for `(weights, table, buffers, ubatch) -> table, buffers, logits`, the
      table and buffers being those of `split`. It applies the ubatch, and donates the buffers. Its
      `lower` is for compiling ahead, and for asking what it would take. It lives as long as
      `forward`.

    Examples:
      >>> def forward(weights, memory, ubatch):
      ...     x = weights[ubatch.tokens][:, :, None]
      ...     memory, x = attend(memory, 0, ubatch, x, x, x)
      ...     return memory, x.reshape(-1, 4)[ubatch.outputs] @ weights.T
      >>> memory = make_kv_cache(layers=1, cells=8, heads=1, size=4)
      >>> ubatch, ok = plan_step(memory, jnp.array([3]), jnp.array([0]), jnp.array([True]))
      >>> table, buffers, logits = step_of(forward)(jnp.eye(4), *split(memory), ubatch)
      >>> used(join(table, buffers)).item()
      1
    """
    return program_of(_stepping, forward)


def warm_up(
    forward: Forward,
    weights: Any,
    memory: Any,
    *,
    ubatch_size: int | None = None,
    sequences: Sequence[int] = (0,),
    donate: bool = False,
) -> Any:
    """Compile what prompts of any length need, before the first one comes.

    `prefill` runs one program for each size of a ubatch, and those are powers of two. Here a ubatch
    of each size is planned, sent nowhere as that of a refused plan is, and goes through the
    program. What is left for later is small: planning prompts of several ubatches, and collecting
    their logits.

    Args:
      forward: see `prefill`; the programs live as long as it does.
      weights: whatever the model wants.
      memory: the memory that will be used, or one like it.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      sequences: who is in a batch, by default one. Where each sequence has its own stream, prompts
        that come together are rows of one ubatch; and more than 8 have more outputs. Those are
        programs of their own, so call it for each number of prompts that you expect.
      donate: as `prefill` will be called. Otherwise the buffers are copied for as long as this
        runs, which takes their bytes once more.

    Returns:
      The memory as it was, bit for bit.

    Raises:
      ValueError: when there is no sequence, or none of the memory, or `ubatch_size` is more than it
        was sized for.

    Examples:
      >>> compiled = []
      >>> def forward(weights, memory, ubatch):
      ...     compiled.append(ubatch.valid.shape)
      ...     x = weights[ubatch.tokens][:, :, None]
      ...     memory, x = attend(memory, 0, ubatch, x, x, x)
      ...     return memory, x.reshape(-1, 4)[ubatch.outputs] @ weights.T
      >>> memory = make_kv_cache(layers=1, cells=32, heads=1, size=4)
      >>> memory = warm_up(forward, jnp.eye(4), memory, ubatch_size=8)
      >>> memory, _ = prefill(forward, jnp.eye(4), memory, make_batch([1, 2, 3]), ubatch_size=8)
      >>> compiled, used(memory).item()
      ([(1, 1), (1, 2), (1, 4), (1, 8)], 3)
    """
    if not sequences:
        raise ValueError("wanted at least one sequence to warm up for, got none")
    table, buffers = split(memory)
    most = max(checked_size(table, ubatch_size) // len(sequences), 1)
    lengths = sorted({min(bucket(count), most) for count in range(1, most + 1)})
    plans = [
        init_batch(
            memory,
            make_batch([[0] * length] * len(sequences), sequences=sequences),
            ubatch_size=ubatch_size,
        )
        for length in lengths
    ]
    step = step_of(forward)
    buffers = buffers if donate else copied(buffers)
    for plan in plans:
        logits = []
        for ubatch in plan.ubatches:
            _, buffers, out = step(weights, table, buffers, unless(jnp.array(False), ubatch))
            logits.append(out)
        plan.collect(logits)
    return join(table, buffers) if donate else memory


def decode(
    forward: Forward,
    sample: Sample,
    weights: Any,
    memory: Any,
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
        gives something else than tokens `[T]`. It is raised before anything runs or is copied.

    Examples:
      >>> def forward(weights, memory, ubatch):
      ...     x = weights[ubatch.tokens][:, :, None]
      ...     memory, _ = attend(memory, 0, ubatch, x, x, x)
      ...     return memory, jnp.roll(x, 1, axis=-1).reshape(-1, 4)[ubatch.outputs]
      >>> best = lambda logits, sequences, positions: jnp.argmax(logits, axis=-1)
      >>> memory = make_kv_cache(layers=1, cells=8, heads=1, size=4, sequences=2)
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
    state, stop = _checked(memory, state), whole(stop)
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


def _stepping(forward: Callable[[], Forward]) -> Any:
    @partial(jax.jit, donate_argnames="buffers")
    def step(weights: Any, table: Any, buffers: Any, ubatch: Ubatch) -> tuple:
        memory, logits = _step(forward(), weights, join(table, buffers), ubatch)
        return *split(memory), logits

    return step


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


def _step(forward: Forward, weights: Any, memory: Any, ubatch: Ubatch) -> tuple[Any, jax.Array]:
    """Apply a ubatch and run a model over it."""
    memory = apply(memory, ubatch)
    after, logits = forward(weights, memory, ubatch)
    buffers = [jax.tree.leaves(split(one)[1]) for one in (memory, after)]
    if all(new is old for old, new in zip(*buffers, strict=True)):
        raise ValueError(
            "forward gave back the memory it was given, with nothing written: it must return the "
            "memory that attend (or write_states) of its last layer returned"
        )
    if logits.ndim != 2 or logits.shape[0] != ubatch.outputs.shape[0]:
        raise ValueError(
            f"wanted logits [O, V] from forward, a row for each of the {ubatch.outputs.shape[0]} "
            f"ubatch.outputs, got {logits.shape}"
        )
    return after, logits


def _checked(memory: Any, state: DecodeState) -> DecodeState:
    """Make arrays of what a state holds, and refuse what cannot be."""
    table, _ = split(memory)
    state = DecodeState(
        token=whole(state.token),
        sequence=checked_ids(table, state.sequence),
        active=_flags(state.active),
        full=_flags(state.full),
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


def _flags(value: Any) -> Any:
    return value.astype(bool) if isinstance(value, jax.Array) else np.asarray(value, bool)


def _decode(
    forward: Forward,
    sample: Sample,
    weights: Any,
    memory: Memory,
    state: DecodeState,
    stop: Any,
    steps: int,
) -> tuple[Memory, DecodeState, jax.Array]:
    """What `decode` says, as a part of the program that is being traced."""
    count = state.token.shape[0]
    # The first token that is picked stands one past that of the state, which is not placed yet.
    first = seq_pos_max(memory, state.sequence) + 2

    def goes_on(carry: tuple) -> jax.Array:
        _, state, _, i = carry
        return (i < steps) & jnp.any(state.active) & ~state.full

    def body(carry: tuple) -> tuple:
        memory, state, out, i = carry
        ubatch, ok = plan_step(memory, state.token, state.sequence, state.active)
        memory, logits = _step(forward, weights, memory, ubatch)
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
