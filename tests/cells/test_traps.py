"""Where llama.cpp's cache surprises, one case a trap, with what this library decided.

The numbers are those of a list of its traps; `docs/design.md` says what each decision is and which
traps are out by decision. Cells are drawn by index: `1{0,2}` is position 1, owned by sequences 0
and 2, and `.` is empty. Traps 10 to 16 are in `test_shift.py`, of windows in `test_window.py`, of
states in `test_recurrent.py` and its neighbours; `OUT` has those without a test.
"""

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.kv.mask import visible
from tests.memories import assert_identical, drawing, drawn, filled, run, think

FIVE = "0{0} 1{0} 2{0} 3{0} 4{0}"

SNAPSHOTS = "saving and loading a memory is not there yet"
SEVERAL = "a token belongs to one sequence; `seq_cp` shares it"
OUT = {
    **dict.fromkeys((39, 40, 41, 48, 52, 70), SEVERAL),
    **dict.fromkeys(range(75, 85), SNAPSHOTS),
    43: "a token has one position",
    56: "a token has one position",
    90: "no memory looks into the cells of another",
}
"""Traps without a test, and why."""


def test_every_trap_has_a_test_or_a_reason():
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")]
    named = re.findall(r"[Tt]rap[ _]((?:\d\d_|and_)*\d\d)", " ".join(texts))
    tested = {int(number) for name in named for number in re.findall(r"\d\d", name)}
    assert tested | OUT.keys() == {*range(1, 98)}
    assert not tested & OUT.keys()


def removed(cells, *args):
    """What a drawing looks like after `seq_rm`, which is always granted."""
    memory, ok = jaxkv.seq_rm(drawn(cells), *args)
    assert ok.item()
    return drawing(memory)


def ends(memory, seq):
    """The first and last position of a sequence."""
    return jaxkv.seq_pos_min(memory, seq).item(), jaxkv.seq_pos_max(memory, seq).item()


def plan(memory, positions, seq=0):
    """Plan tokens of one sequence; `None` for positions, or a number of tokens, numbers them."""
    if isinstance(positions, int):
        batch = make_batch([1] * positions, sequences=seq)
    else:
        batch = make_batch([1] * len(positions), sequences=seq, positions=positions)
    return jaxkv.init_batch(memory, batch, ubatch_size=4)


def reason(memory, positions, seq=0):
    return Reason(plan(memory, positions, seq).reason[seq].item()).name


# ---------------------------------------------------------------------------- ranges and sharing


def test_trap_01_hole_in_the_middle_is_not_noticed_by_the_ends():
    memory, ok = jaxkv.seq_rm(drawn(FIVE), 0, 1, 3)
    assert ok.item()
    assert drawing(memory) == "0{0} . . 3{0} 4{0}"
    assert ends(memory, 0) == (0, 4)


def test_trap_02_negative_ends_are_open():
    assert removed(FIVE, 0, -1, 2) == ". . 2{0} 3{0} 4{0}"
    assert removed(FIVE, 0, 3, -1) == "0{0} 1{0} 2{0}"
    assert removed(FIVE, 0, -1, -1) == ""
    assert removed(FIVE, 1) == FIVE
    assert ends(drawn(""), 0) == (-1, -1)


def test_trap_03_empty_and_reversed_ranges_take_nothing():
    assert removed(FIVE, 0, 3, 3) == FIVE
    assert removed(FIVE, 0, 4, 2) == FIVE


def test_trap_04_an_end_of_zero_is_an_empty_range():
    assert removed(FIVE, 0, 2, 0) == FIVE
    assert removed(FIVE, 0, -1, 0) == FIVE
    assert removed(FIVE, -1, -1, 0) == FIVE


def test_trap_05_sequence_minus_one_is_everybody():
    assert removed("0{0} 1{0,1} 2{1}", -1, 1, 2) == "0{0} . 2{1}"


def test_trap_06_removing_one_owner_leaves_the_other():
    memory = jaxkv.seq_cp(filled(4), 0, 1)
    after, _ = jaxkv.seq_rm(memory, 0)
    assert drawing(after) == "0{1} 1{1} 2{1} 3{1}"
    assert jaxkv.used(after).item() == 4
    assert_identical(jaxkv.split(after)[1], jaxkv.split(memory)[1])


