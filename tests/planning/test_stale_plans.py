"""A plan is valid for one table: after a later edit it changes no cache of any kind.

A ubatch of another table, or a rival of the applied one, does not write buffers either: a cell
accepts only the tokens for which it was planned.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import snapshot
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.window import Window
from tests.helpers import caches
from tests.helpers.caches import SMALL, SPLIT, assert_identical, attention_cache, parse_cache
from tests.helpers.edit_sequences import StateKind, compute, plan_tokens, run_rows
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch, apply_plan

pytestmark = pytest.mark.core

KINDS = {
    "pool": SMALL,
    "split": SPLIT,
    "recurrent": StateKind("recurrent", 16, 3),
    "hybrid of streams": StateKind("hybrid of streams", 16, 3, streams=3, model="ar"),
}


def layers_of(kind):
    return getattr(KINDS[kind], "model", "aa")


@functools.cache
def make_two_texts(kind, text=(1, 2, 3, 4, 5)):
    """Sequence 0 has a text, sequence 1 another of the same length, sequence 2 none."""
    return run_texts(kind, KINDS[kind].make(rope=None), text, (6, 7, 8, 9, 10))


def run_texts(kind, cache, *rows):
    return run_rows(cache, *rows, kinds=layers_of(kind))


@partial(jax.jit, static_argnames="kinds")
def run_layers(cache, ubatch, kinds):
    """Apply a ubatch and write it in all layers."""
    return compute(jaxkv.apply(cache, ubatch), kinds)[0].cache


def same(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


@pytest.mark.parametrize("kind", ["pool", "recurrent", "hybrid of streams"])
def test_ubatch_of_another_text_writes_nothing(kind):
    """The same tokens for the same positions and cells, or a rival with the same first token."""
    one, other = make_two_texts(kind), make_two_texts(kind, text=(5, 4, 3, 2, 1))
    mine, rival = (plan_tokens(one, [11, token]) for token in (12, 13))
    foreign = plan_tokens(other, [11, 12])
    for late in (foreign, rival):  # the cells' contents are compared by hashes
        pairs = zip(jax.tree.leaves(mine.slots), jax.tree.leaves(late.slots), strict=True)
        assert all(np.array_equal(x, y) for x, y in pairs if x.dtype == np.int32)
    settled = apply_plan(one, mine)
    assert_identical(apply_plan(settled, rival), settled)
    for late in (foreign, rival):
        assert_identical(run_layers(settled, late, layers_of(kind)), settled)
    assert_identical(run_layers(settled, mine, layers_of(kind)), settled)  # stale after its apply


@pytest.mark.parametrize("kind", ["pool", "recurrent", "hybrid of streams"])
def test_rewind_after_another_text_is_refused(kind):
    """Cells, positions and tokens are equal; earlier or neighbouring tokens differ."""
    texts = (1, 2, 3, 4, 5), (2, 1, 3, 4, 5)
    pasts = [
        run_texts(kind, run_texts(kind, make_two_texts(kind, text), [11]), [12]) for text in texts
    ]
    pasts = [jaxkv.seq_rm(jaxkv.seq_keep(cache, 0).cache, 0, 0, 5)[0] for cache in pasts]
    beside = [run_texts(kind, make_two_texts(kind), [11, last]) for last in (12, 13)]
    beside = [jaxkv.seq_rm(cache, 0, 6)[0] for cache in beside]
    for one, other in (pasts, beside):
        table = one.table
        assert jaxkv.rewind(one, to=table)[1]
        back, ok = jaxkv.rewind(other, to=table)
        assert not ok
        assert_identical(back, other)


def remove(cache, *args):
    return jaxkv.seq_rm(cache, *args)[0]


def move_token(cache):
    """Move a token to another position; the last position stays."""
    return jaxkv.seq_add(remove(cache, 0, 1, 3), 0, 0, 1, delta=1).cache


EDITS = {
    "cut": lambda cache, kind: remove(cache, 0, 4),
    "has another end": lambda cache, kind: run_texts(kind, remove(cache, 0, 4), [15]),
    "has another text": lambda cache, kind: run_texts(kind, remove(cache, 0), [16, 17, 18, 19, 20]),
    "became a fork": lambda cache, kind: jaxkv.seq_cp(remove(cache, 0), 1, 0).cache,
    "merged": lambda cache, kind: jaxkv.seq_cp(cache, 1, 0).cache,
    "shared": lambda cache, kind: jaxkv.seq_cp(cache, 0, 2).cache,
    "lost its middle": lambda cache, kind: remove(cache, 0, 1, 3),
    "moved": lambda cache, kind: move_token(cache),
    "rotated": lambda cache, kind: jaxkv.apply(
        move_token(cache), jaxkv.init_update(move_token(cache))
    ),
    "divided": lambda cache, kind: jaxkv.seq_div(cache, 0, 0, 4, divisor=2).cache,
    "forgotten": lambda cache, kind: jaxkv.seq_keep(cache, 1).cache,
    "cleared": lambda cache, kind: jaxkv.clear(cache),
}
"""Edits of sequence 0, most of which keep its last position: positions do not detect them."""

UNCHANGED = {
    "pool": set(),
    "recurrent": {"lost its middle", "moved", "rotated"},
    "hybrid of streams": {"lost its middle", "shared"},
}
"""Edits without an effect on plans, for states or for another stream only."""


@pytest.mark.parametrize(
    ("kind", "edit"),
    [(kind, edit) for kind in UNCHANGED for edit in EDITS if edit not in UNCHANGED[kind]],
)
def test_plan_made_before_an_edit_changes_nothing(kind, edit):
    cache = make_two_texts(kind)
    late = plan_tokens(cache, [11, 12])
    edited = EDITS[edit](cache, kind)
    assert not same(cache, edited)
    assert_identical(apply_plan(edited, late), edited)
    assert_identical(run_layers(edited, late, layers_of(kind)), edited)


@pytest.mark.parametrize("kind", ["split", "hybrid of streams"])
def test_plan_outlives_an_edit_of_another_stream(kind):
    """Applied before it or after it, the result is the same."""
    cache = make_two_texts(kind)
    late = plan_tokens(cache, [11, 12])
    edited, ok = jaxkv.seq_rm(cache, 1)
    assert ok
    after = run_layers(edited, late, layers_of(kind))
    assert after.seq_pos_max([0, 1]).tolist() == [6, -1]
    first, _ = jaxkv.seq_rm(run_layers(cache, late, layers_of(kind)), 1)
    assert_identical(after, first)


def test_maintenance_plan_is_stale_after_an_edit():
    cache, _ = jaxkv.seq_rm(caches.fill_cache(7), 0, 1, 3)
    moved = jaxkv.seq_add(cache, 0, 3, -1, delta=-2).cache
    moves, update = jaxkv.defrag_plan(cache), jaxkv.init_update(moved)
    assert cache.is_current(moves) and moved.is_current(update)
    for plan, edited in (
        (moves, caches.run_batch(cache, jaxkv.make_batch([1], sequences=2))[0]),  # a destination
        (moves, remove(cache, 0, 5, -1)),  # a source
        (moves, remove(cache, 0, 0, 1)),  # a cell that would stay
        (update, jaxkv.seq_add(moved, 0, 1, 2, delta=1).cache),
        (update, jaxkv.apply(moved, update)),
    ):
        assert not edited.is_current(plan)
        assert_identical(jaxkv.apply(edited, plan), edited)


@pytest.mark.parametrize("window", mark_cases([0, 1], fast=[0]))
def test_maintenance_plan_stale_in_one_part_changes_no_part(window):
    sizes = dict(layers=1, kv_heads=caches.HEADS, head_dim=caches.SIZE, rope=caches.ROPE)
    make = partial(attention_cache, **sizes)
    parts = [(make(cells=16), (0,))]
    parts.insert(window, (make(cells=8, window=Window.sliding(3)), (1,)))
    cache = compose_hybrid_cache(*parts)
    for text in [range(4)] * 3:  # the window evicts hidden cells
        cache, _ = caches.run_batch(cache, jaxkv.make_batch(text, sequences=0))
    cache = jaxkv.seq_add(cache, 0, 0, -1, delta=4).cache
    update = jaxkv.init_update(cache)
    tidied, _ = jaxkv.seq_rm(jaxkv.apply(cache, update), 0, 14, 15)
    moves = jaxkv.defrag_plan(tidied)
    for before, plan, edited in (
        (cache, update, jaxkv.seq_add(cache, 0, 4, 6, delta=-1).cache),
        (tidied, moves, jaxkv.seq_rm(tidied, 0, 4, 6)[0]),
    ):
        assert all(part.num_changes for part in plan.parts)
        assert_identical(edited.parts[window], before.parts[window])
        assert_identical(jaxkv.apply(edited, plan), edited)
        assert before.is_current(plan) and not edited.is_current(plan)


def test_maintenance_plan_stale_in_one_stream_changes_no_stream():
    cache = parse_cache("0{0} . 2{0} 3{0} | 0{1} . 2{1} 3{1}", SPLIT)
    moves = jaxkv.defrag_plan(cache)
    assert jnp.sum(moves.length > 0, axis=1).tolist() == [1, 1, 0]
    edited = remove(cache, 1, 3, 4)
    assert_identical(jaxkv.apply(edited, moves), edited)
    cache = parse_cache("0{0} 1{0}-1 | 0{1} 1{1}-1", SPLIT)
    update = jaxkv.init_update(cache)
    assert jnp.any(update.shift != 0, axis=1).tolist() == [True, True, False]
    edited = jaxkv.seq_add(cache, 1, 1, -1, delta=1).cache
    assert_identical(jaxkv.apply(edited, update), edited)


def test_plan_for_another_cache_raises():
    make = partial(attention_cache, layers=2, cells=12, kv_heads=2, head_dim=4, sequences=3)
    of_states = partial(caches.recurrent_cache, layers=2, sequences=3)
    of_states = partial(of_states, states={"x": ((2,), "float32")})
    cache, striped, states = make(), make(placement="striped:2"), of_states()
    hybrid = compose_hybrid_cache((cache, (0, 1)))
    unlike = make(cells=13), make(sequences=4), make(streams=3), make(window=Window.sliding(3))
    others = *unlike, striped, states, hybrid
    for one, other in (
        *((cache, other) for other in others),
        *((other, cache) for other in (striped, states, hybrid)),
        (striped, make(placement="striped:3")),
        (states, of_states(max_rollback=1)),
        (states, hybrid),
        (hybrid, compose_hybrid_cache((cache, (0, 1)), (cache, (2, 3)))),
    ):
        (ubatch,) = jaxkv.init_full(other, ubatch_size=4).ubatches  # shapes identify the cache too
        update, moves = (jax.eval_shape(f, other) for f in (jaxkv.init_update, jaxkv.defrag_plan))
        for verb, *args in (
            *((jaxkv.apply, one, plan) for plan in (ubatch, update, moves)),
            (type(one).is_current, one, ubatch),
            (lambda cache, table: jaxkv.rewind(cache, to=table), one, other.table),
        ):
            with pytest.raises(ValueError, match="for this cache, .* got one for .*; plan again"):
                verb(*args)


def after_copies_of_two_texts(kind):
    for text in ([1, 2], [7, 8, 9, 10]):
        cache = run_texts(kind, KINDS[kind].make(rope=None), text, [])
        yield jaxkv.seq_cp(cache, 0, 2).cache


def after_an_update_and_a_defrag():
    cache, _ = jaxkv.seq_rm(apply_batch(SMALL.make(), [[1], [2, 2], [3, 3]]), 0, 0, 1)
    cache = jaxkv.seq_add(cache, 2, 1, -1, delta=3).cache
    plans = jaxkv.init_update(cache), jaxkv.defrag_plan(cache)
    assert plans[0].num_changes == plans[1].num_changes
    for plan in plans:
        yield jaxkv.apply(cache, plan)


def after_loads_of_other_sequences(kind):
    data = snapshot.save(run_texts(kind, KINDS[kind].make(rope=None), [1, 2, 3], [4]))
    for sequences in ({0: 0, 1: 2}, {0: 2, 1: 0}):
        yield snapshot.load(data, into=KINDS[kind].make(rope=None), sequences=sequences)


@pytest.mark.parametrize(
    "histories",
    [
        *(partial(after_copies_of_two_texts, kind) for kind in ("split", "hybrid of streams")),
        after_an_update_and_a_defrag,
        *(partial(after_loads_of_other_sequences, kind) for kind in ("pool", "recurrent")),
    ],
    ids=["copies", "copies of hybrids", "an update and a defrag", "loads", "loads of states"],
)
def test_plan_of_one_history_is_stale_in_another(histories):
    """Equal edits with other results, of one cache: the edits give streams other versions."""
    one, other = histories()
    plan = jaxkv.init_batch(one, jaxkv.make_batch([1], sequences=2)).check()
    assert one.is_current(plan) and not other.is_current(plan)
