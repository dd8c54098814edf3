"""Planning a batch: check it, find room for it, and choose a cell for every token."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import (
    NOWHERE,
    Batch,
    Ubatch,
    bucket,
    is_concrete,
    make_batch,
    rank,
    rows,
)
from jaxkv.kv.cells import END
from jaxkv.kv.slots import unless
from jaxkv.memory import (
    split,
    table_admit,
    table_digest,
    table_fill,
    table_lost,
    table_owing,
    table_place,
    table_reached,
    table_sequences,
    table_streams,
    table_ubatch_size,
)
from jaxkv.plan import Plan, Reason
from jaxkv.planning.splits import Split, equal_split, simple_split
from jaxkv.stamp import stamps

UBATCH_SIZE = 512
"""Tokens that are computed at once where nobody says otherwise."""

FEW = 8
"""Outputs of a ubatch that are not told apart: the head takes as long, and fewer programs do."""


def init_batch(
    memory: Any, batch: Batch, *, ubatch_size: int | None = None, split_by: Split | None = None
) -> Plan:
    """Plan where the tokens of a batch go. Looks at the table only, and changes nothing.

    The batch is checked first: each sequence goes on one past its last position (one that is empty
    may start anywhere), without gaps, duplicates or steps back. Then every token finds a cell, or
    none does.

    Args:
      memory: any memory.
      batch: the tokens, `make_batch` makes it. Traced, it must fit one ubatch or come in rows.
      ubatch_size: the most tokens that are computed at once, by default what the memory was sized
        for, or 512. What is left over at the end is padded to a power of two, so that few shapes
        are ever compiled.
      split_by: how the batch is cut into ubatches, see `jaxkv.planning.splits`. By default
        `simple_split` where all sequences share one stream, and `equal_split` where each needs a
        row.

    Returns:
      A `Plan`. Whether it is carried out is a value, `plan.ok`; `plan.check()` raises instead.

    Raises:
      ValueError: when a sequence id is known and is none of the memory, when nothing is in the
        batch, when a traced batch is longer than `ubatch_size` or lacks the rows that the memory
        needs, or when `ubatch_size` is more than the memory was sized for.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2, sequences=2)
      >>> plan = init_batch(memory, make_batch([[1, 2, 3], [4, 5]]))
      >>> plan.ok.item(), plan.fits.tolist()
      (False, [False, True])

      The batch does not fit, but the shorter prompt alone does:

      >>> batch = make_batch([[1, 2, 3], [4, 5]]).only(plan.fits)
      >>> memory = apply(memory, init_batch(memory, batch))
      >>> seq_pos_max(memory, [0, 1]).tolist()
      [-1, 1]

    llama.cpp: `llama_memory_i::init_batch`.
    """
    table, _ = split(memory)
    flat, parts, outputs = _layout(table, batch, checked_size(table, ubatch_size), split_by)
    if len(parts) == 1:
        return _plan_one(table, flat, _ranks(flat), parts[0], outputs=outputs)
    # One program for each shape of a ubatch, however many there are and in whatever order.
    draft = _check(table, flat, _ranks(flat))
    ubatches = []
    for part in parts:
        draft, ubatch = _place_and_fill(draft, part, outputs=outputs)
        ubatches.append(ubatch)
    plan = _verdict(draft)
    return replace(plan, ubatches=tuple(_unless(plan.ok, ubatch) for ubatch in ubatches))


def plan_step(
    memory: Any, tokens: jax.Array, sequences: jax.Array, valid: jax.Array
) -> tuple[Ubatch, jax.Array]:
    """Plan one more token for each of several sequences: the short call for generation loops.

    Args:
      memory: any memory.
      tokens: `[T]` int32, one for each sequence.
      sequences: `[T]` int32, the sequences, each at most once.
      valid: `[T]` bool, the sequences that go on; the others are padding.

    Returns:
      A ubatch whose outputs are all T tokens in this order, and `ok`, `[]` bool. When it is False
      there is no room for all of them, and the ubatch changes nothing.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=4, heads=1, size=2, sequences=2)
      >>> ubatch, ok = plan_step(memory, jnp.array([7, 8]), jnp.arange(2), jnp.array([True, True]))
      >>> ok.item(), ubatch.slots.tolist(), ubatch.outputs.tolist()
      (True, [[0, 1]], [0, 1])
    """
    table, _ = split(memory)
    flat = make_batch(tokens, sequences=sequences, valid=valid, outputs=valid)
    index = np.arange(flat.valid.shape[0], dtype=np.int32)
    if table_streams(table) == 1:
        plan = _plan_one(table, flat, _ranks(flat), index[None], outputs=index.size)
        return plan.ubatches[0], plan.ok
    plan = _plan_one(table, flat, _ranks(flat), index[:, None], outputs=index.size)
    (ubatch,) = plan.ubatches
    if index.size == table_streams(table):  # row r is that of sequence r
        order = jnp.where(flat.valid, index, NOWHERE)
        ubatch = replace(ubatch, outputs=jnp.asarray(flat.sequences), order=order)
    return ubatch, plan.ok


def init_full(memory: Any, *, ubatch_size: int | None = None, outputs: int | None = None) -> Plan:
    """Plan the largest ubatch of a full memory, as shapes: for compiling ahead and counting bytes.

    Nothing is allocated, and `memory` may be shapes itself (`jax.eval_shape`).

    Args:
      memory: any memory, or its shapes.
      ubatch_size: the most tokens that will be computed at once, see `init_batch`.
      outputs: the most tokens of a ubatch that output logits, by default one for each sequence.

    Returns:
      A plan of one ubatch whose arrays are `jax.ShapeDtypeStruct`.

    Examples:
      >>> make = lambda: make_kv_cache(layers=2, cells=4096, heads=8, size=128, sequences=4)
      >>> memory = jax.eval_shape(make)
      >>> plan = init_full(memory, ubatch_size=256)
      >>> compiled = jax.jit(apply).lower(memory, plan.ubatches[0]).compile()

    llama.cpp: `llama_memory_i::init_full`.
    """
    table, _ = split(memory)
    sequences = table_sequences(table)
    outputs = sequences if outputs is None else outputs
    ubatch_size, rows = checked_size(table, ubatch_size), table_streams(table)
    index = np.full((rows, max(ubatch_size // rows, 1)), NOWHERE, np.int32)
    flat = make_batch(np.zeros(index.size, np.int32))
    plan = partial(_plan_one, index=index, outputs=bucket(max(outputs, FEW)))
    return jax.eval_shape(lambda table: plan(table, flat, _ranks(flat)), table)


def checked_size(table: Any, ubatch_size: int | None) -> int:
    """Decide how many tokens are computed at once, where the caller may have said so."""
    sized = table_ubatch_size(table)
    if ubatch_size is None:
        return UBATCH_SIZE if sized is None else sized
    if ubatch_size < 1:
        raise ValueError(f"ubatch_size must be at least 1, got {ubatch_size}")
    if sized is not None and ubatch_size > sized:
        raise ValueError(
            f"the memory was sized for ubatches of {sized} tokens, got ubatch_size={ubatch_size}: "
            f"make it with ubatch_size={ubatch_size}, or plan smaller ones"
        )
    return ubatch_size


def _layout(
    table: Any, batch: Batch, ubatch_size: int, split_by: Split | None
) -> tuple[Batch, list[np.ndarray], int]:
    """Decide which token is computed when; by shapes alone where the batch is traced.

    Returns:
      The batch as a flat list of a bucketed length; for each ubatch the indices into it, `[R, T]`;
      and how many outputs the ubatch with the most of them has, in a bucket too.
    """
    sequences, streams = table_sequences(table), table_streams(table)
    if is_concrete(batch):
        split_by = split_by or (simple_split if streams == 1 else equal_split)
        return _layout_known(batch, ubatch_size, sequences, streams, split_by)
    if batch.valid.ndim == 2:
        index = np.arange(batch.valid.size, dtype=np.int32).reshape(batch.valid.shape)
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        return batch, [index], index.size
    count = batch.valid.shape[0]
    if streams > 1:
        raise ValueError(
            f"a traced batch must come in rows [R, T] here, one for each sequence, got a list of "
            f"{count} tokens; plan it outside of jit, or take plan_step for one token each"
        )
    if count > ubatch_size:
        raise ValueError(
            f"a traced batch must fit one ubatch: wanted at most {ubatch_size} tokens, got "
            f"{count}; plan it outside of jit, or raise ubatch_size"
        )
    (index,) = simple_split(np.zeros(count, np.int32), ubatch_size)
    most = index.size if batch.outputs is not None else bucket(max(sequences, FEW))
    return _pad(batch, index.size), [index], most


def _layout_known(
    batch: Batch, ubatch_size: int, sequences: int, streams: int, split_by: Split
) -> tuple[Batch, list[np.ndarray], int]:
    axes = batch.valid.ndim
    batch = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[axes:]), batch)
    there = np.flatnonzero(batch.valid)
    if not there.size:
        raise ValueError("nothing to plan: the batch has no valid token")
    named = batch.sequences[there]
    wrong = named[(named < 0) | (named >= sequences)]
    if wrong.size:
        raise ValueError(f"wanted sequence ids from 0 to {sequences - 1}, got {wrong[0]}")
    parts = [_few_rows(part, streams) for part in split_by(named, ubatch_size)]
    if batch.outputs is None:
        most = np.unique(named).size
    else:
        flags = np.append(batch.outputs[there], False)
        most = max(flags[np.minimum(part, there.size)].sum() for part in parts)
    # The split counts the tokens that are there; this turns its numbers into batch indices.
    index = np.append(there, NOWHERE).astype(np.int32)
    parts = [index[np.minimum(part, there.size)] for part in parts]
    return _pad(batch, bucket(batch.valid.size)), parts, bucket(max(int(most), FEW))


def _few_rows(part: np.ndarray, streams: int) -> np.ndarray:
    """Pad the rows of a ubatch to a power of two, or to all streams, so that few shapes occur."""
    wanted = bucket(len(part))
    if streams > 1:
        wanted = max(min(wanted, streams), len(part))
    return np.pad(part, [(0, wanted - len(part)), (0, 0)], constant_values=NOWHERE)


def _pad(batch: Batch, size: int) -> Batch:
    xp = np if is_concrete(batch) else jnp
    extra = size - batch.valid.shape[0]
    return jax.tree.map(lambda x: xp.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), batch)


def _ranks(batch: Batch) -> tuple[Any, Any]:
    """Number the tokens of each sequence, on the host where it knows them."""
    return rank(batch.sequences, batch.valid)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class _Draft:
    """A plan in the making: what was found out about the batch, and the table so far.

    table: with the ubatches placed so far in it.
    batch: with all positions and outputs.
    last: `[Q]` int32, the last position of each sequence so far.
    reason, expected, found: see `Plan`.
    late: `[Q]` int32, a `Reason` that came up while cells were chosen.
    wanted, room: `[Q]` int32, the cells that each asks for, and those that there are for it.
    ok: `[]` bool, whether nothing was found to be wrong before cells were chosen.
    """

    table: Any
    batch: Batch
    last: jax.Array
    reason: jax.Array
    expected: jax.Array
    found: jax.Array
    late: jax.Array
    wanted: jax.Array
    room: jax.Array
    ok: jax.Array


@partial(jax.jit, static_argnames="outputs")
def _plan_one(table: Any, batch: Batch, ranks: tuple, index: jax.Array, *, outputs: int) -> Plan:
    """Plan a batch that is one ubatch."""
    draft, ubatch = _place(_check(table, batch, ranks), index, outputs)
    plan = _verdict(draft)
    return replace(plan, ubatches=(unless(plan.ok, ubatch),))


@jax.jit
def _check(table: Any, batch: Batch, ranks: tuple[jax.Array, jax.Array]) -> _Draft:
    """Look for everything that can be wrong before cells are chosen."""
    count = table_sequences(table)
    known = (batch.sequences >= 0) & (batch.sequences < count)
    foreign = jnp.any(batch.valid & ~known)
    batch = replace(batch, valid=batch.valid & known)
    ids = jnp.where(batch.valid, batch.sequences, count)
    wanted = jnp.zeros(count, jnp.int32).at[ids].add(1, mode="drop")
    here = wanted > 0
    last, agreed = table_reached(table, here)
    batch = _complete(batch, ids, ranks[0], wanted, last)
    reason, expected, found = _faults(batch, ids, ranks, last)
    for code, at_fault in (
        (Reason.UPDATE_PENDING, table_owing(table, here)),
        (Reason.LOST, here & (~agreed | table_lost(table, last + 1))),
    ):
        at_fault &= reason == Reason.FITS
        reason = jnp.where(at_fault, code, reason)
        found = jnp.where(at_fault & (code == Reason.LOST), last + 1, found)

    # Who is at fault takes no room from the others; who finds none is told how much there was.
    asked = jnp.where(reason == Reason.FITS, wanted, 0)
    fits, room = table_admit(table, asked)
    reason = jnp.where(fits, reason, Reason.NO_ROOM)
    return _Draft(
        table=table,
        batch=batch,
        last=last,
        reason=reason,
        expected=jnp.where(fits, expected, wanted),
        found=jnp.where(fits, found, room),
        late=jnp.zeros(count, jnp.int32),
        wanted=wanted,
        room=room,
        ok=jnp.all(reason == Reason.FITS) & ~foreign,
    )


@partial(jax.jit, static_argnames="outputs")
def _place_and_fill(draft: _Draft, index: jax.Array, *, outputs: int) -> tuple[_Draft, Ubatch]:
    """Place one ubatch, and let it into the table of the draft for the next."""
    draft, ubatch = _place(draft, index, outputs)
    return replace(draft, table=table_fill(draft.table, ubatch)), ubatch


def _place(draft: _Draft, index: jax.Array, outputs: int) -> tuple[_Draft, Ubatch]:
    """Choose cells for one ubatch, `[R, T]`."""
    table, streams = draft.table, table_streams(draft.table)
    index, mixed = _arranged(draft.batch, index, streams)
    ubatch = _lay_out(draft.batch, index, draft.last, outputs, streams, table_digest(table))
    slots, fault = table_place(table, ubatch, draft.ok)
    ubatch = replace(ubatch, slots=slots)
    ids = jnp.where(ubatch.valid, ubatch.sequences, draft.last.size)
    late = draft.late.at[ids].max(jnp.where(draft.ok, fault, Reason.FITS), mode="drop")
    draft = replace(
        draft,
        last=draft.last.at[ids].max(ubatch.positions, mode="drop"),
        late=jnp.maximum(late, jnp.where(mixed, Reason.MIXED_ROW, Reason.FITS)),
    )
    return draft, ubatch


@jax.jit
def _verdict(draft: _Draft) -> Plan:
    """Say what came of it; the ubatches are put in by the caller."""
    late = draft.late != Reason.FITS
    reason = jnp.where(late, draft.late, draft.reason)
    return Plan(
        ubatches=(),
        ok=draft.ok & ~jnp.any(late),
        reason=reason,
        fits=reason == Reason.FITS,
        expected=jnp.where(late, draft.wanted, draft.expected),
        found=jnp.where(late, draft.room, draft.found),
    )


_unless = jax.jit(unless)


def _complete(
    batch: Batch, ids: jax.Array, ranks: jax.Array, wanted: jax.Array, last: jax.Array
) -> Batch:
    """Fill in what the caller left to us: positions after the last, outputs of the last tokens."""
    positions, outputs = batch.positions, batch.outputs
    if positions is None:
        positions = last.at[ids].get(mode="fill", fill_value=-1) + 1 + ranks
    if outputs is None:
        outputs = ranks + 1 == wanted.at[ids].get(mode="fill", fill_value=0)
    return replace(batch, positions=positions, outputs=outputs & batch.valid)


def _faults(
    batch: Batch, ids: jax.Array, numbers: tuple[jax.Array, jax.Array], last: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check the positions of a batch.

    Returns:
      For each sequence, `[Q]`, a `Reason`, and the positions expected and found at its first fault.
    """
    ranks, before = numbers
    position = batch.positions
    after = last.at[ids].get(mode="fill", fill_value=-1)
    previous = jnp.where(ranks == 0, after, position[before])
    anywhere = (
        (ranks == 0) & (after < 0) & (position >= 0)
    )  # an empty sequence starts where it likes
    right = ~batch.valid | ((anywhere | (position == previous + 1)) & (position < END))
    reason = jnp.select(
        [right, ranks == 0, position == previous, position < previous],
        [Reason.FITS, Reason.NOT_NEXT, Reason.DUPLICATE, Reason.DECREASING],
        Reason.GAP,
    )
    count, end = last.shape[0], ids.shape[0]
    # The first token at fault speaks for its sequence.
    index = jnp.where(right, end, jnp.arange(end))
    worst = jnp.full(count, end).at[ids].min(index, mode="drop")
    answer = ((reason, Reason.FITS), (previous + 1, 0), (position, 0))
    reason, expected, found = (x.at[worst].get(mode="fill", fill_value=fill) for x, fill in answer)
    return reason, expected, found


