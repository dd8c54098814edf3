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
    "hybrid of streams": {"shared"},
}
"""Edits that change nothing where there are states alone, or in another stream only."""


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


@pytest.mark.core
def test_content_of_a_token_has_the_names_of_its_extras():
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=HEADS, head_dim=SIZE)
    told = [{name: np.array([i, i]) for i, name in enumerate(names)} for names in ("ab", "bc")]
    batches = [jaxkv.make_batch([1, 2], extra=extra) for extra in told]
    one, other = (jaxkv.init_batch(memory, batch).check().ubatches[0] for batch in batches)
    assert (jax.tree.leaves(one.after)[0] != jax.tree.leaves(other.after)[0]).all()
