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
from tests.cases import mostly_nightly
from tests.memories import Kind, assert_identical, drawing, drawn, run, sign, think

FOUR = Kind("four", cells=6, sequences=3, windows=(jaxkv.window.sliding(4),))


def plan_of(memory, count, seq=0, **options):
    return jaxkv.init_batch(memory, make_batch([1] * count, sequences=seq), **options)


def grown(kind, count, seq=0, memory=None):
    """A memory with so many tokens of one sequence, one after another."""
    memory = kind.make() if memory is None else memory
    for i in range(count):
        memory, _ = run(memory, make_batch([i % 9 + 1], sequences=seq))
    return memory


@partial(jax.jit, static_argnames="causal")
def attend(memory, ubatch, value, causal):
    memory = jaxkv.apply(memory, ubatch)
    return jaxkv.attend(memory, 0, ubatch, 0 * value, value, value, causal=causal)[1]


attention = jaxkv.ops.attention.attention


def seen_from(window, query, *, causal=True, count=12):
    """The positions that a token at `query` sees, of `count` that are there."""
    kind = Kind("seen", cells=count, sequences=1, windows=(window,))
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(count)), kind)
    blank = plan_of(Kind("blank", cells=count, sequences=1).make(), 1).ubatches[0]
    ubatch = replace(blank, positions=jnp.array([[query]]))
    return np.flatnonzero(visible(memory.table, ubatch, causal=causal)[0, 0]).tolist()


@pytest.mark.parametrize(
    ("window", "causal", "seen"),
    [
        (None, True, {5: [0, 1, 2, 3, 4, 5]}),
        (None, False, {5: [*range(12)]}),
        (jaxkv.window.sliding(4), True, {5: [2, 3, 4, 5], 2: [0, 1, 2], 11: [8, 9, 10, 11]}),
        (jaxkv.window.sliding(1), True, {5: [5], 0: [0]}),
        (jaxkv.window.symmetric(5), True, {5: [3, 4, 5]}),
    ],
)
def test_who_is_seen(window, causal, seen):
    assert {query: seen_from(window, query, causal=causal) for query in seen} == seen


def test_trap_53_chunks_begin_anew():
    seen = {query: seen_from(jaxkv.window.chunked(4), query) for query in (5, 7, 8)}
    assert seen == {5: [4, 5], 7: [4, 5, 6, 7], 8: [8]}


def test_trap_54_a_symmetric_window_looks_ahead_where_attention_is_not_causal():
    assert seen_from(jaxkv.window.symmetric(5), 5, causal=False) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("start", [5, 2**31 - 4])
def test_a_symmetric_window_looks_ahead_up_to_the_last_position(start):
    window, at = jaxkv.window.symmetric(4), np.int32(start) + np.arange(3, dtype=np.int32)
    seen = jaxkv.window.sees(window, at[:, None], at[None], causal=False)
    assert seen.all()


@pytest.mark.core
def test_attention_obeys_causal_and_window():
    """What `attend` gives is the mean over those that are seen, however the mask is made."""
    for window, causal, seen in [
        (
            jaxkv.window.symmetric(5),
            False,
            [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5]],
        ),
        (None, False, [[*range(6)]] * 6),
        (jaxkv.window.sliding(2), True, [[0], [0, 1], [1, 2], [2, 3]]),
    ]:
        memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=1, window=window)
        plan = plan_of(memory, 6)
        (ubatch,) = plan.ubatches
        value = np.arange(8, dtype=np.float32).reshape(1, 8, 1, 1)
        out = attend(memory, ubatch, value, causal)
        for t, cells in enumerate(seen):
            np.testing.assert_allclose(np.asarray(out)[0, t, 0, 0], np.mean(cells), rtol=1e-6)


def test_trap_24_a_cell_is_free_when_the_next_token_looks_past_it():
    """Window 4, next is 6: positions up to 2 may be taken, 3 may not."""
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", FOUR)
    assert plan_of(memory, 3).ok
    assert not plan_of(memory, 4).ok
    assert plan_of(memory, 4).reason[0] == Reason.NO_ROOM


