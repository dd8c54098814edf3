"""Windows: what tokens see, which cells are taken again, and what can no longer be gone back to.

Traps are numbered as in a list of cases from llama.cpp's code and bug reports; where the decision
here differs from what llama.cpp does, the test says so.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.kv.mask import visible
from jaxkv.window import chunked, sees, sliding, symmetric
from tests.cases import in_lanes
from tests.cells.windows import FOUR, plan_of, resumable, told
from tests.memories import Kind, assert_identical, drawing, drawn, run

core = pytest.mark.core
SIX = "0{0} 1{0} 2{0} 3{0} 4{0} 5{0}"
MIXED = "2{0} 0{0} 1{0} 3{0} 4{0} 5{0}"


# ---- what is seen


@pytest.mark.parametrize(
    ("window", "causal", "seen"),
    [
        (None, True, {5: [0, 1, 2, 3, 4, 5]}),
        (None, False, {5: [*range(12)]}),
        (sliding(4), True, {5: [2, 3, 4, 5], 2: [0, 1, 2], 11: [8, 9, 10, 11]}),
        (sliding(1), True, {5: [5], 0: [0]}),
        (chunked(4), True, {5: [4, 5], 7: [4, 5, 6, 7], 8: [8]}),  # trap 53: they begin anew
        (symmetric(5), True, {5: [3, 4, 5]}),
        (symmetric(5), False, {5: [3, 4, 5, 6, 7]}),  # trap 54: it looks ahead
    ],
    ids=str,
)
def test_visible_of_windows(window, causal, seen):
    kind = Kind("seen", cells=12, sequences=1, windows=(window,))
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(12)), kind)
    (ubatch,) = plan_of(Kind("blank", cells=12, sequences=1).make()).ubatches
    for query, positions in seen.items():
        at = replace(ubatch, positions=0 * ubatch.positions + query)
        mask = visible(memory.table, at, causal=causal)[0, 0]
        assert np.flatnonzero(mask).tolist() == positions


def test_sees_symmetric_window_at_the_last_position():
    """Nothing overflows."""
    at = np.int32(2**31 - 4) + np.arange(3, dtype=np.int32)
    assert sees(symmetric(4), at[:, None], at[None], causal=False).all()


@partial(jax.jit, static_argnames="causal")
def attend(memory, ubatch, value, causal):
    memory = jaxkv.apply(memory, ubatch)
    return jaxkv.attend(memory, 0, ubatch, 0 * value, value, value, causal=causal)[1]


@core
@pytest.mark.parametrize(
    ("window", "causal", "seen"),
    [
        (symmetric(5), False, [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]),
        pytest.param(None, False, [[*range(6)]] * 6, marks=pytest.mark.nightly),
        (sliding(2), True, [[0], [0, 1], [1, 2], [2, 3]]),
    ],
)
def test_attend_is_the_mean_over_what_is_seen(window, causal, seen):
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=1, window=window)
    (ubatch,) = plan_of(memory, 6).ubatches
    value = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
    out = np.asarray(attend(memory, ubatch, value, causal))[0, :, 0, 0]
    np.testing.assert_allclose(out[: len(seen)], [*map(np.mean, seen)], rtol=1e-6)


def test_attention_softcap_and_sinks_match_formula():
    attention = jaxkv.ops.attention.attention
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 4)), jnp.float32) for n in (3, 5, 5))
    mask = jnp.asarray(np.tril(np.ones((3, 5), bool), 2)[None])
    sinks = jnp.array([0.5, -1.0])
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    got = attention(q, k, v, mask, scale=2.0, softcap=3.0, sinks=sinks)
    logits = 3.0 * np.tanh(2.0 * np.einsum("rthd,rhnd->rhtn", q, k) / 3.0)
    weights = np.where(np.asarray(mask)[:, None], np.exp(logits), 0.0)
    total = weights.sum(-1, keepdims=True) + np.exp(np.asarray(sinks))[None, :, None, None]
    wanted = np.einsum("rhtn,rhnd->rthd", weights / total, v)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
    nothing = attention(q, k, v, jnp.zeros_like(mask), sinks=sinks)
    np.testing.assert_array_equal(nothing, 0.0)
    with pytest.raises(ValueError, match=r"wanted sinks \(2,\)"):
        attention(q, k, v, mask, sinks=jnp.zeros(3))


# ---- which cells are taken again


@pytest.mark.parametrize(
    ("cells", "count", "after", "evicted_below"),
    [
        # Trap 25: the lowest positions first, so that what remains is dense. llama.cpp purges in
        # the order of cells.
        (MIXED, 1, "2{0} 6{0} 1{0} 3{0} 4{0} 5{0}", [1, 0, 0]),
        (MIXED, 3, "8{0} 6{0} 7{0} 3{0} 4{0} 5{0}", [3, 0, 0]),
        # Trap 24: window 4, next is 6: positions up to 2 may be taken, 3 may not.
        (SIX, 4, None, None),
        # Trap 27: a shared prefix that no owner sees. llama.cpp never takes a cell of two owners.
        (
            "0{0,1} 1{0,1} 2{0,1} 3{0,1} 4{0,1} 5{0,1}", 2,
            "6{0} 7{0} 2{0,1} 3{0,1} 4{0,1} 5{0,1}", [2, 2, 0],
        ),
        # What an owner still sees is kept: 1 goes on at 2 and sees 0 and 1; 0 has 2 to give.
        ("0{0,1} 1{0,1} 2{0} 3{0} 4{0} 5{0}", 2, None, None),
        ("0{0,1} 1{0,1} 2{0} 3{0} 4{0} 5{0}", 1, "0{1} 1{1} 6{0} 3{0} 4{0} 5{0}", [3, 0, 0]),
    ],
)  # fmt: skip
def test_init_batch_takes_cells_that_no_next_token_sees(cells, count, after, evicted_below):
    memory = drawn(cells, FOUR)
    plan = plan_of(memory, count)
    if after is None:
        assert not plan.ok and plan.reason[0] == Reason.NO_ROOM
        return
    memory = jaxkv.apply(memory, plan)
    assert drawing(memory) == after and memory.table.evicted_below.tolist() == evicted_below


def test_apply_contiguous_takes_a_run_and_leaves_no_hole():
    """Trap 25."""
    kind = Kind("three", cells=6, sequences=1, windows=(sliding(3),), placement="contiguous")
    memory = drawn(MIXED, kind)
    memory = jaxkv.apply(memory, plan_of(memory, 1))
    assert drawing(memory) == "6{0} . . 3{0} 4{0} 5{0}"
    assert memory.table.evicted_below.tolist() == [3]


@core
def test_apply_refused_batch_takes_nothing():
    """Trap 26. llama.cpp: the ubatches that did fit have thrown out what they would replace."""
    memory = drawn(MIXED, FOUR)
    plan = jaxkv.init_batch(memory, make_batch([1] * 7), ubatch_size=4)
    assert not plan.ok and len(plan.ubatches) == 2
    for ubatch in plan.ubatches:
        assert_identical(jaxkv.apply(memory, ubatch), memory)


def test_apply_takes_hidden_cells_of_a_neighbour():
    """Trap 28. The neighbour's next token sees all that it should; it cannot go further back."""
    memory = drawn(SIX, FOUR)
    assert resumable(memory) == [*range(7)]
    memory = jaxkv.apply(memory, plan_of(memory, 2, seq=1))
    assert drawing(memory) == "0{1} 1{1} 2{0} 3{0} 4{0} 5{0}"
    assert resumable(memory) == [5, 6]
    assert jaxkv.seq_pos_min(memory, [0, 1]).tolist() == [2, 0]


