"""A plan is of one table: made before an edit it does nothing after it, to no kind of memory.

Neither does a ubatch of another table, or a rival of the one that was applied, write buffers: what
stands in a cell belongs to one text, and the right to write it is given for that text alone.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.hybrid import parts_of
from jaxkv.window import sliding
from tests import memories
from tests.histories import Twin, compute, planned, tell
from tests.memories import HEADS, ROPE, SIZE, SPLIT, assert_identical, think

MEMORIES = {
    "pool": {},
    "contiguous": {"placement": "contiguous"},
    "split": {"streams": 3},
    "recurrent": {"kinds": "rr"},
    "hybrid of streams": {"kinds": "ar", "streams": 3},
}
"""Options of `make_kv_cache`, or of `Twin` where there are states."""


def layers_of(kind):
    """What the layers of a memory do, as `compute` wants it."""
    return MEMORIES[kind].get("kinds", "aa")


def empty(kind):
    options = MEMORIES[kind]
    if "kinds" in options:
        return Twin(**options).memory
    return jaxkv.make_kv_cache(
        layers=2, cells=16, kv_heads=HEADS, head_dim=SIZE, sequences=3, **options
    )


@cache
def filled(kind, text=(1, 2, 3, 4, 5)):
    """Sequence 0 has a text, sequence 1 another of the same length, sequence 2 none."""
    return told(kind, empty(kind), text, (6, 7, 8, 9, 10))


def told(kind, memory, *rows):
    return tell(memory, *rows, kinds=layers_of(kind))


@partial(jax.jit, static_argnames="kinds")
def written(memory, ubatch, kinds):
    """Let all layers write what a ubatch brings, applied or not."""
    return compute(memory, ubatch, kinds)[0]


def places_of(ubatch):
    """The cells that were chosen, without what the table held there."""
    return [leaf for leaf in jax.tree.leaves(ubatch.slots) if leaf.dtype == np.int32]


def same(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


# ------------------------------------------------------------------------------ rivals and texts


@pytest.mark.core
@pytest.mark.parametrize("kind", ["pool", "contiguous", "recurrent", "hybrid of streams"])
def test_ubatch_of_another_text_writes_nothing(kind):
    """It brings the same tokens to the same positions and cells, or a rival that begins alike."""
    one, other = filled(kind), filled(kind, text=(5, 4, 3, 2, 1))
    mine, foreign, rival = planned(one, [11, 12]), planned(other, [11, 12]), planned(one, [11, 13])
    assert same(places_of(mine), places_of(foreign)) and same(places_of(mine), places_of(rival))
    settled = jaxkv.apply(one, mine)
    assert_identical(jaxkv.apply(settled, rival), settled)
    for late in (foreign, rival):
        assert_identical(written(settled, late, layers_of(kind)), settled)
    assert not same(written(settled, mine, layers_of(kind)), settled)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["pool", "recurrent", "hybrid of streams"])
def test_go_back_after_another_text_is_refused(kind):
    """Same cells, positions and tokens are held; what came before them, or beside them, differs."""
    texts = (1, 2, 3, 4, 5), (2, 1, 3, 4, 5)
    pasts = [told(kind, told(kind, filled(kind, text), [11]), [12]) for text in texts]
    pasts = [jaxkv.seq_rm(jaxkv.seq_keep(memory, 0), 0, 0, 5)[0] for memory in pasts]
    beside = [told(kind, filled(kind), [11, last]) for last in (12, 13)]
    beside = [jaxkv.seq_rm(memory, 0, 6)[0] for memory in beside]
    for one, other in (pasts, beside):
        table, _ = jaxkv.split(one)
        assert jaxkv.go_back(table, one)[1]
        back, ok = jaxkv.go_back(table, other)
        assert not ok
        assert_identical(back, other)


# ------------------------------------------------------------------------ before an edit and after


def rm(memory, *args):
    return jaxkv.seq_rm(memory, *args)[0]


def updated(memory):
    return jaxkv.apply(memory, jaxkv.init_update(memory))


def moved(memory):
    """A token comes to another position, and the last position stays."""
    return jaxkv.seq_add(rm(memory, 0, 1, 3), 0, 0, 1, 1)


EDITS = {
    "cut": lambda memory, kind: rm(memory, 0, 4),
    "told another end": lambda memory, kind: told(kind, rm(memory, 0, 4), [15]),
    "told another text": lambda memory, kind: told(kind, rm(memory, 0), [16, 17, 18, 19, 20]),
    "became a fork": lambda memory, kind: jaxkv.seq_cp(rm(memory, 0), 1, 0),
    "merged": lambda memory, kind: jaxkv.seq_cp(memory, 1, 0),
    "shared": lambda memory, kind: jaxkv.seq_cp(memory, 0, 2),
    "lost its middle": lambda memory, kind: rm(memory, 0, 1, 3),
    "moved": lambda memory, kind: moved(memory),
    "rotated": lambda memory, kind: updated(moved(memory)),
    "divided": lambda memory, kind: jaxkv.seq_div(memory, 0, 0, 4, 2),
    "forgotten": lambda memory, kind: jaxkv.seq_keep(memory, 1),
    "cleared": lambda memory, kind: jaxkv.clear(memory),
}
"""Edits of sequence 0, which ends where it did after most: positions alone do not tell."""

UNCHANGED = {
    "recurrent": {"lost its middle", "moved", "rotated"},
    "hybrid of streams": {"lost its middle", "shared"},
}
"""Edits that change nothing, where there are states or in another stream only."""


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        pytest.param(kind, edit, marks=() if kind == "pool" else pytest.mark.core)
        for kind in ("pool", "recurrent", "hybrid of streams")
        for edit in EDITS
        if edit not in UNCHANGED.get(kind, ())
    ],
)
def test_plan_made_before_an_edit_changes_nothing(kind, edit):
    memory = filled(kind)
    late = planned(memory, [11, 12])
    edited = EDITS[edit](memory, kind)
    assert not same(memory, edited)
    after = jaxkv.apply(edited, late)
    assert_identical(after, edited)
    assert_identical(written(after, late, layers_of(kind)), edited)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["split", "hybrid of streams"])
def test_plan_outlives_an_edit_of_another_stream(kind):
    """Carried out before it or after it, the sequence holds the same."""
    memory = filled(kind)
    late = planned(memory, [11, 12])
    edited, ok = jaxkv.seq_rm(memory, 1)
    assert ok
    after = written(jaxkv.apply(edited, late), late, layers_of(kind))
    assert jaxkv.seq_pos_max(after, [0, 1]).tolist() == [6, -1]
    first, _ = jaxkv.seq_rm(written(jaxkv.apply(memory, late), late, layers_of(kind)), 1)
    assert_identical(after, first)


# ------------------------------------------------------------------ one of several that is stale


def test_ubatch_out_of_order_or_stale_in_part_changes_nothing():
    """Neither applied nor computed."""

    def unchanged_by(memory, ubatch):
        assert_identical(jaxkv.apply(memory, ubatch), memory)
        assert_identical(think(memory, ubatch)[0], memory)

    memory = memories.filled(1)
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([7] * 11), ubatch_size=4)
    first, middle, last = plan.ubatches
    unchanged_by(memory, middle)
    memory, _ = think(memory, first)
    unchanged_by(memory, last)
    unchanged_by(memory, first)
    memory, _ = think(memory, middle)
    memory, _ = think(memory, last)
    assert jaxkv.seq_pos_max(memory, 0).item() == 11
    memory = memories.filled(3, 3)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([[5, 6], [7]])).ubatches
    memory, _ = jaxkv.seq_rm(memory, 1, 2, -1)  # one of two sequences has moved on
    unchanged_by(memory, ubatch)


def test_commitment_is_stale_after_an_edit():
    memory, _ = jaxkv.seq_rm(memories.filled(7), 0, 1, 3)
    moved = jaxkv.seq_add(memory, 0, 3, -1, -2)
    moves, update = jaxkv.defrag_plan(memory), jaxkv.init_update(moved)
    assert jaxkv.is_current(memory, moves) and jaxkv.is_current(moved, update)
    for plan, edited in (
        (moves, memories.run(memory, jaxkv.make_batch([1], sequences=2))[0]),  # a destination
        (moves, rm(memory, 0, 5, -1)),  # a source
        (moves, rm(memory, 0, 0, 1)),  # a cell that would have stayed
        (update, jaxkv.seq_add(moved, 0, 1, 2, 1)),
        (update, jaxkv.apply(moved, update)),
    ):
        assert not jaxkv.is_current(edited, plan)
        assert_identical(jaxkv.apply(edited, plan), edited)


@pytest.mark.core
def test_commitment_stale_in_one_part_changes_no_part():
    """The later edit is one that the other part has nothing of."""
    sizes = dict(layers=1, kv_heads=HEADS, head_dim=SIZE, sequences=2, rope=ROPE)
    full = jaxkv.make_kv_cache(cells=16, **sizes)
    window = jaxkv.make_kv_cache(cells=8, window=sliding(3), **sizes)
    memory = jaxkv.make_hybrid_cache((full, (0,)), (window, (1,)))
    for text in [range(4)] * 3:  # the window gives up what is hidden
        memory, _ = memories.run(memory, jaxkv.make_batch(text, sequences=0))
    memory = jaxkv.seq_add(memory, 0, 0, -1, 4)
    update = jaxkv.init_update(memory)
    tidied, _ = jaxkv.seq_rm(jaxkv.apply(memory, update), 0, 14, 15)
    moves = jaxkv.defrag_plan(tidied)
    for before, plan, edited in (
        (memory, update, jaxkv.seq_add(memory, 0, 4, 6, -1)),
        (tidied, moves, jaxkv.seq_rm(tidied, 0, 4, 6)[0]),
    ):
        assert all(part.pending for part in plan.parts)
        assert_identical(parts_of(edited)[1], parts_of(before)[1])
        assert_identical(jaxkv.apply(edited, plan), edited)
        assert jaxkv.is_current(before, plan) and not jaxkv.is_current(edited, plan)


@pytest.mark.core
def test_commitment_stale_in_one_stream_changes_no_stream():
    memory = memories.filled(4, 4, kind=SPLIT)
    for seq in (0, 1):
        memory, _ = jaxkv.seq_rm(memory, seq, 1, 2)
    moves = jaxkv.defrag_plan(memory)
    assert moves.count.tolist() == [1, 1, 0]
    edited, _ = jaxkv.seq_rm(memory, 1, 3, 4)
    assert_identical(jaxkv.apply(edited, moves), edited)

    memory = jaxkv.seq_add(jaxkv.seq_add(memory, 0, 2, -1, -1), 1, 2, -1, -1)
    update = jaxkv.init_update(memory)
    assert jnp.any(update.shift != 0, axis=1).tolist() == [True, True, False]
    edited = jaxkv.seq_add(memory, 1, 1, -1, 1)
    assert_identical(jaxkv.apply(edited, update), edited)


@pytest.mark.core
def test_plan_for_another_memory_raises():
    """Other sizes, streams, windows, placements and kinds."""
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 4, "sequences": 3}
    recurrent = {"layers": 2, "states": {"x": ((2,), "float32")}, "sequences": 3}

    def make(cells=12, **options):
        return jaxkv.make_kv_cache(cells=cells, **sizes | options)

    memory, striped = make(), make(placement="striped", shards=2)
    states, hybrid = (
        jaxkv.make_recurrent_cache(**recurrent),
        jaxkv.make_hybrid_cache((memory, (0, 1))),
    )
    others = (
        *(make(cells=13), make(sequences=4), make(streams=3), make(window=sliding(3))),
        *(make(placement="contiguous"), striped, states, hybrid),
    )
    x = jnp.zeros((1, 2, 2, 4))
    for one, other in (
        *((memory, other) for other in others),
        *((other, memory) for other in (striped, states, hybrid)),
        (striped, make(placement="striped", shards=3)),
        (states, jaxkv.make_recurrent_cache(rollback=1, **recurrent)),
        (states, hybrid),
        (hybrid, jaxkv.make_hybrid_cache((memory, (0, 1)), (memory, (2, 3)))),
    ):
        (ubatch,) = jaxkv.init_full(other, ubatch_size=4).ubatches  # shapes tell the memory too
        update, moves = (jax.eval_shape(f, other) for f in (jaxkv.init_update, jaxkv.defrag_plan))
        for verb, *args in (
            *((jaxkv.apply, one, plan) for plan in (ubatch, update, moves)),
            (jaxkv.is_current, one, ubatch),
            (jaxkv.attend, one, 0, ubatch, x, x, x),
            (jaxkv.read_states, one, 0, ubatch),
            (jaxkv.go_back, other.table, one),
        ):
            with pytest.raises(ValueError, match="for this memory, .* got one for .*: plan again"):
                verb(*args)