def _arranged(batch: Batch, index: jax.Array, streams: int) -> tuple[jax.Array, jax.Array]:
    """Bring the rows of a ubatch into the order of their streams, where all may take part.

    Returns:
      The index, `[R, T]`; and `[Q]` bool, the sequences that have no row of their own though each
      needs one. They keep none of their tokens.
    """
    nobody = jnp.zeros(streams, bool)
    if streams == 1:
        return jnp.asarray(index), nobody
    part = rows(batch, index)
    row = _row_sequence(part)
    ids = jnp.where(part.valid, part.sequences, streams)
    mixed = nobody.at[ids].max(part.sequences != row[:, None], mode="drop")
    count = jnp.zeros(streams, jnp.int32).at[jnp.where(row < 0, streams, row)].add(1, mode="drop")
    mixed |= count > 1
    if index.shape[0] == streams:
        turn = (
            jnp.full(streams, streams)
            .at[jnp.where(row < 0, streams, row)]
            .set(jnp.arange(streams), mode="drop")
        )
        index = jnp.asarray(index).at[turn].get(mode="fill", fill_value=NOWHERE)
    return jnp.asarray(index), mixed


def _row_sequence(part: Batch) -> jax.Array:
    """Say to which sequence each row belongs, `[R]`; -1 if it has no token."""
    return jnp.max(jnp.where(part.valid, part.sequences, -1), axis=1)


