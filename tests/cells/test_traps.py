"""Edge cases of llama.cpp's cache, numbered as in `docs/reference/llama_cpp_traps.md`.

That page says what each is about, and which file tests the numbers that are missing here. Cells are
drawn by index: `1{0,2}` is position 1, owned by sequences 0 and 2, and `.` is empty.
"""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.planning.layout import follows
from jaxkv.planning.splits import split_known
from tests.cells.plans import NEAR, mask, plan_of, tell, told
from tests.cells.pools import noisy
from tests.memories import RUNS, SMALL, assert_identical, drawing, drawn

ROOT = Path(__file__).parents[2]
FIVE = "0{0} 1{0} 2{0} 3{0} 4{0}"
FULL = " ".join(f"{position}{{0}}" for position in range(12))


def test_traps_page_lists_1_to_97_with_tests_that_exist():
    """Each row names a function of a file, a file in which its number stands, or a reason."""
    page = (ROOT / "docs" / "reference" / "llama_cpp_traps.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", page, re.M)
    assert [int(number) for number, *_ in rows] == [*range(1, 98)]
    for number, _, tested in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", tested)
        assert files or tested.startswith("Cannot happen: "), number
        for file, names in re.findall(r"`(tests/[\w/]+\.py)`((?:,? `test_\w+`)*)", tested):
            text = (ROOT / file).read_text()
            for name in re.findall(r"test_\w+", names):
                assert f"def {name}(" in text, f"trap {number}: no {name} in {file}"
            runs = re.findall(r"[Tt]raps?[ _]([\d_, and]+)", text)
            numbers = {int(one) for one in re.findall(r"\d+", " ".join(runs))}
            assert names or int(number) in numbers, f"trap {number} is not named in {file}"


def ends(memory, seq):
    """The first and last position of a sequence."""
    return jaxkv.seq_pos_min(memory, seq).item(), jaxkv.seq_pos_max(memory, seq).item()


def reasons(plan):
    return [Reason(one).name for one in plan.reason.tolist()]


# ---------------------------------------------------------------------------- ranges and sharing


EDITS = [
    ("seq_rm", (0, 1, 3), FIVE, "0{0} . . 3{0} 4{0}"),  # trap 01
    ("seq_rm", (0, -1, 2), FIVE, ". . 2{0} 3{0} 4{0}"),  # trap 02: -1 is an open end
    ("seq_rm", (0, 3, -1), FIVE, "0{0} 1{0} 2{0}"),
    ("seq_rm", (0, -1, -1), FIVE, ""),
    ("seq_rm", (0, 3, 3), FIVE, FIVE),  # trap 03: empty and reversed ranges
    ("seq_rm", (0, 4, 2), FIVE, FIVE),
    ("seq_rm", (0, 2, 0), FIVE, FIVE),  # trap 04: an end of 0 is no open end
    ("seq_rm", (-1, 1, 2), "0{0} 1{0,1} 2{1}", "0{0} . 2{1}"),  # trap 05
    ("seq_rm", (0,), "0{0,1} 1{0,1}", "0{1} 1{1}"),  # trap 06
    ("seq_rm", (0, 1, 2), "0{0,1} 1{0,1} 2{0,1}", "0{0,1} 1{1} 2{0,1}"),
    # Trap 07: a copy is added to what the target holds.
    ("seq_cp", (0, 1, 1, 3), "0{0} 1{0} 2{0} 0{1} 1{1}", "0{0} 1{0,1} 2{0,1} 0{1} 1{1}"),
    ("seq_cp", (0, 1), "0{0,1} 1{0,1}", "0{0,1} 1{0,1}"),  # trap 08: twice is once
    ("seq_cp", (0, 0, 0, 5), FIVE, FIVE),  # trap 09: to itself
    ("seq_keep", (1,), "0{0} 1{0,1} 2{1} 0{2}", ". 1{1} 2{1}"),  # trap 17
    ("seq_add", (0, 2, -1, -1), "0{0,1} 1{1} 2{0,1} 3{0,1}", "0{0,1} 1{1} 1{0,1}-1 2{0,1}-1"),
    ("clear", (), "0{0} 1{0,1} 2{1} 0{2}", ""),
]