@core
def test_window_of_one_goes_on_though_it_holds_nothing():
    kind = Kind("one", cells=2, sequences=2, windows=(sliding(1),))
    memory = told(kind.make(), 5)
    assert jaxkv.seq_pos_max(memory, 0) == 4
    other = jaxkv.apply(memory, plan_of(memory, 2, seq=1))  # takes all that 0 has
    assert jaxkv.seq_pos_max(other, [0, 1]).tolist() == [-1, 1]
    plan = plan_of(other)
    assert plan.ok and plan.ubatches[0].positions[0, 0] == 5


# ---- going on after a cut


def test_init_batch_token_that_would_miss_something_is_lost():
    """Trap 29. llama.cpp answers that all is well, and attention is short."""
    memory = told(FOUR.make(), 10)
    assert jaxkv.seq_pos_min(memory, 0) == 4
    short, _ = jaxkv.seq_rm(memory, 0, 8)
    assert jaxkv.can_resume(short, 0, 8) and plan_of(short).ok
    cut, ok = jaxkv.seq_rm(memory, 0, 6)
    assert ok and not jaxkv.can_resume(cut, 0, 6)
    plan = plan_of(cut)
    assert plan.reason[0] == Reason.LOST and plan.found[0] == 6
    with pytest.raises(jaxkv.RefusedError, match="its next token stands at 6"):
        plan.check()
    assert_identical(jaxkv.apply(cut, plan), cut)
    anew, _ = jaxkv.seq_rm(cut, 0)
    assert plan_of(anew).ok and jaxkv.can_resume(anew, 0, 0)