def _lay_out(
    batch: Batch,
    index: jax.Array,
    last: jax.Array,
    outputs: int,
    streams: int,
    before: jax.Array,
) -> Ubatch:
    """Lay the tokens of one ubatch out in rows; it has no slots yet."""
    part = rows(batch, index)
    if streams == 1:
        row = jnp.zeros(index.shape[0], jnp.int32)
    elif index.shape[0] == streams:
        row = jnp.arange(streams, dtype=jnp.int32)
    else:
        row = jnp.maximum(_row_sequence(part), 0)
    order = jnp.where(part.outputs & part.valid, index, NOWHERE).reshape(-1)
    tokens = order.shape[0]
    outputs = min(outputs, tokens)
    if outputs == tokens:  # any of them may be an output: none has to be picked
        pick = jnp.arange(tokens, dtype=jnp.int32)
    else:
        pick = jnp.nonzero(order != NOWHERE, size=outputs, fill_value=tokens)[0].astype(jnp.int32)
    return Ubatch(
        tokens=part.tokens,
        embeddings=part.embeddings,
        positions=part.positions,
        sequences=part.sequences,
        streams=row,
        slots=jnp.zeros(index.shape, jnp.int32),
        stamps=stamps(part, before),
        valid=part.valid,
        outputs=jnp.minimum(pick, tokens - 1),
        order=order.at[pick].get(mode="fill", fill_value=NOWHERE),
        last=last,
    )