def test_trap_07_copying_merges():
    memory = jaxkv.seq_cp(drawn("0{0} 1{0} 2{0} 0{1} 1{1}"), 0, 1, 1, 3)
    assert drawing(memory) == "0{0} 1{0,1} 2{0,1} 0{1} 1{1}"
    assert ends(memory, 1) == (0, 2)


def test_trap_08_copy_twice_is_copy_once():
    once = jaxkv.seq_cp(drawn(FIVE), 0, 1)
    twice = jaxkv.seq_cp(once, 0, 1)
    assert_identical(once, twice)
    memory, _ = jaxkv.seq_rm(twice, 1)
    assert drawing(memory) == FIVE
    assert ends(memory, 1) == (-1, -1)
    assert plan(memory, [0, 1, 2], seq=1).ok


def test_trap_09_copy_onto_itself_changes_nothing():
    memory = drawn(FIVE)
    assert_identical(jaxkv.seq_cp(memory, 0, 0, 0, 5), memory)


def test_trap_17_keep_empties_everybody_else():
    memory = jaxkv.seq_keep(drawn("0{0} 1{0,1} 2{1} 0{2}"), 1)
    assert drawing(memory) == ". 1{1} 2{1}"


def test_trap_18_never_used_and_cleared():
    memory = filled(4, 3)
    assert ends(memory, 2) == (-1, -1)
    cleared = jaxkv.clear(memory)
    assert drawing(cleared) == ""
    assert_identical(jaxkv.split(cleared)[1], jaxkv.split(memory)[1])  # the bytes stay, unseen
    for seq in range(3):
        assert plan(cleared, [0, 1, 2], seq).ok


# ------------------------------------------------------------------------------------- placement


def test_trap_19_freed_cells_are_taken_first_so_order_and_position_differ():
    memory, _ = jaxkv.seq_rm(drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}"), 0, 0, 1)
    memory = jaxkv.apply(memory, plan(memory, 3))
    assert drawing(memory) == "6{0} 1{0} 2{0} 3{0} 4{0} 5{0} 7{0} 8{0}"


def test_trap_20_the_search_always_starts_at_the_front():
    """There is no head: what was done before is not remembered beside the table."""
    memory = jaxkv.apply(drawn(". . . . . . 0{0}"), plan(drawn(". . . . . . 0{0}"), 3))
    assert drawing(memory) == "1{0} 2{0} 3{0} . . . 0{0}"


def test_trap_21_no_room_changes_nothing_and_what_fits_fits():
    memory = drawn("0{0} 1{0} 2{0} 3{0} 4{0} 5{0} 6{0} 7{0} 8{0} 9{0} 10{0}")
    refused = plan(memory, 3)
    assert reason(memory, 3) == "NO_ROOM"
    assert_identical(jaxkv.apply(memory, refused), memory)
    assert ends(memory, 0) == (0, 10)
    assert ends(jaxkv.apply(memory, plan(memory, 1)), 0) == (0, 11)


def test_trap_22_a_batch_longer_than_the_memory_is_refused_at_once():
    refused = plan(drawn(""), 15)
    assert Reason(refused.reason[0].item()) == Reason.NO_ROOM
    assert (refused.expected[0].item(), refused.found[0].item()) == (15, 12)


def test_trap_23_the_past_is_never_overwritten():
    full = drawn(" ".join(f"{position}{{0}}" for position in range(12)))
    refused = plan(full, [2, 3, 4])
    assert refused.reason[0] == Reason.NOT_NEXT
    assert (refused.expected[0].item(), refused.found[0].item()) == (12, 2)
    assert_identical(jaxkv.apply(full, refused), full)


# --------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("positions", "answer"),
    [
        ([10, 11, 12], "FITS"),
        ([11, 12, 13], "NOT_NEXT"),
        ([9, 10, 11], "NOT_NEXT"),
        ([10, 11, 13], "GAP"),
        ([10, 10, 11], "DUPLICATE"),  # llama.cpp takes it; a position holds one token here
        ([10, 11, 12, 11], "DECREASING"),
    ],
)
def test_trap_42_positions_go_on_one_by_one(positions, answer):
    assert reason(drawn("8{0} 9{0}"), positions) == answer


