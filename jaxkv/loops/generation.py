"""The loop: place a token for each sequence, run the model, pick the next one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.batch import Batch, Ubatch, bucket, make_batch
from jaxkv.kv.slots import unless
from jaxkv.memory import split
from jaxkv.planning.init import checked_size, init_batch, plan_step
from jaxkv.verbs.apply import apply

Memory = TypeVar("Memory")
Model = Callable[[Any, Any, Ubatch], tuple[Any, jax.Array]]
"""`(weights, memory, ubatch) -> memory, logits [O, V]`."""
Sample = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(logits [T, V], sequences [T], positions [T]) -> tokens [T]`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """Where each of T sequences stands in a generation.

    token: `[T]` int32, the token that was picked last and is not in the memory yet.
    position: `[T]` int32, where it will stand.
    sequence: `[T]` int32, the sequence it belongs to.
    active: `[T]` bool, the sequences that go on.
    full: `[]` bool, whether the loop stopped because the memory had no room for the next tokens.
    """

    token: jax.Array  # [T]
    position: jax.Array  # [T]
    sequence: jax.Array  # [T]
    active: jax.Array  # [T]
    full: jax.Array  # []


def prefill(
    step: Model, weights: Any, memory: Memory, batch: Batch, *, ubatch_size: int | None = None
) -> tuple[Memory, jax.Array]:
    """Run a batch through a model, ubatch by ubatch.

    Args:
      step: compiled `(weights, memory, ubatch) -> memory, logits`, which applies the ubatch; it may
        donate the memory.
      weights: whatever the model wants.
      memory: a memory with room for the batch.
      batch: the tokens, `make_batch` makes it.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.

    Returns:
      The memory after the batch, and the logits of its output tokens, `[n, V]`, in its order.

    Raises:
      RefusedError: when there is no room or the batch is at fault. It is raised before anything
        runs, so the memory is still there.
    """
    plan = init_batch(memory, batch, ubatch_size=ubatch_size).check()
    logits = []
    for ubatch in plan.ubatches:
        memory, out = step(weights, memory, ubatch)
        logits.append(out)
    return memory, plan.collect(logits)


def warm_up(
    step: Model,
    weights: Any,
    memory: Memory,
    *,
    ubatch_size: int | None = None,
    sequences: Sequence[int] = (0,),
) -> Memory:
    """Compile what prompts of any length need, before the first one comes.

    A step is one program for each size of a ubatch, and those are powers of two. Here a ubatch of
    each size is planned, sent nowhere as that of a refused plan is, and goes through the step. What
    is left for later is small: planning prompts of several ubatches, and collecting their logits.

    Args:
      step: see `prefill`.
      weights: whatever the model wants.
      memory: the memory that will be used, or one like it.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      sequences: who is in a batch, by default one. Where each sequence has its own stream, prompts
        that come together are rows of one ubatch; and more than 8 have more outputs. Those are
        programs of their own, so call it for each number of prompts that you expect.

    Returns:
      The memory as it was, bit for bit. The one passed in is gone if the step donates it.

    Raises:
      ValueError: when there is no sequence, or none of the memory, or `ubatch_size` is more than it
        was sized for.

    Examples:
      >>> compiled = []
      >>> @jax.jit
      ... def step(weights, memory, ubatch):
      ...     compiled.append(ubatch.valid.shape)
      ...     return apply(memory, ubatch), weights[ubatch.tokens.reshape(-1)[ubatch.outputs]]
      >>> memory = make_kv_cache(layers=1, cells=32, heads=1, size=2)
      >>> memory = warm_up(step, jnp.eye(4), memory, ubatch_size=8)
      >>> memory, _ = prefill(step, jnp.eye(4), memory, make_batch([1, 2, 3]), ubatch_size=8)
      >>> compiled, used(memory).item()
      ([(1, 1), (1, 2), (1, 4), (1, 8)], 3)
    """
    if not sequences:
        raise ValueError("wanted at least one sequence to warm up for, got none")
    most = max(checked_size(split(memory)[0], ubatch_size) // len(sequences), 1)
    for length in sorted({min(bucket(count), most) for count in range(1, most + 1)}):
        batch = make_batch([[0] * length] * len(sequences), sequences=sequences)
        for ubatch in init_batch(memory, batch, ubatch_size=ubatch_size).ubatches:
            memory, _ = step(weights, memory, unless(jnp.array(False), ubatch))
    return memory


def decode(
    model: Model,
    sample: Sample,
    weights: Any,
    memory: Memory,
    running: Running,
    stop: jax.Array,
    *,
    steps: int,
) -> tuple[Memory, Running, jax.Array]:
    """Generate up to `steps` tokens for each sequence in one loop on the device. Made to be jitted.

    A sequence ends with its stop token, which is not put into the memory. When there is no room for
    the next tokens the loop ends, nothing is overwritten, and `full` says so.

    Args:
      model: `(weights, memory, ubatch) -> memory, logits`, called after the ubatch is applied.
      sample: `(logits, sequences, positions) -> tokens`, `positions` being where they will stand.
      weights: whatever the model wants.
      memory: the memory after the prompts; donate it.
      running: where each sequence stands.
      stop: `[n]` int32, the tokens that end a sequence; may be empty.
      steps: the most tokens to generate for each sequence, static.

    Returns:
      The memory, where each sequence stands now, and the tokens that were picked, `[T, steps]`, -1
      where a sequence had ended.
    """

    def goes_on(carry: tuple) -> jax.Array:
        _, running, _, i = carry
        return (i < steps) & jnp.any(running.active) & ~running.full

    def body(carry: tuple) -> tuple:
        memory, running, out, i = carry
        ubatch, ok = plan_step(memory, running.token, running.sequence, running.active)
        memory, logits = model(weights, apply(memory, ubatch), ubatch)
        position = running.position + 1
        token = sample(logits, running.sequence, position)
        goes = running.active & ok
        ended = jnp.any(token[:, None] == stop[None], axis=1)
        out = out.at[:, i].set(jnp.where(goes, token, -1))
        running = replace(
            running,
            token=jnp.where(goes, token, running.token),
            position=jnp.where(goes, position, running.position),
            active=running.active & ~(ok & ended),
            full=~ok,
        )
        return memory, running, out, i + 1

    out = jnp.full((running.token.shape[0], steps), -1, jnp.int32)
    memory, running, out, _ = jax.lax.while_loop(goes_on, body, (memory, running, out, 0))
    return memory, running, out