def test_trap_25_what_lies_before_the_taken_cell_goes_too():
    """llama.cpp purges in the order of cells; here the lowest positions are taken first, so that
    one token takes position 0 alone. What remains is dense either way."""
    memory = drawn("2{0} 0{0} 1{0} 3{0} 4{0} 5{0}", FOUR)
    one = jaxkv.apply(memory, plan_of(memory, 1))
    assert drawing(one) == "2{0} 6{0} 1{0} 3{0} 4{0} 5{0}"
    assert one.table.evicted_below.tolist() == [1, 0, 0]
    three = jaxkv.apply(memory, plan_of(memory, 3))
    assert drawing(three) == "8{0} 6{0} 7{0} 3{0} 4{0} 5{0}"
    assert three.table.evicted_below.tolist() == [3, 0, 0]


def test_trap_25_contiguous_takes_a_run_and_leaves_no_hole():
    kind = Kind(
        "three", cells=6, sequences=1, windows=(jaxkv.window.sliding(3),), placement="contiguous"
    )
    memory = drawn("2{0} 0{0} 1{0} 3{0} 4{0} 5{0}", kind)
    memory = jaxkv.apply(memory, plan_of(memory, 1))
    assert drawing(memory) == "6{0} . . 3{0} 4{0} 5{0}"
    assert memory.table.evicted_below.tolist() == [3]


@pytest.mark.core
def test_trap_26_a_refused_batch_takes_nothing():
    """llama.cpp: the ubatches that did fit have thrown out what they would have replaced."""
    memory = drawn("2{0} 0{0} 1{0} 3{0} 4{0} 5{0}", FOUR)
    plan = plan_of(memory, 7, ubatch_size=4)
    assert not plan.ok and len(plan.ubatches) == 2
    for ubatch in plan.ubatches:
        assert_identical(jaxkv.apply(memory, ubatch), memory)
        assert_identical(think(memory, ubatch)[0], memory)


def test_trap_27_a_shared_prefix_that_no_owner_sees_is_taken_again():
    """llama.cpp never takes a cell of two owners: a long shared prefix exhausts the cache."""
    memory = drawn("0{0,1} 1{0,1} 2{0,1} 3{0,1} 4{0,1} 5{0,1}", FOUR)
    memory = jaxkv.apply(memory, plan_of(memory, 2))
    assert drawing(memory) == "6{0} 7{0} 2{0,1} 3{0,1} 4{0,1} 5{0,1}"
    assert memory.table.evicted_below.tolist() == [2, 2, 0]
    assert jaxkv.can_resume(memory, 1, 6)


def test_an_empty_sequence_starts_anywhere():
    assert all(jaxkv.can_resume(FOUR.make(), 1, pos) for pos in (0, 1, 2, 9))


def test_trap_27_a_cell_that_one_owner_still_sees_is_kept():
    memory = drawn("0{0,1} 1{0,1} 2{0} 3{0} 4{0} 5{0}", FOUR)
    plan = plan_of(memory, 2)  # 1 stands at 1 and goes on to see 0 and 1; 0 has 2 to give
    assert not plan.ok
    assert plan_of(memory, 1).ok


def test_trap_28_a_neighbour_s_hidden_cells_may_be_taken_and_it_is_told():
    """Its next token sees what it would have seen; how far it can go back is known."""
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", FOUR)
    before = [jaxkv.can_resume(memory, 0, pos).item() for pos in range(7)]
    memory = jaxkv.apply(memory, plan_of(memory, 2, seq=1))
    assert drawing(memory) == "0{1} 1{1} 2{0} 3{0} 4{0} 5{0}"
    after = [jaxkv.can_resume(memory, 0, pos).item() for pos in range(7)]
    assert all(before) and after == [False] * 5 + [True] * 2
    assert jaxkv.seq_pos_min(memory, [0, 1]).tolist() == [2, 0]


def test_trap_29_a_token_that_would_miss_something_is_refused():
    """llama.cpp answers that all is well, and attention is short without a word."""
    memory = grown(FOUR, 10)
    assert jaxkv.seq_pos_min(memory, 0) == 4
    short, _ = jaxkv.seq_rm(memory, 0, 8)
    assert jaxkv.can_resume(short, 0, 8) and plan_of(short, 1).ok
    cut, ok = jaxkv.seq_rm(memory, 0, 6)
    assert ok and not jaxkv.can_resume(cut, 0, 6)
    plan = plan_of(cut, 1)
    assert plan.reason[0] == Reason.LOST and plan.found[0] == 6
    with pytest.raises(jaxkv.RefusedError, match="its next token stands at 6"):
        plan.check()
    assert_identical(jaxkv.apply(cut, plan), cut)
    anew, _ = jaxkv.seq_rm(cut, 0)
    assert plan_of(anew, 1).ok and jaxkv.can_resume(anew, 0, 0)