def test_trap_42_an_empty_sequence_starts_anywhere():
    assert reason(drawn("8{0} 9{0}"), [100, 101, 102], seq=1) == "FITS"
    assert reason(drawn("8{0} 9{0}"), [0, 1, 3], seq=1) == "GAP"


def test_trap_44_positions_left_out_follow_the_last():
    (ubatch,) = plan(drawn("8{0} 9{0}"), 3).ubatches
    assert ubatch.positions[ubatch.valid].tolist() == [10, 11, 12]


def test_trap_45_outputs_left_out_are_the_last_of_each_sequence():
    batch = make_batch([[1, 2, 3], [4], [5, 6, 7]])
    memory, logits = run(drawn(""), batch)
    assert logits.shape[0] == 3
    order = np.concatenate(
        [np.asarray(u.order) for u in jaxkv.init_batch(drawn(""), batch, ubatch_size=4).ubatches]
    )
    assert sorted(order.tolist())[:3] == [2, 3, 6]


@pytest.mark.parametrize(
    "split_by",
    [
        jaxkv.planning.splits.simple_split,
        jaxkv.planning.splits.equal_split,
        jaxkv.planning.splits.sequence_split,
    ],
)
def test_trap_46_a_ubatch_never_exceeds_its_size(split_by):
    for sequences in ([0, 1, 2], [0, 0, 1, 2, 2], [2, 0, 1, 0, 2, 0, 0]):
        for size in (1, 2, 3):
            parts = split_by(np.asarray(sequences, np.int32), size)
            taken = [part[part < len(sequences)].tolist() for part in parts]
            assert max(map(len, taken)) <= size
            assert sorted(sum(taken, [])) == list(range(len(sequences)))


@pytest.mark.parametrize(
    ("lengths", "size", "wanted"),
    [
        ([4, 2], 8, [[0, 0, 1, 1], [0, 0]]),
        ([3, 3], 4, [[0, 0, 1, 1], [0, 1]]),
        ([5], 4, [[0] * 4, [0]]),
    ],
)
def test_trap_47_equal_lengths(lengths, size, wanted):
    sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    parts = jaxkv.planning.splits.equal_split(sequences, size)
    taken = [sequences[part[part < len(sequences)]].tolist() for part in parts]
    assert taken == wanted


def test_trap_49_outputs_come_in_the_order_of_the_batch():
    tokens, sequences = [1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 1, 0, 1, 0]
    wanted = [True, False, True, True, False, False, True]
    every = make_batch(tokens, sequences=sequences, outputs=[True] * 7)
    some = make_batch(tokens, sequences=sequences, outputs=wanted)
    _, everything = run(drawn(""), every)
    for split_by in ("simple", "sequence"):
        plan = jaxkv.init_batch(drawn(""), some, ubatch_size=4, split_by=split_by)
        memory, logits = drawn(""), []
        for ubatch in plan.ubatches:
            memory, out = think(memory, ubatch)
            logits.append(out)
        collected = plan.collect(logits)
        np.testing.assert_allclose(collected, everything[np.array(wanted)], atol=1e-5)


def test_trap_50_a_retry_gives_what_it_would_have_given():
    memory = filled(5, 5)
    batch = make_batch([1, 2, 3, 4], sequences=2)
    refused = jaxkv.init_batch(memory, batch, ubatch_size=4)
    assert not refused.ok
    tried = memory
    for ubatch in refused.ubatches:
        tried, _ = think(tried, ubatch)
    with_room, _ = jaxkv.seq_rm(memory, 0)
    after_a_try, _ = jaxkv.seq_rm(tried, 0)
    assert_identical(run(after_a_try, batch), run(with_room, batch))


# ----------------------------------------------------------------------------------------- masks


def look(memory, seq, position):
    """The cells that a token of a sequence would see."""
    table, _ = jaxkv.split(memory)
    (ubatch,) = plan(drawn(""), [position, position + 1, position + 2], seq).ubatches
    return np.flatnonzero(visible(table, ubatch)[0, 0]).tolist()


def test_trap_51_a_token_sees_its_own_sequence_alone():
    memory = drawn("0{0} 0{1} 1{0}")
    assert look(memory, 0, 1) == [0, 2]
    assert look(memory, 0, 0) == [0]
    assert look(memory, 1, 1) == [1]
    assert look(memory, 2, 1) == []