@pytest.mark.parametrize(("verb", "args", "cells", "after"), EDITS)
def test_edits_leave_drawn_cells_and_all_bytes(verb, args, cells, after):
    before = noisy(cells, SMALL)
    memory = getattr(jaxkv, verb)(before, *args)
    if verb == "seq_rm":
        memory, ok = memory
        assert ok
    assert drawing(memory) == after and jaxkv.used(memory) == after.count("{")
    assert_identical(jaxkv.split(memory)[1], jaxkv.split(before)[1])
    assert jaxkv.init_update(memory).pending == after.count("}-")


def test_seq_pos_min_and_max_skip_holes_and_empty_sequences():
    """Traps 01, 07 and 18: a cleared memory begins anew."""
    assert ends(drawn("0{0} . . 3{0} 4{0}"), 0) == (0, 4)
    assert ends(drawn("0{0} 1{0,1} 2{0,1} 0{1} 1{1}"), 1) == (0, 2)
    cleared = jaxkv.clear(drawn("0{0} 1{0} 2{1}"))
    for seq in range(3):
        assert ends(cleared, seq) == (-1, -1)
        assert plan_of(cleared, 3, seq, positions=[0, 1, 2]).ok


# ------------------------------------------------------------------------------------- placement


@pytest.mark.parametrize(
    ("cells", "after"),
    [
        (". 1{0} 2{0} 3{0} 4{0} 5{0}", "6{0} 1{0} 2{0} 3{0} 4{0} 5{0} 7{0} 8{0}"),  # trap 19
        (". . . . . . 0{0}", "1{0} 2{0} 3{0} . . . 0{0}"),  # trap 20: no head is remembered
        ("0{0} . 2{0} . 4{0} .", "0{0} 5{0} 2{0} 6{0} 4{0} 7{0}"),
    ],
)
def test_init_batch_takes_the_first_empty_cells(cells, after):
    memory = drawn(cells)
    assert drawing(jaxkv.apply(memory, plan_of(memory, 3))) == after


TEN = "0{0} 0{0} 0{0} 1{0} 1{0} 1{0} 2{0} 2{0} 2{0} 3{0}"
ANSWERS = [
    (FULL[:-6], 0, [11, 12, 13], "NO_ROOM", (3, 1)),  # trap 21
    (FULL[:-6], 0, [11], "FITS", (0, 0)),
    (FULL, 0, [2, 3, 4], "NOT_NEXT", (12, 2)),  # trap 23: the past is not overwritten
    ("8{0} 9{0}", 0, [10, 11, 12], "FITS", (0, 0)),  # trap 42
    ("8{0} 9{0}", 0, [11, 12, 13], "NOT_NEXT", (10, 11)),
    ("8{0} 9{0}", 0, [10, 11, 13], "GAP", (12, 13)),
    ("8{0} 9{0}", 0, [10, 10, 11], "DUPLICATE", (11, 10)),  # llama.cpp takes it
    ("8{0} 9{0}", 0, [10, 11, 12, 11], "DECREASING", (13, 11)),
    ("8{0} 9{0}", 1, [100, 101, 102], "FITS", (0, 0)),  # an empty sequence starts anywhere
    ("8{0} 9{0}", 1, [0, 1, 3], "GAP", (2, 3)),
    (TEN, 0, [4, 5, 6], "NO_ROOM", (3, 2)),  # trap 87: room is counted in cells
    (TEN, 0, [10, 11], "NOT_NEXT", (4, 10)),  # and what follows in positions
]


