"""A plan is of one table: made before an edit it does nothing after it, to no kind of memory.

Neither does a ubatch of another table, or a rival of the one that was applied, write buffers: what
stands in a cell belongs to one text, and the right to write it is given for that text alone.
"""

from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
from tests.histories import Twin, compute, planned, tell
from tests.memories import HEADS, SIZE, assert_identical

MEMORIES = {
    "pool": {},
    "split": {"streams": 3},
    "recurrent": {"kinds": "rr"},
    "hybrid": {"kinds": "ar"},
    "hybrid with a window": {"kinds": "ra", "window": jaxkv.window.sliding(8)},
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


def filled(kind, text=(1, 2, 3, 4, 5)):
    """Sequence 0 has a text, sequence 1 another of the same length, sequence 2 none."""
    return told(kind, empty(kind), text, (6, 7, 8, 9, 10))


def told(kind, memory, *rows):
    return tell(memory, *rows, kinds=layers_of(kind))


@partial(jax.jit, static_argnames="kinds")
def written(memory, ubatch, kinds):
    """Let all layers write what a ubatch brings, applied or not."""
    return compute(memory, ubatch, kinds)[0]


FAST = "pool", "hybrid with a window"
over_all = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in FAST else pytest.mark.core) for kind in MEMORIES],
)


@pytest.mark.core
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "pool" else pytest.mark.core) for kind in MEMORIES],
)
def test_two_pasts_never_give_one_right_to_write(kind):
    """Same positions, same cells, same token: another text before it makes it another's."""
    one, other = filled(kind), filled(kind, text=(5, 4, 3, 2, 1))
    mine, foreign = planned(one, [11, 12]), planned(other, [11, 12])
    assert same(places_of(mine), places_of(foreign))
    settled = jaxkv.apply(one, mine)
    assert_identical(written(settled, foreign, layers_of(kind)), settled)
    assert not same(written(settled, mine, layers_of(kind)), settled)


@pytest.mark.core
@over_all
def test_a_rival_that_begins_alike_writes_nothing(kind):
    """Not even the token that both begin with: the ubatch was not taken in as a whole."""
    memory = filled(kind)
    mine, rival = planned(memory, [11, 12]), planned(memory, [11, 13])
    settled = jaxkv.apply(memory, mine)
    assert_identical(jaxkv.apply(settled, rival), settled)
    assert_identical(written(settled, rival, layers_of(kind)), settled)


@pytest.mark.core
@over_all
def test_what_followed_another_past_is_another_s(kind):
    """Same cells, positions and tokens, and the past is gone by now; yet the numbers differ."""
    one, other = (
        told(kind, told(kind, filled(kind, text), [11]), [12])
        for text in ((1, 2, 3, 4, 5), (2, 1, 3, 4, 5))
    )
    one, other = (jaxkv.seq_rm(jaxkv.seq_keep(memory, 0), 0, 0, 5)[0] for memory in (one, other))
    table, _ = jaxkv.split(one)
    assert jaxkv.go_back(table, one)[1]
    back, ok = jaxkv.go_back(table, other)
    assert not ok
    assert_identical(back, other)


@pytest.mark.core
@over_all
def test_what_was_computed_beside_others_is_another_s(kind):
    """The token before may have looked at them, as attention that is not causal does."""
    memory = filled(kind)
    one, other = (told(kind, memory, [11, last]) for last in (12, 13))
    one, other = (jaxkv.seq_rm(memory, 0, 6)[0] for memory in (one, other))
    table, _ = jaxkv.split(one)
    assert jaxkv.go_back(table, one)[1]
    assert not jaxkv.go_back(table, other)[1]


def places_of(ubatch):
    """The cells that were chosen, without what the table held there."""
    return [leaf for leaf in jax.tree.leaves(ubatch.slots) if leaf.dtype == np.int32]