def test_init_batch_after_seq_rm_of_hidden_tokens_is_not_lost():
    """Trap 29. What the caller removes is not missed, as in a memory without a window."""
    memory, _ = jaxkv.seq_rm(drawn("0{0} 1{0} 2{0} 3{0}", FOUR), 0, 1, 3)
    assert memory.table.evicted_below[0] == 0 and plan_of(memory).ok


def test_can_resume_anywhere_in_a_text_shorter_than_its_window():
    """Trap 97; and an empty sequence starts anywhere."""
    memory = told(FOUR.make(), 5)
    assert resumable(memory) == [*range(6)]
    assert all(plan_of(jaxkv.seq_rm(memory, 0, pos)[0]).ok for pos in range(5))
    assert resumable(memory, seq=1) == [*range(10)]


@core
def test_check_invariants_counts_a_position_without_an_owner():
    """Trap 57. llama.cpp keeps such a cell, used for ever."""
    table, buffers = jaxkv.split(drawn("0{0} 1{0}", FOUR))
    table = replace(table, owners=table.owners.at[0, 0, 0].set(0))
    faults = jaxkv.check_invariants(jaxkv.join(table, buffers))
    assert faults["position without an owner"] == 1


# ---- sizes


@pytest.mark.parametrize(
    ("window", "streams", "each"),
    in_lanes(
        [(window, s, 8) for window in (sliding(4), chunked(4), symmetric(6)) for s in (1, 2)]
        + [(chunked(4), 2, 2)],
        fast=[],
        core=[(chunked(4), 2, 2)],
    ),
)
def test_make_kv_cache_sized_by_window_matches_a_large_one(window, streams, each):
    """Cells for window, ubatch and rollback are enough for a text of any length.

    It comes in batches of `each` tokens, of which two are taken back.
    """
    sizes = dict(layers=2, kv_heads=2, head_dim=4, sequences=2, streams=streams, window=window)
    sizes["rope"] = jaxkv.make_rope(4, base=100.0)
    small = jaxkv.make_kv_cache(**sizes, ubatch_size=4, rollback=2)
    large = jaxkv.make_kv_cache(**sizes, cells=96)
    assert small.buffers.k[0].shape[2] == (window.width + 6) * 2 // streams
    rng = np.random.default_rng(0)
    for i in range(32 // each):
        batch = make_batch(rng.integers(1, 9, 2 * each), sequences=np.arange(2 * each) % 2)
        small, one = run(small, batch)
        large, other = run(large, batch)
        np.testing.assert_allclose(one, other, atol=1e-5)
        if i % 3 == 2:
            last = jaxkv.seq_pos_max(large, 1)
            small, large = (jaxkv.seq_rm(memory, 1, last - 1)[0] for memory in (small, large))


@core
def test_init_batch_ubatch_larger_than_sized_for_raises():
    memory = jaxkv.make_kv_cache(layers=1, kv_heads=1, head_dim=2, window=sliding(4), ubatch_size=8)
    batch = make_batch([1] * 20)
    ubatches = jaxkv.init_batch(memory, batch).ubatches
    assert len(ubatches) == 3  # what it was sized for is the default
    with pytest.raises(ValueError, match="sized for ubatches of 8 tokens, got ubatch_size=16"):
        jaxkv.init_batch(memory, batch, ubatch_size=16)


# ---- hybrids


@core
def test_hybrid_begins_where_its_window_begins():
    """Trap 85. The full part holds 0 to 9, the window part 4 to 9; both can be moved."""
    cells = " ".join(f"{i}{{0}}" for i in range(10))
    sizes = dict(cells=10, sequences=1)
    full, window = (drawn(cells, Kind("", **sizes, windows=(one,))) for one in (None, sliding(4)))
    window, _ = jaxkv.seq_rm(window, 0, 0, 4)
    memory = jaxkv.make_hybrid_cache((full, (0, 1)), (window, (2, 3)))
    assert jaxkv.seq_pos_min(memory, 0) == 4 and jaxkv.seq_pos_max(memory, 0) == 9
    moved = jaxkv.seq_add(memory, 0, 5, -1, 3)
    assert jaxkv.seq_pos_max(moved, 0) == 12
    moved = jaxkv.apply(moved, jaxkv.init_update(moved))
    assert not any(part.shift.any() for part in moved.table.parts)


@pytest.mark.parametrize(
    "cells",
    [pytest.param((6, 30), marks=core), pytest.param((30, 6), marks=pytest.mark.nightly)],
)
def test_apply_hybrid_without_room_in_one_part_changes_nothing(cells):
    sizes = dict(layers=1, kv_heads=2, head_dim=4, sequences=1)
    memory = jaxkv.make_hybrid_cache(
        (jaxkv.make_kv_cache(**sizes, cells=cells[0]), (0,)),
        (jaxkv.make_kv_cache(**sizes, cells=cells[1], window=sliding(4)), (1,)),
    )
    memory = jaxkv.apply(memory, plan_of(memory, 4))
    plan = plan_of(memory, 4)
    assert not plan.ok and plan.reason[0] == Reason.NO_ROOM
    assert_identical(jaxkv.apply(memory, plan), memory)


def test_hybrid_of_parts_that_do_not_fit_together_raises():
    one, two = (
        jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=q) for q in (1, 2)
    )
    with pytest.raises(ValueError, match=r"same number of sequences, got \[1, 2\]"):
        jaxkv.make_hybrid_cache((one, (0,)), (two, (1,)))
    with pytest.raises(ValueError, match="at least one part"):
        jaxkv.make_hybrid_cache()
    memory = jaxkv.make_hybrid_cache((one, (0,)), (one, (2,)))
    plan = jax.eval_shape(plan_of, memory)
    x = jnp.ones((1, 8, 1, 2))
    with pytest.raises(ValueError, match=r"of \[0, 2\], got 1"):
        jaxkv.attend(memory, 1, plan.ubatches[0], x, x, x)


def test_window_without_a_position_raises():
    with pytest.raises(ValueError, match="positions, of at least 1, got 0"):
        sliding(0)
    with pytest.raises(ValueError, match="needs to be told its cells"):
        jaxkv.make_kv_cache(layers=1, kv_heads=1, head_dim=2)