@pytest.mark.parametrize(("cells", "seq", "positions", "reason", "numbers"), ANSWERS)
def test_init_batch_answers_and_refused_changes_nothing(cells, seq, positions, reason, numbers):
    memory = drawn(cells)
    plan = plan_of(memory, len(positions), seq, positions=positions)
    assert reasons(plan)[seq] == reason and reasons(plan).count("FITS") == 2 + plan.ok
    assert (plan.expected[seq], plan.found[seq]) == numbers
    after = jaxkv.apply(memory, plan)
    if plan.ok:
        assert jaxkv.seq_pos_max(after, seq) == positions[-1]
    else:
        assert_identical(after, memory)


@pytest.mark.core
def test_init_batch_contiguous_refuses_holes_until_defrag():
    """As ollama does; scattered placement takes such holes."""
    memory = drawn("0{0} . 2{0} . 4{0} . 6{0} . 8{0} . 10{0} .", RUNS)
    assert plan_of(memory, 3).reason[0] == Reason.FRAGMENTED
    memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert plan_of(memory, 3).ok


def test_make_kv_cache_cells_are_exact_and_all_usable():
    """Trap 22, and ollama's edge 07: a batch longer than the memory is refused at once."""
    memory = jaxkv.make_kv_cache(layers=1, cells=1, kv_heads=1, head_dim=2)
    refused = plan_of(memory, 2)
    assert (reasons(refused), *refused.expected, *refused.found) == (["NO_ROOM"], 2, 1)
    memory = jaxkv.apply(memory, plan_of(memory, 1))
    assert jaxkv.show(memory).split() == ["owner", "0", "position", "0"]
    assert not plan_of(memory, 1).ok
    memory, _ = jaxkv.seq_rm(memory, 0)
    assert jaxkv.used(memory) == 0 and plan_of(memory, 1).ok


# --------------------------------------------------------------------------------------- batches


@pytest.mark.core
def test_make_batch_without_positions_follows_the_last():
    """Trap 44: of each sequence of a token."""
    for memory, sets in ((drawn("8{0} 9{0}"), None), (drawn("8{0,1} 9{0,1}"), [[0, 1]] * 3)):
        plan = plan_of(memory, 3, sets=sets)
        (ubatch,) = plan.ubatches
        assert ubatch.positions[ubatch.valid].tolist() == [10, 11, 12]
        last = jaxkv.seq_pos_max(jaxkv.apply(memory, plan), [0, 1]).tolist()
        assert last == [12, 12 if sets else -1]


def test_split_by_keeps_order_of_tokens_with_several_sequences():
    """Trap 48: llama.cpp does not cut such a batch into equal parts."""
    sets = [[0, 1, 2], [0, 1, 2], [0, 1], [2], [0], [1], [2]]
    others = np.array([[*one[1:], -1, -1][:2] for one in sets])
    lowest = np.array([one[0] for one in sets], np.int32)
    for split_by, size in product(("simple", "equal"), (1, 2, 3, 8)):
        parts = split_known(split_by, lowest, size, follows(lowest, others))
        turn = {int(i): n for n, part in enumerate(parts) for i in part[part < len(sets)]}
        assert sorted(turn) == [*range(len(sets))]
        for (i, one), (j, other) in product(enumerate(sets), repeat=2):
            assert i >= j or not {*one} & {*other} or turn[i] <= turn[j]


def test_make_batch_outputs_are_the_last_of_each_sequence():
    """Trap 45: where none are chosen."""
    batch = make_batch([1, 2, 3, 4, 5, 6, 7], sequences=[0, 1, 0, 1, 0, 1, 0])
    plan = jaxkv.init_batch(drawn(""), batch, ubatch_size=8)
    (ubatch,) = plan.ubatches
    logits = ubatch.tokens.reshape(-1)[ubatch.outputs]  # of a model that says what it is told
    assert plan.collect([logits[:, None]])[:, 0].tolist() == [6, 7]


@pytest.mark.core
def test_init_batch_sets_in_any_order_are_one_plan():
    """Trap 52: llama.cpp's mask follows the sequence that is named first."""
    memory = drawn("0{0,1,2} 1{0,1,2}")
    plans = [plan_of(memory, 2, sets=sets) for sets in ([[0, 1], [1]], [[1, 0], [1]])]
    assert plans[0].ok
    assert_identical(*plans)


