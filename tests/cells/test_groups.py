"""Several streams, and several sequences in each: rows side by side, forks inside, copies between.

The state machines draw these memories too; here are the corners that they hold by name.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, loops, make_batch
from jaxkv.kv.mask import sight_of
from tests import histories
from tests.memories import (
    GROUPS,
    Kind,
    assert_identical,
    cells_of,
    drawing,
    drawn,
    parts_of,
    run,
    think,
)

pytestmark = pytest.mark.core  # the fast part draws such a memory in test_stateful.py

POOL = Kind("pool", cells=40, sequences=8)
EIGHT = Kind("eight", cells=16, sequences=8, streams=4)
RUNS = Kind("runs", cells=8, sequences=4, streams=2, placement="contiguous")
NEAR = Kind("near", cells=6, sequences=4, streams=2, windows=(jaxkv.window.sliding(2),))
BOTH = Kind("both", cells=6, sequences=4, streams=2, windows=(None, jaxkv.window.sliding(2)))


def fed(kind, lengths):
    """A memory in which sequences have so many tokens, given by id."""
    memory = kind.make()
    for seq, length in lengths.items():
        tokens = np.random.default_rng(seq).integers(1, 9, length)
        memory, _ = run(memory, make_batch(tokens, sequences=seq), ubatch_size=16)
    return memory


# ---- rows


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        (GROUPS, "0{0} 1{0} 0{1} 1{1} |"),
        (RUNS, "0{0} 1{0} 0{1} 1{1} |"),
        (NEAR, "0{0} 1{0} 0{1} 1{1} |"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
@pytest.mark.parametrize("ids", [[0, 1], [1, 0]])
def test_rows_of_one_stream_in_one_ubatch_get_cells_of_their_own(kind, cells, ids):
    """In the order of sequences, however the rows come."""
    plan = jaxkv.init_batch(kind.make(), make_batch([[5, 6], [7, 8]], sequences=ids)).check()
    (ubatch,) = plan.ubatches
    assert ubatch.row_sequence.tolist() == ids
    assert drawing(jaxkv.apply(kind.make(), ubatch)).strip() == cells


def test_a_run_is_one_for_all_rows_of_a_stream():
    memory = drawn(". 0{0} . . . 1{0} . . |", RUNS)
    plan = jaxkv.init_batch(memory, make_batch([[5, 5], [6, 6], [7, 7]], sequences=[2, 1, 0]))
    assert not plan.ok and plan.reason.tolist() == [Reason.FRAGMENTED] * 2 + [0, 0]
    plan = jaxkv.init_batch(memory, make_batch([[5], [6], [7]], sequences=[2, 1, 0])).check()
    wanted = ". 0{0} 2{0} 0{1} . 1{0} | 0{2}"
    assert drawing(jaxkv.apply(memory, plan)) == wanted


@pytest.mark.parametrize("ids", [[4, 5, 0, 7], [1, 0], [3], [7, 6, 5, 4, 3, 2, 1, 0], [2, 0, 1]])
def test_any_sequences_in_any_order_answer_as_each_alone(ids):
    """Four rows of a memory of four streams are not its four streams."""
    memory = fed(EIGHT, {0: 3, 1: 2, 4: 1, 5: 2})
    tokens = [[seq + 1] for seq in ids]
    plan = jaxkv.init_batch(memory, make_batch(tokens, sequences=ids))
    assert len(plan.ubatches) == 1
    after, logits = run(memory, make_batch(tokens, sequences=ids), ubatch_size=8)
    for seq, row in zip(ids, logits, strict=True):
        _, (alone,) = run(memory, make_batch([[seq + 1]], sequences=[seq]))
        np.testing.assert_allclose(row, alone, atol=1e-5)
    assert not sum(jaxkv.check_invariants(after).values())


def test_a_stream_is_read_once_where_all_sequences_have_rows():
    memory = EIGHT.make()
    for count, shape in ((8, (4, 2)), (4, (4, 1)), (2, (2, 1))):
        plan = jaxkv.init_batch(memory, make_batch([[1]] * count)).check()
        sight = sight_of(jaxkv.apply(memory, plan).table, plan.ubatches[0])
        assert sight.at.shape == shape and sight.all_streams == (count == 8)
    assert sight.streams.tolist() == [0, 0]


def test_a_full_stream_refuses_its_own_sequences_alone():
    memory = fed(GROUPS, {0: 6, 2: 1})
    plan = jaxkv.init_batch(memory, make_batch([[1] * 3, [2] * 2, [3] * 9], sequences=[0, 1, 2]))
    assert plan.fits.tolist() == [False, True, True, True]
    assert (plan.expected[0], plan.found[0]) == (3, 2)


def test_an_edit_makes_plans_on_its_own_stream_stale():
    memory = fed(GROUPS, {0: 2, 2: 2})
    ubatches = [
        jaxkv.init_batch(memory, make_batch([1], sequences=seq)).check().ubatches[0]
        for seq in (1, 3)
    ]
    edited, _ = jaxkv.seq_rm(memory, 0, 1)
    assert [jaxkv.is_current(edited, ubatch).item() for ubatch in ubatches] == [False, True]


def test_two_words_of_owners():
    kind = Kind("wide", cells=12, sequences=80, streams=2, windows=(jaxkv.window.sliding(2),))
    memory = fed(kind, {0: 3, 39: 3, 40: 2, 79: 4})
    assert jaxkv.seq_pos_max(memory, [0, 39, 40, 79]).tolist() == [2, 2, 1, 3]
    memory = jaxkv.seq_cp(memory, 39, [33, 78, 41])
    assert drawing(memory) == (
        "0{0} 1{0} 2{0} 0{33,39} 1{33,39} 2{33,39} | "
        "0{40} 1{40} 0{79} 1{79} 2{79} 3{79} 0{41,78} 1{41,78} 2{41,78}"
    )
    memory, _ = run(memory, make_batch([[1] * 4, [2] * 4], sequences=[78, 79]), ubatch_size=8)
    assert jaxkv.seq_pos_max(memory, [41, 78, 79]).tolist() == [2, 6, 7]
    assert not sum(jaxkv.check_invariants(memory).values())


# ---- copies


def test_a_fork_inside_of_a_pool_is_free():
    memory = fed(GROUPS, {0: 3, 1: 2})
    forked = jaxkv.seq_cp(memory, 0, 1, 2)
    assert drawing(forked) == "0{0} 1{0} 2{0,1} 0{1} 1{1} | "  # merged
    for after in (forked, jaxkv.seq_select(memory, [0, 1], [1, 0])):
        assert after.buffers.k[0] is memory.buffers.k[0]


@pytest.mark.parametrize("traced", [False, True])
def test_one_call_shares_here_and_copies_there(traced):
    """Once for all targets of a stream, and what these held is replaced."""
    memory = jaxkv.seq_add(fed(EIGHT, {0: 3, 1: 1, 2: 2, 3: 1, 7: 1}), 0, 0, -1, 2)
    copied = (jax.jit(jaxkv.seq_cp) if traced else jaxkv.seq_cp)(memory, 0, [2, 1, 3, 7, 2], 3)
    assert drawing(copied) == (
        "2{0}+2 3{0,1}+2 4{0,1}+2 0{1} | 3{2,3}+2 4{2,3}+2 |  | 3{7}+2 4{7}+2"
    )
    for array in (*copied.buffers.k, *copied.buffers.v):
        np.testing.assert_array_equal(array[0, :, 1:3], array[1, :, :2])
        np.testing.assert_array_equal(array[0, :, 1:3], array[3, :, :2])
    again = jaxkv.seq_cp(copied, 0, [2, 1, 3, 7], 3)
    assert jaxkv.used(again) == jaxkv.used(copied)


@pytest.mark.parametrize("traced", [False, True])
def test_ids_that_are_none_and_empty_ranges(traced):
    memory = fed(GROUPS, {0: 3, 2: 2})
    copy = jax.jit(jaxkv.seq_cp) if traced else jaxkv.seq_cp
    assert_identical(copy(memory, 0, 0), memory)
    assert drawing(copy(memory, 0, [1, 2], 5)) == "0{0} 1{0} 2{0} | "  # 1 keeps, 2 is replaced
    if traced:
        for src, dst in ((0, 4), (-1, 2), (7, 2)):
            assert_identical(copy(memory, src, dst), memory)


def refused(verb, memory, *args):
    """A copy without room: told beforehand, raised outside of `jit`, and nothing is changed."""
    assert not getattr(jaxkv, f"can_{verb}")(memory, *args)
    with pytest.raises(jaxkv.NoRoomError) as error:
        getattr(jaxkv, verb)(memory, *args)
    assert isinstance(error.value, ValueError) and isinstance(error.value, jaxkv.RefusedError)
    assert_identical(jax.jit(getattr(jaxkv, verb))(memory, *args), memory)
    return str(error.value)


def test_a_copy_without_room_changes_nothing_in_any_stream():
    """Not in the stream of the source, nor in one that has room."""
    memory = fed(EIGHT, {0: 6, 2: 11, 4: 2})
    assert jaxkv.can_seq_cp(memory, 0, [1, 5, 2])
    message = refused("seq_cp", memory, 0, [1, 5, 3])
    assert "wanted 6 cells of stream 1 for a copy from another one, got 5" in message


@pytest.mark.parametrize("room", [1, 0])
def test_a_hybrid_copies_in_all_parts_or_in_none(room):
    """The part with a window has cells to take, the other one has not."""
    memory = fed(BOTH, {0: 3, 2: 4 - room})
    if not room:
        full, near = (
            jaxkv.can_seq_cp(part, 0, [1, 3]).item() for part in jaxkv.hybrid.parts_of(memory)
        )
        assert (full, near) == (False, True)
        assert "stream 1" in refused("seq_cp", memory, 0, [1, 3])
        refused("seq_select", memory, [0, 0], [1, 3])
        return
    copied = jaxkv.seq_cp(memory, 0, [1, 3])
    for part in jaxkv.hybrid.parts_of(copied):
        assert drawing(part) == "0{0,1} 1{0,1} 2{0,1} | 0{2} 1{2} 2{2} 0{3} 1{3} 2{3}"


def test_a_copy_takes_hidden_cells_and_their_owners_let_go():
    memory = fed(NEAR, {0: 3, 2: 5})
    assert drawing(memory) == "0{0} 1{0} 2{0} | 0{2} 1{2} 2{2} 3{2} 4{2}"
    copied = jaxkv.seq_cp(memory, 0, 3)  # one is empty, and positions 0 to 3 are seen no more
    assert drawing(copied) == "0{0} 1{0} 2{0} | 1{3} 2{3} 2{2} 3{2} 4{2} 0{3}"
    assert copied.table.evicted_below.tolist() == [0, 0, 2, 0]
    after, one = run(copied, make_batch([[3]], sequences=[3]))
    _, other = run(copied, make_batch([[3]], sequences=[0]))
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert not sum(jaxkv.check_invariants(after).values())


def test_a_mark_of_what_was_lost_is_copied():
    memory, _ = run(fed(NEAR, {0: 5}), make_batch([1, 2, 3]))
    marks = memory.table.evicted_below[0].item()
    copied = jaxkv.seq_cp(memory, 0, [2, 3])
    assert marks > 0 and copied.table.evicted_below.tolist() == [marks, 0, marks, marks]


def test_where_cells_must_be_neighbours_a_copy_is_one_run():
    memory = drawn("0{0} . 1{0} 2{0} . . . . | . 0{2} . . 1{2} . . 2{2}", RUNS)
    copied = jaxkv.seq_cp(memory, 0, 3, 1)
    assert drawing(copied).split(" | ")[1] == ". 0{2} 1{3} 2{3} 1{2} . . 2{2}"
    assert "wanted 3 cells of stream 1 for a copy from another one, got 2" in refused(
        "seq_cp", memory, 0, 3
    )
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    copied = jaxkv.seq_cp(memory, 0, 3)
    assert drawing(copied).split(" | ")[1] == "1{2} 0{2} 2{2} 0{3} 2{3} 1{3}"


def test_a_copy_of_more_cells_than_a_chunk_to_several_streams():
    kind = Kind("long", cells=600, sequences=6, streams=3)
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(520)), kind)
    table, buffers = jaxkv.split(memory)
    noise = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), buffers)
    copied = jaxkv.seq_cp(jaxkv.join(table, noise), 0, [5, 2, 4], 3, 519)
    for stream in (1, 2):
        cells = {i: cell for (s, i), cell in cells_of(copied.table).items() if s == stream}
        owners = {2} if stream == 1 else {4, 5}
        assert cells == {i: (i + 3, owners, 0) for i in range(516)}
        for array in (*copied.buffers.k, *copied.buffers.v):
            np.testing.assert_array_equal(array[0, :, 3:519], array[stream, :, :516])


def test_a_copy_cannot_be_undone_where_it_overwrote():
    memory = fed(GROUPS, {0: 2, 2: 3})
    table, _ = jaxkv.split(memory)
    _, ok = jaxkv.go_back(table, jaxkv.seq_cp(memory, 0, 2))
    assert not ok
    back, ok = jaxkv.go_back(table, jaxkv.seq_cp(memory, 0, 3))  # no cell there was in use
    assert ok and drawing(back) == drawing(memory)


def test_a_copy_is_told_from_another_one_in_the_same_cells():
    memory = fed(GROUPS, {0: 2, 1: 2})
    one, other = (jaxkv.seq_cp(memory, seq, 3) for seq in (0, 1))
    assert drawing(one).split("|")[1] == drawing(other).split("|")[1]
    assert jaxkv.go_back(one.table, one)[1] and not jaxkv.go_back(one.table, other)[1]


def test_donated_or_not_a_copy_is_the_same():
    wanted, memory = (fed(GROUPS, {0: 2, 2: 3}) for _ in range(2))
    wanted = jaxkv.seq_cp(wanted, 0, 3)
    assert_identical(jaxkv.seq_cp(memory, 0, 3, donate=True), wanted)
    assert memory.buffers.k[0].is_deleted()


# ---- selecting


@pytest.mark.parametrize("traced", [False, True])
def test_sequences_of_two_streams_change_places(traced):
    memory = fed(GROUPS, {0: 3, 1: 1, 2: 2})
    select = jax.jit(jaxkv.seq_select) if traced else jaxkv.seq_select
    swapped = select(memory, [2, 0, 0], [0, 2, 1])
    # What is copied is not taken, though it has no owner any more.
    assert drawing(swapped) == "0{1} 1{1} 2{1} 0{0} 1{0} | . . 0{2} 1{2} 2{2}"
    for array, old in zip(swapped.buffers.k, memory.buffers.k, strict=True):
        np.testing.assert_array_equal(array[0, :, 3:5], old[1, :, :2])
        np.testing.assert_array_equal(array[1, :, 2:5], old[0, :, :3])


def test_sequences_of_full_streams_do_not_change_places():
    memory = fed(Kind("five", cells=5, sequences=4, streams=2), {0: 3, 2: 3})
    message = refused("seq_select", memory, [2, 0], [0, 2])
    assert "wanted 3 cells of stream 0 for a copy from another one, got 2" in message
    assert jaxkv.can_seq_select(memory, [1, 0], [0, 1])


def test_states_of_full_streams_change_places():
    twin = histories.told(kept=1, counts=(4, 4, 4, 4), sequences=4, streams=2)
    for parents, ids in (([2, 0], [0, 2]), ([3, 2, 1, 0], [0, 1, 2, 3]), ([2, 2, 2], [0, 1, 3])):
        twin.copied("seq_select", parents, ids)
        twin.compare()
    assert jaxkv.used(twin.memory) == 4


def test_states_are_copied_once_for_a_stream():
    twin = histories.told(kept=1, counts=(3,), sequences=4, streams=2)
    twin.copied("seq_cp", 0, [1, 2, 3])
    twin.compare()
    assert jaxkv.used(twin.memory) == 4
    twin.both("seq_add", 2, 0, -1, 5)  # for all that share it
    twin.compare()
    assert jaxkv.seq_pos_max(twin.memory, [0, 1, 2, 3]).tolist() == [2, 2, 7, 7]


def test_parts_with_states_and_with_cells_end_alike_after_a_copy():
    twin = histories.told(kept=1, counts=(3, 0, 2), kinds="ar", sequences=4, streams=2)
    twin.copied("seq_cp", 0, [3, 2])
    twin.both("seq_add", 3, 0, -1, 4)
    twin.compare()
    twin.update()
    assert twin.decode([2, 3, 3, 0])
    twin.compare()


# ---- loops


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


@pytest.mark.parametrize("count", [8, 4])
def test_generation_in_groups_is_that_in_one_pool(count):
    texts = []
    for kind in (EIGHT, POOL):
        prompts = make_batch([[i + 1, 2 * i + 1] for i in range(count)])
        memory, logits = jaxkv.prefill(forward, None, kind.make(), prompts)
        sampler = loops.sampling.make_sampler()
        state, first = loops.begin(sampler, memory, logits, limit=4)
        _, _, picked = jaxkv.decode(forward, sampler, None, memory, state, steps=4)
        texts.append(np.concatenate([np.asarray(first.tokens), np.asarray(picked.tokens)], axis=1))
    np.testing.assert_array_equal(*texts)


def test_a_prompt_that_fills_a_stream_gives_way_to_no_other():
    """Requests through groups are the texts that they are alone, also where cells run out."""
    requests = [
        loops.batching.Request(prompt=[i % 7 + 1] * (2 + i % 3), limit=5 + i % 4, tag=i)
        for i in range(9)
    ]
    options = dict(chunk=8, steps=3, reserve=False)
    found = []
    for kind in (EIGHT, POOL):
        engine = loops.batching.Engine(forward, None, kind.make(), **options)
        for request in requests:
            engine.submit(request)
        results = sorted(engine.results(), key=lambda result: result.id)
        found.append([result.tokens.tolist() for result in results])
        assert jaxkv.used(engine.memory) == 0
    assert found[0] == found[1]


def test_beams_lie_in_one_stream():
    memory, logits = jaxkv.prefill(forward, None, GROUPS.make(), make_batch([1, 2, 3], sequences=2))
    beam = partial(loops.beam, forward, None, memory, logits, width=2, steps=3)
    _, beams = beam(sequences=[2, 3])
    pool, logits = jaxkv.prefill(forward, None, POOL.make(), make_batch([1, 2, 3]))
    _, wanted = loops.beam(forward, None, pool, logits, width=2, steps=3)
    np.testing.assert_array_equal(beams.tokens, wanted.tokens)
    with pytest.raises(ValueError, match=r"one stream of 2 for the beams, .* got \[1, 2\]"):
        beam(sequences=[1, 2])
    with pytest.raises(ValueError, match="got traced ones"):
        jax.jit(lambda ids: beam(sequences=ids)[1])(jnp.array([2, 3]))


def test_parts_agree_on_streams():
    full, near = (part for part, _ in parts_of(BOTH.make()))
    assert full.facts.streams == near.facts.streams == 2
    sizes = dict(layers=1, cells=6, kv_heads=1, head_dim=2, sequences=4)
    parts = [jaxkv.make_kv_cache(**sizes, streams=streams) for streams in (2, 4)]
    with pytest.raises(ValueError, match=r"same number of streams, got \[2, 4\]"):
        jaxkv.make_hybrid_cache((parts[0], (0,)), (parts[1], (1,)))