def test_trap_29_lost_comes_of_taking_and_not_of_forgetting():
    """What the caller forgets on purpose is not missed, here as in a cache without a window."""
    memory = drawn("0{0} 1{0} 2{0} 3{0}", FOUR)
    memory, _ = jaxkv.seq_rm(memory, 0, 1, 3)
    assert memory.table.evicted_below[0] == 0 and plan_of(memory, 1).ok


def test_trap_57_a_cell_without_owners_cannot_be():
    """llama.cpp keeps a cell with a position and no ids, used for ever. Here it is a fault."""
    table, buffers = jaxkv.split(drawn("0{0} 1{0}", FOUR))
    table = replace(table, owners=table.owners.at[0, 0, 0].set(0))
    faults = jaxkv.check_invariants(jaxkv.join(table, buffers))
    assert faults["position without an owner"] == 1


@pytest.mark.core
def test_trap_85_a_composite_begins_where_its_window_begins():
    """The full part holds 0 to 9, the window part 4 to 9; both can be moved."""
    kind = Kind("two", cells=10, sequences=1, windows=(None, jaxkv.window.sliding(4)))
    memory = grown(kind, 10)
    full, window = jaxkv.hybrid.parts_of(memory)
    window, _ = jaxkv.seq_rm(window, 0, 0, 4)
    memory = jaxkv.make_hybrid_cache((full, (0,)), (window, (1,)))
    assert jaxkv.seq_pos_min(memory, 0) == 4 and jaxkv.seq_pos_max(memory, 0) == 9
    moved = jaxkv.seq_add(memory, 0, 5, -1, 3)
    assert jaxkv.seq_pos_max(moved, 0) == 12
    moved = jaxkv.apply(moved, jaxkv.init_update(moved))
    assert [part.shift.any().item() for part in moved.table.parts] == [False, False]


def test_trap_97_nothing_is_missing_from_a_short_prompt():
    """A window that is longer than the text has lost nothing, wherever one goes back to."""
    memory = grown(FOUR, 5)
    assert all(jaxkv.can_resume(memory, 0, pos) for pos in range(6))
    for pos in range(5):
        cut, _ = jaxkv.seq_rm(memory, 0, pos)
        assert plan_of(cut, 1).ok


@pytest.mark.core
def test_window_of_one_goes_on_though_it_holds_nothing_that_is_seen():
    kind = Kind("one", cells=2, sequences=2, windows=(jaxkv.window.sliding(1),))
    memory = grown(kind, 5)
    assert jaxkv.seq_pos_max(memory, 0) == 4
    other = jaxkv.apply(memory, plan_of(memory, 2, seq=1))  # takes all that 0 has
    assert jaxkv.seq_pos_max(other, [0, 1]).tolist() == [-1, 1]
    plan = plan_of(other, 1)
    assert plan.ok and plan.ubatches[0].positions[0, 0] == 5


@pytest.mark.core
@pytest.mark.parametrize(
    "window", [jaxkv.window.sliding(4), jaxkv.window.chunked(4), jaxkv.window.symmetric(6)]
)
@pytest.mark.parametrize("split", mostly_nightly([False, True], few=[True]))
def test_a_sized_cache_answers_as_a_full_one(window, split):
    """Cells for window, ubatch and rollback are enough for a text of any length."""
    sizes = dict(layers=2, kv_heads=2, head_dim=4, sequences=2, streams=2 if split else 1)
    rope = jaxkv.make_rope(4, base=100.0)
    small = jaxkv.make_kv_cache(**sizes, rope=rope, window=window, ubatch_size=4, rollback=2)
    large = jaxkv.make_kv_cache(**sizes, rope=rope, window=window, cells=96)
    assert small.buffers.k[0].shape[2] == (window.width + 6) * (1 if split else 2)
    rng = np.random.default_rng(0)
    for count in (8, 7, 1, 1, 1, 5, 7):  # batches of 16 and 2 tokens, once padded
        batch = make_batch(rng.integers(1, 9, 2 * count), sequences=np.arange(2 * count) % 2)
        small, one = run(small, batch)
        large, other = run(large, batch)
        np.testing.assert_allclose(one, other, atol=1e-5)
    # What was rolled back within the slack comes out the same, too.
    small, large = (jaxkv.seq_rm(memory, 1, 28)[0] for memory in (small, large))
    batch = make_batch([3, 4], sequences=1)
    np.testing.assert_allclose(run(small, batch)[1], run(large, batch)[1], atol=1e-5)


