"""Carrying plans out, tidying up, and going back."""

from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.batch import Batch, Ubatch, is_concrete
from jaxkv.kv.slots import unless
from jaxkv.memory import (
    carry_out,
    join,
    nothing_to_do,
    split,
    table_defrag,
    table_fill,
    table_fresh,
    table_restored,
    table_unwritten,
    table_update,
)
from jaxkv.plan import Plan
from jaxkv.planning.init import init_batch

Memory = TypeVar("Memory")


def apply(memory: Memory, part: Any, *, donate: bool = False) -> Memory:
    """Commit a ubatch or a plan: the only function that carries one out.

    Args:
      memory: any memory.
      part: a ubatch of a plan, a plan of a single ubatch, or the plan of an update or a defrag.
      donate: give up the rows of the memory to one that is updated or defragmented, outside of
        `jit`. Otherwise they are copied, since the memory passed in stays as it is.

    Returns:
      The memory after it. A ubatch enters the table; `attend` writes its rows. If the plan was
      refused, or the table is no longer as the plan found it (another was applied since, or the
      same one twice), the memory as it was, bit for bit.

    Raises:
      ValueError: when the plan has several ubatches, since the model must run between them.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2)
      >>> plan = init_batch(memory, make_batch([1, 2]))
      >>> once = apply(memory, plan)
      >>> twice = apply(once, plan)
      >>> used(memory).item(), used(once).item(), used(twice).item()
      (0, 2, 2)

    llama.cpp: `llama_memory_context_i::apply`.
    """
    if isinstance(part, Plan):
        if len(part.ubatches) != 1:
            raise ValueError(
                f"a plan of {len(part.ubatches)} ubatches cannot be applied at once, since the "
                f"model runs between them: apply each of plan.ubatches in its turn"
            )
        part = part.ubatches[0]
    table, rows = split(memory)
    if isinstance(part, Ubatch):
        return join(_settle(table, part), rows)
    if is_concrete(part, table) and nothing_to_do(part):
        return memory
    return join(*(_carry_out_donated if donate else _carry_out)(part, table, rows))


def init_update(memory: Any) -> Any:
    """Plan what is pending: the rotation of every key that was moved.

    Returns:
      A plan for `apply`. Its `pending`, `[]` int32, says how many keys will be rotated; when it
      is 0 applying costs nothing.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2)
      >>> init_update(memory).pending.item()
      0

    llama.cpp: `llama_memory_i::init_update`, the K-shift.
    """
    table, _ = split(memory)
    return _update(table)


def defrag_plan(memory: Any, *, max_moves: int | None = None) -> Any:
    """Plan the moves that bring all used cells to the front.

    Args:
      memory: any memory.
      max_moves: the most runs of cells to move, for doing it bit by bit; None for all. Repeated
        until nothing is left to move, any number of at least 1 leaves no gap.

    Returns:
      A plan for `apply`: runs of `source`, `destination` and `length`, the highest cells first.

    Raises:
      ValueError: when `max_moves` is below 1.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, heads=1, size=2)
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3, 4, 5])))
      >>> memory, _ = seq_rm(memory, 0, 1, 3)
      >>> plan = defrag_plan(memory)
      >>> [x[0, 0].item() for x in (plan.source, plan.destination, plan.length)]
      [3, 1, 2]
      >>> print(show(apply(memory, plan)))
      owner    0 0 0 . . .
      position 0 3 4 . . .

    llama.cpp: `defrag`, as it was until it was removed.
    """
    if max_moves is not None and max_moves < 1:
        raise ValueError(f"max_moves must be at least 1, or None for all, got {max_moves}")
    table, _ = split(memory)
    return _defrag(table, max_moves=max_moves)


def go_back(table: Any, memory: Memory) -> tuple[Memory, jax.Array]:
    """Return to an earlier table, with the rows of a later memory: undo what was applied since.

    Exact when, since then, only ubatches on empty cells were applied and only the table was edited.
    After an update, a defrag, or a ubatch on cells that had been freed, the rows are no longer
    those that the old table knew, and it is refused.

    Args:
      table: the table of the earlier memory, `split(memory)[0]`. It must not have been donated:
        donate the rows alone, and join inside of the step.
      memory: the later memory.

    Returns:
      The memory as it was, and `ok`, `[]` bool: False if it was refused, and then the memory is the
      later one, unchanged.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2)
      >>> table, _ = split(memory)
      >>> later = apply(memory, init_batch(memory, make_batch([1, 2])))
      >>> memory, ok = go_back(table, later)
      >>> used(memory).item(), ok.item()
      (0, True)
    """
    now, rows = split(memory)
    then, ok = _go_back(now, table)
    return join(then, rows), ok


def make_room(
    memory: Memory, batch: Batch, *, ubatch_size: int | None = None, donate: bool = False
) -> tuple[Memory, Plan, bool]:
    """Do what can be done so that a batch fits: rotate what is pending, then close the gaps.

    Nothing is forgotten; what is not there after that has to be removed by the caller.

    Args:
      memory: any memory.
      batch: the batch that is wanted.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      donate: give up the memory passed in, see `apply`.

    Returns:
      The memory, the plan of the batch in it, and whether the batch fits now and did not before.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2, placement="contiguous")
      >>> memory = apply(memory, init_batch(memory, make_batch([1, 2, 3])))
      >>> memory, _ = seq_rm(memory, 0, 0, 1)
      >>> batch = make_batch([4, 5])
      >>> init_batch(memory, batch).ok.item()
      False
      >>> memory, plan, helped = make_room(memory, batch)
      >>> plan.ok.item(), helped
      (True, True)
    """
    plan = before = init_batch(memory, batch, ubatch_size=ubatch_size)
    for tidy in (init_update, defrag_plan):
        if not plan.ok:
            memory = apply(memory, tidy(memory), donate=donate)
            plan = init_batch(memory, batch, ubatch_size=ubatch_size)
    return memory, plan, bool(plan.ok and not before.ok)


@jax.jit
def _settle(table: Any, ubatch: Ubatch) -> Any:
    return table_fill(table, unless(table_fresh(table, ubatch), ubatch))


_carry_out = jax.jit(lambda part, table, rows: carry_out(part, table, rows))
_carry_out_donated = jax.jit(
    lambda part, table, rows: carry_out(part, table, rows), donate_argnames="rows"
)


@jax.jit
def _update(table: Any) -> Any:
    return table_update(table)


@partial(jax.jit, static_argnames="max_moves")
def _defrag(table: Any, *, max_moves: int | None) -> Any:
    return table_defrag(table, max_moves)


@jax.jit
def _go_back(now: Any, then: Any) -> tuple[Any, jax.Array]:
    ok = table_unwritten(now, then)
    back = table_restored(now, then)
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), back, now), ok