@pytest.mark.core
def test_go_back_takes_a_token_from_all_its_sequences():
    """Trap 70: llama.cpp cuts an aborted token back in one of its sequences."""
    memory = drawn("0{0,1} 1{0,1}")
    later = jaxkv.apply(memory, plan_of(memory, 1, sets=[[0, 1]]))
    assert jaxkv.seq_pos_max(later, [0, 1]).tolist() == [2, 2]
    back, ok = jaxkv.go_back(jaxkv.split(memory)[0], later)
    assert ok and drawing(back) == drawing(memory)


# ----------------------------------------------------------------------------------------- masks


def look(memory, seq, position):
    """The cells that a token of a sequence would see."""
    (ubatch,) = plan_of(drawn(""), 1, seq, positions=[position]).ubatches
    return np.flatnonzero(mask(memory.table, ubatch)[0, 0]).tolist()


def test_visible_shows_the_own_sequence_alone():
    """Trap 51."""
    memory = drawn("0{0} 0{1} 1{0}")
    seen = [look(memory, seq, position) for seq, position in ((0, 1), (0, 0), (1, 1), (2, 1))]
    assert seen == [[0, 2], [0], [1], []]


def test_visible_reaches_every_cell_behind_holes():
    """Trap 58: no bound on how much is read may leave out the last cell."""
    for first in range(12):
        cells = [f"{i}{{0}}" if i >= first else "." for i in range(12)]
        assert look(drawn(" ".join(cells)), 0, 11) == list(range(first, 12))


@pytest.mark.core
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_attend_ignores_what_hidden_cells_hold(value):
    """Trap 59, and ollama's edge 04: a cell that was left, a neighbour's, and unused ones."""
    memory, _ = jaxkv.seq_rm(told(4, 3), 0, 3, -1)
    table, buffers = jaxkv.split(memory)
    # Stored values are always finite; 3e38 times anything but 0 would show.
    k = tuple(x.at[:, :, 3:].set(value) for x in buffers.k)
    v = tuple(x.at[:, :, 3:].set(3e38) for x in buffers.v)
    spoilt = jaxkv.join(table, replace(buffers, k=k, v=v))
    np.testing.assert_allclose(tell(spoilt, [9])[1], tell(memory, [9])[1], rtol=1e-6)


def test_visible_tokens_of_one_batch_have_windows_of_their_own():
    """Of two sequences in turns. ollama shows W + 1 positions, here it is W."""
    memory = drawn("0{0} . 1{0} 0{1} 2{0}", replace(NEAR, cells=8))
    plan = plan_of(memory, 4, [0, 1, 0, 1])
    table = jaxkv.apply(memory, plan).table
    rows = np.asarray(mask(table, plan.ubatches[0]))[0, :4]
    seen = [sorted(np.asarray(table.position)[0][row].tolist()) for row in rows]
    assert seen == [[0, 1, 2, 3], [0, 1], [1, 2, 3, 4], [0, 1, 2]]


# -------------------------------------------------------------------------- failures, and numbers


@pytest.mark.core
def test_seq_pos_max_counts_ubatches_that_were_applied():
    """Trap 74: of three ubatches two were computed before a failure."""
    sequences = [0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 1]
    plan = jaxkv.init_batch(drawn(""), make_batch(range(1, 12), sequences=sequences), ubatch_size=4)
    memory, counts = drawn(""), []
    for ubatch in plan.ubatches:
        memory = jaxkv.apply(memory, ubatch)
        counts.append((jaxkv.seq_pos_max(memory, [0, 1]) + 1).tolist())
    assert counts == [[2, 2], [5, 3], [6, 5]]


def test_seq_add_keeps_values_and_turns_keys():
    """Trap 95: a context shift is no recomputation."""
    memory = noisy(" ".join(f"{i}{{0}}" for i in range(8)), SMALL)
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