def test_planning_larger_ubatches_than_it_was_sized_for_raises():
    memory = jaxkv.make_kv_cache(
        layers=1, kv_heads=1, head_dim=2, window=jaxkv.window.sliding(4), ubatch_size=8
    )
    assert len(plan_of(memory, 20).ubatches) == 3  # what it was sized for is the default
    with pytest.raises(ValueError, match="sized for ubatches of 8 tokens, got ubatch_size=16"):
        plan_of(memory, 20, ubatch_size=16)


def test_a_window_needs_a_position():
    with pytest.raises(ValueError, match="positions, of at least 1, got 0"):
        jaxkv.window.sliding(0)
    with pytest.raises(ValueError, match="needs to be told its cells"):
        jaxkv.make_kv_cache(layers=1, kv_heads=1, head_dim=2)


@pytest.mark.core
@pytest.mark.parametrize("part", [0, 1])
def test_a_composite_changes_nothing_where_one_part_lacks_room(part):
    """Refused by either, neither is touched; inside of jit too."""
    sizes = dict(layers=1, kv_heads=2, head_dim=4, sequences=1)
    cells = (6, 30) if part == 0 else (30, 6)
    memory = jaxkv.make_hybrid_cache(
        (jaxkv.make_kv_cache(**sizes, cells=cells[0]), (0,)),
        (jaxkv.make_kv_cache(**sizes, cells=cells[1], window=jaxkv.window.sliding(4)), (1,)),
    )
    memory, *_ = sign(memory, plan_of(memory, 4).ubatches[0])
    plan = plan_of(memory, 4)
    assert not plan.ok and plan.reason[0] == Reason.NO_ROOM
    assert_identical(jaxkv.apply(memory, plan), memory)
    assert_identical(sign(memory, plan.ubatches[0])[0], memory)

    @jax.jit
    def step(memory, tokens):
        plan = jaxkv.init_batch(memory, make_batch(tokens))
        return jaxkv.apply(memory, plan), plan.ok

    after, ok = step(memory, jnp.ones(4, jnp.int32))
    assert not ok
    assert_identical(after, memory)


def test_a_composite_of_parts_that_do_not_fit_together_raises():
    one, two = (
        jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=q) for q in (1, 2)
    )
    with pytest.raises(ValueError, match=r"same number of sequences, got \[1, 2\]"):
        jaxkv.make_hybrid_cache((one, (0,)), (two, (1,)))
    with pytest.raises(ValueError, match="at least one part"):
        jaxkv.make_hybrid_cache()
    memory = jaxkv.make_hybrid_cache((one, (0,)), (one, (2,)))
    plan = plan_of(memory, 1)
    x = jnp.ones((1, 1, 1, 2))
    with pytest.raises(ValueError, match=r"of \[0, 2\], got 1"):
        jaxkv.attend(jaxkv.apply(memory, plan), 1, plan.ubatches[0], x, x, x)


def test_softcap_and_sinks_are_what_they_say():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, 4)), jnp.float32) for n in (3, 5, 5))
    mask = jnp.asarray(np.tril(np.ones((3, 5), bool), 2)[None])
    sinks = jnp.array([0.5, -1.0])
    k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
    got = attention(q, k, v, mask, scale=2.0, softcap=3.0, sinks=sinks)
    logits = 2.0 * np.einsum("rthd,rhnd->rhtn", q, k)
    logits = 3.0 * np.tanh(logits / 3.0)
    weights = np.where(np.asarray(mask)[:, None], np.exp(logits), 0.0)
    total = weights.sum(-1, keepdims=True) + np.exp(np.asarray(sinks))[None, :, None, None]
    wanted = np.einsum("rhtn,rhnd->rthd", weights / total, v)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)
    nothing = attention(q, k, v, jnp.zeros_like(mask), sinks=sinks)
    np.testing.assert_array_equal(nothing, 0.0)
    with pytest.raises(ValueError, match=r"wanted sinks \(2,\)"):
        jaxkv.ops.attention.attention(q, k, v, mask, sinks=jnp.zeros(3))