def test_trap_58_every_cell_can_be_seen_wherever_it_lies():
    """No bound on how much of the memory is read may leave out the last cell, or follow a hole."""
    for first in range(12):
        cells = [f"{i}{{0}}" if i >= first else "." for i in range(12)]
        assert look(drawn(" ".join(cells)), 0, 11) == list(range(first, 12))
    assert look(drawn(" ".join(["."] * 11 + ["0{0}"])), 1, 5) == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_trap_59_what_is_hidden_is_not_read_even_if_it_is_no_number(value):
    memory, _ = jaxkv.seq_rm(filled(4, 3), 0, 3, -1)
    table, buffers = jaxkv.split(memory)
    # All that is not sequence 0's: a cell it has left, another sequence's, and those never used.
    # Stored values are always finite; 3e38 times anything but 0 would show.
    k = tuple(x.at[:, :, 3:].set(value) for x in buffers.k)
    v = tuple(x.at[:, :, 3:].set(3e38) for x in buffers.v)
    spoilt = jaxkv.join(table, replace(buffers, k=k, v=v))
    _, clean = run(memory, make_batch([9]))
    _, beside = run(spoilt, make_batch([9]))
    np.testing.assert_allclose(beside, clean, rtol=1e-6)


# -------------------------------------------------------------------------- failures, and numbers


def test_trap_74_what_was_computed_before_a_failure_is_known():
    """Of three ubatches two were computed: the last positions tell exactly those tokens."""
    sequences = [0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 1]
    plan = jaxkv.init_batch(drawn(""), make_batch(range(1, 12), sequences=sequences), ubatch_size=4)
    memory = drawn("")
    counts = []
    for ubatch in plan.ubatches:
        memory, _ = think(memory, ubatch)
        counts.append((jaxkv.seq_pos_max(memory, [0, 1]) + 1).tolist())
    assert counts == [[2, 2], [5, 3], [6, 5]]


def test_trap_87_room_is_counted_in_cells_and_what_follows_in_positions():
    """There an image takes more cells than positions; here several tokens of one position do."""
    memory = drawn("0{0} 0{0} 0{0} 1{0} 1{0} 1{0} 2{0} 2{0} 2{0} 3{0}")
    assert jaxkv.used(memory) == 10
    assert reason(memory, [4, 5]) == "FITS" and reason(memory, [10, 11]) == "NOT_NEXT"
    refused = plan(memory, 3)
    assert Reason(refused.reason[0].item()) == Reason.NO_ROOM
    assert (refused.expected[0].item(), refused.found[0].item()) == (3, 2)
    assert ends(jaxkv.apply(memory, plan(memory, 2)), 0) == (0, 5)


def test_trap_95_sliding_keeps_values_and_moves_positions():
    """A context shift is not a recomputation: values stay bit for bit, keys are turned."""
    memory = filled(8)
    slid, _ = jaxkv.seq_rm(memory, 0, 1, 4)
    slid = jaxkv.seq_add(slid, 0, 4, -1, -3)
    slid = jaxkv.apply(slid, jaxkv.init_update(slid))
    assert drawing(slid) == "0{0} . . . 1{0} 2{0} 3{0} 4{0}"
    before, after = jaxkv.split(memory)[1], jaxkv.split(slid)[1]
    assert_identical(after.v, before.v)
    by = jnp.array([0, 0, 0, 0, -3, -3, -3, -3, 0, 0, 0, 0])
    for k, old, rope in zip(after.k, before.k, before.ropes, strict=True):
        turned = jaxkv.rotate(old[0].transpose(1, 0, 2), by, rope).transpose(1, 0, 2)
        np.testing.assert_allclose(k[0], turned, atol=1e-6)


def test_one_cell():
    """The smallest memory there is."""
    memory = jaxkv.make_kv_cache(layers=1, cells=1, kv_heads=1, head_dim=2)
    assert not jaxkv.init_batch(memory, make_batch([1, 2])).ok
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1])))
    assert jaxkv.show(memory).split() == ["owner", "0", "position", "0"]
    assert not jaxkv.init_batch(memory, make_batch([1])).ok
    memory, _ = jaxkv.seq_rm(memory, 0)
    assert jaxkv.used(memory).item() == 0