def same(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


# ------------------------------------------------------------------------ before an edit and after


def cut_and_told_anew(memory, kind):
    """The end goes, and another token comes to the same position."""
    memory, ok = jaxkv.seq_rm(memory, 0, 4)
    assert ok
    return told(kind, memory, [15])


def anew(memory, kind):
    """All goes, and another text of the same length comes."""
    memory, ok = jaxkv.seq_rm(memory, 0)
    assert ok
    return told(kind, memory, [16, 17, 18, 19, 20])


def another_s(memory, kind):
    """Sequence 0 becomes a fork of 1, which ends at the same position."""
    memory, _ = jaxkv.seq_rm(memory, 0)
    return jaxkv.seq_cp(memory, 1, 0)


def merged(memory, kind):
    return jaxkv.seq_cp(memory, 1, 0)


def shared(memory, kind):
    """Another sequence owns its cells too; in streams of their own it gets copies."""
    return jaxkv.seq_cp(memory, 0, 2)


def without_a_middle(memory, kind):
    return jaxkv.seq_rm(memory, 0, 1, 3)[0]


def with_a_token_moved(memory, kind):
    """The last position stays; keys are owed a rotation."""
    return jaxkv.seq_add(without_a_middle(memory, kind), 0, 0, 1, 1)


def divided(memory, kind):
    """All but the last stand at half their positions."""
    return jaxkv.seq_div(memory, 0, 0, 4, 2)


def rotated(memory, kind):
    memory = with_a_token_moved(memory, kind)
    return jaxkv.apply(memory, jaxkv.init_update(memory))


def cut(memory, kind):
    memory, ok = jaxkv.seq_rm(memory, 0, 4)
    assert ok
    return memory


def gone(memory, kind):
    return jaxkv.seq_keep(memory, 1)


def cleared(memory, kind):
    return jaxkv.clear(memory)


EDITS = [
    cut_and_told_anew, anew, another_s, merged, shared, without_a_middle, with_a_token_moved,
    divided, rotated, cut, gone, cleared,
]  # fmt: skip
"""The sequence ends where it did after most of them: positions alone do not tell."""

NOTHING = {
    "recurrent": {without_a_middle, with_a_token_moved, rotated},
    "split": {shared},
    "hybrid of streams": {shared},
}
"""Edits that change nothing where there are states alone, or in another stream only."""

CASES = [
    pytest.param(
        kind,
        edit,
        id=f"{kind}-{edit.__name__}",
        marks=() if kind == "pool" else pytest.mark.core,
    )
    for kind in MEMORIES
    for edit in EDITS
    if edit not in NOTHING.get(kind, ())
]


@pytest.mark.parametrize(("kind", "edit"), CASES)
def test_a_plan_made_before_an_edit_is_not_carried_out_after_it(kind, edit):
    memory = filled(kind)
    late = planned(memory, [11, 12])
    edited = edit(memory, kind)
    assert not same(memory, edited)
    after = jaxkv.apply(edited, late)
    assert_identical(after, edited)
    assert_identical(written(after, late, layers_of(kind)), edited)


@pytest.mark.parametrize(
    "kind", ["split", pytest.param("hybrid of streams", marks=pytest.mark.core)]
)
def test_an_edit_of_another_stream_leaves_a_plan_as_it_was(kind):
    """Told before or after it, the sequence holds the same."""
    memory = filled(kind)
    late = planned(memory, [11, 12])
    edited, ok = jaxkv.seq_rm(memory, 1)
    assert ok
    after = written(jaxkv.apply(edited, late), late, layers_of(kind))
    assert jaxkv.seq_pos_max(after, [0, 1]).tolist() == [6, -1]
    first, _ = jaxkv.seq_rm(written(jaxkv.apply(memory, late), late, layers_of(kind)), 1)
    assert_identical(after, first)


@pytest.mark.parametrize("names", [("row", "col"), ("a b", "b c")])
def test_what_else_a_token_is_told_is_known_by_its_name(names):
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=HEADS, head_dim=SIZE)
    told = [{name: np.array([i, i]) for i, name in enumerate(each.split())} for each in names]
    batches = [jaxkv.make_batch([1, 2], extra=extra) for extra in told]
    one, other = (jaxkv.init_batch(memory, batch).check().ubatches[0] for batch in batches)
    assert (jax.tree.leaves(one.after)[0] != jax.tree.leaves(other.after)[0]).all()
