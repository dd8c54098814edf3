"""`seq_cp` and `seq_select` in one stream, between some and between one for each sequence."""

from dataclasses import replace

import jax
import pytest

import jaxkv
from jaxkv.kv.shift import CHUNK
from tests.cells.pools import FOUR, ONE, TWO, fed, noisy, texts_of
from tests.memories import Kind, assert_identical, drawing, drawn

core = pytest.mark.core
LONG = [
    Kind("long", cells=600, sequences=2, streams=2),
    Kind("long, two each", cells=600, sequences=6, streams=3),
]
RUNS = Kind("contiguous", cells=8, sequences=4, streams=2, placement="contiguous")
NEAR = Kind("window", cells=6, sequences=4, streams=2, windows=(jaxkv.window.sliding(2),))
WIDE = Kind("wide", cells=12, sequences=80, streams=2)

name_of = lambda x: getattr(x, "name", None)  # noqa: E731
over_streams = pytest.mark.parametrize("kind", [TWO, FOUR], ids=name_of)


def assert_copied(memory, copied, parents, *bounds, merges=False):
    """Each sequence has the texts of its parent in a range; all others have what they had.

    Within a stream a copy `merges` with what its target had.
    """
    old, new = texts_of(memory), texts_of(copied)
    first, end = bounds or (0, 2**31)
    sharing = len(old) // jaxkv.split(memory)[0].streams
    for seq, text in enumerate(new):
        parent = parents.get(seq, seq)
        wanted = old[parent]
        if parent != seq:
            wanted = [token for token in wanted if first <= token[0] < end]
        if merges and parent // sharing == seq // sharing:
            wanted = sorted({*wanted, *old[seq]})
        assert text == wanted, seq


# ---- seq_cp


@core
@pytest.mark.parametrize(
    ("kind", "before", "dst", "first", "after"),
    [
        (ONE, "2{0}+2 3{0}+2 0{1} 0{2}", [1, 3], 3, "2{0}+2 3{0,1,3}+2 0{1} 0{2}"),
        (
            TWO, "2{0}+2 3{0}+2 4{0}+2 0{1} | 0{2} 1{2} 0{3}", [1, 3], 3,
            "2{0}+2 3{0,1}+2 4{0,1}+2 0{1} | 0{2} 1{2} 3{3}+2 4{3}+2",
        ),
        # Once for all targets of a stream.
        (
            TWO, "2{0}+2 3{0}+2 4{0}+2 0{1} | 0{2} 1{2} 0{3}", [3, 2], 3,
            "2{0}+2 3{0}+2 4{0}+2 0{1} | 3{2,3}+2 4{2,3}+2",
        ),
        # A range without tokens (trap 31): targets of its stream merge, the others hold nothing.
        (TWO, "0{0} 0{1} | 0{2} 0{3}", [1, 3], 5, "0{0} 0{1} | 0{2}"),
        (
            FOUR, "2{0}+2 3{0}+2 4{0}+2 | 0{1} 1{1} | 0{2} | 0{3} 1{3} 2{3} 5{3}", [1, 3], 3,
            "2{0}+2 3{0}+2 4{0}+2 | . 3{1}+2 4{1}+2 | 0{2} | . 3{3}+2 4{3}+2",
        ),
    ],
    ids=name_of,
)  # fmt: skip
def test_seq_cp_shares_in_a_stream_and_copies_to_others(kind, before, dst, first, after):
    """Any range (trap 30), with the rotations that keys are owed (trap 33, trap 34), and at once.

    llama.cpp copies with the next decode, and saving, restoring or clearing before it goes wrong
    (trap 32, trap 35, trap 36, trap 37).
    """
    memory = noisy(before, kind)
    copied = jaxkv.seq_cp(memory, 0, dst, first)
    assert drawing(copied).strip(" |") == after.strip(" |")
    assert_copied(memory, copied, dict.fromkeys(dst, 0), first, 2**31, merges=True)
    assert drawing(jaxkv.clear(copied)).strip(" |") == ""
    if kind is ONE:
        assert copied.buffers.k[0] is memory.buffers.k[0]
    assert jaxkv.used(jaxkv.seq_cp(copied, 0, dst, first)) == jaxkv.used(copied)


@core
def test_seq_cp_go_back_tells_copies_in_the_same_cells_apart():
    memory = fed(TWO, 2, 2)
    one, other = (jaxkv.seq_cp(memory, seq, 3) for seq in (0, 1))
    assert drawing(one).split("|")[1] == drawing(other).split("|")[1]
    assert jaxkv.go_back(one.table, one)[1] and not jaxkv.go_back(one.table, other)[1]


@core
def test_seq_cp_donated_is_the_same_and_deletes():
    wanted, memory = (noisy("0{0} 1{0} | 0{2}", TWO) for _ in range(2))
    wanted = jaxkv.seq_cp(wanted, 0, [1, 3], 0)
    assert_identical(jaxkv.seq_cp(memory, 0, [1, 3], 0, donate=True), wanted)
    assert memory.buffers.k[0].is_deleted()


@core
@pytest.mark.parametrize("kind", LONG, ids=name_of)
def test_seq_cp_more_cells_than_a_chunk(kind):
    memory = noisy(" ".join(f"{i}{{0}}" for i in range(520)), kind)
    targets = [1] if kind.sequences == 2 else [5, 2, 4]
    for end in (CHUNK + 1, 519):  # the first cell of the second chunk is the last one, or is not
        copied = jaxkv.seq_cp(memory, 0, targets, 3, end)
        assert_copied(memory, copied, dict.fromkeys(targets, 0), 3, end)
        assert len(texts_of(copied)[targets[0]]) == end - 3
        assert jaxkv.used(copied) == 520 + (end - 3) * (1 if kind.sequences == 2 else 2)


# ---- seq_cp, where streams are shared: room


def refused(verb, memory, *args):
    """A copy without room: told beforehand, raised outside of `jit`, and nothing is changed."""
    assert not getattr(jaxkv, f"can_{verb}")(memory, *args)
    with pytest.raises(jaxkv.NoRoomError) as error:
        getattr(jaxkv, verb)(memory, *args)
    assert isinstance(error.value, ValueError) and isinstance(error.value, jaxkv.RefusedError)
    assert_identical(jax.jit(getattr(jaxkv, verb))(memory, *args), memory)
    return str(error.value)


@core
def test_seq_cp_without_room_changes_no_stream():
    """Not in the stream of the source, nor in one that has room."""
    kind = Kind("six", cells=3, sequences=6, streams=3)
    memory = drawn("0{0} 1{0} | 0{2} 1{2} | 0{4}", kind)
    assert jaxkv.can_seq_cp(memory, 0, [1, 5, 2])
    message = refused("seq_cp", memory, 0, [1, 5, 3])
    assert "wanted 2 cells of stream 1 for a copy from another one, got 1" in message


@core
def test_seq_cp_hybrid_copies_in_all_parts_or_none():
    """The part with a window has cells to take, the other one has not."""
    kinds = replace(NEAR, windows=(None,)), NEAR
    parts = [drawn("0{0} 1{0} 2{0} | 0{2} 1{2} 2{2} 3{2}", kind) for kind in kinds]
    assert [jaxkv.can_seq_cp(part, 0, [1, 3]).item() for part in parts] == [False, True]
    memory = jaxkv.make_hybrid_cache(*zip(parts, ((0, 1), (2, 3)), strict=True))
    assert "stream 1" in refused("seq_cp", memory, 0, [1, 3])


@core
def test_seq_cp_contiguous_is_one_run():
    memory = drawn("0{0} . 1{0} 2{0} . . . . | . 0{2} . . 1{2} . . 2{2}", RUNS)
    copied = jaxkv.seq_cp(memory, 0, 3, 1)
    assert drawing(copied).split(" | ")[1] == ". 0{2} 1{3} 2{3} 1{2} . . 2{2}"
    message = refused("seq_cp", memory, 0, 3)
    assert "wanted 3 cells of stream 1 for a copy from another one, got 2" in message


@core
def test_seq_cp_two_words_of_owners():
    cells = "0{0} 1{0} 0{39} 1{39} | 0{40} 0{79} 1{79}"
    copied = jaxkv.seq_cp(noisy(cells, WIDE), 39, [33, 78, 41])
    assert drawing(copied) == "0{0} 1{0} 0{33,39} 1{33,39} | 0{40} 0{79} 1{79} 0{41,78} 1{41,78}"
    assert jaxkv.seq_pos_max(copied, [0, 33, 39, 40, 41, 78]).tolist() == [1, 1, 1, 0, 1, 1]


# ---- seq_select


@core
@over_streams
def test_seq_select_sequences_change_places(kind):
    """Between streams; what is copied is not taken, though it has no owner any more."""
    cells = "0{0} 1{0} 2{0} 0{1} | 0{2} 1{2}" if kind is TWO else "0{0} 1{0} 2{0} | 0{1} | 0{2}"
    memory = noisy(cells, kind)
    for select in (jaxkv.seq_select, jax.jit(jaxkv.seq_select)):
        swapped = select(memory, [2, 0, 0], [0, 2, 1])
        assert_copied(memory, swapped, {0: 2, 1: 0, 2: 0})
        if kind is TWO:
            assert drawing(swapped) == "0{1} 1{1} 2{1} 0{0} 1{0} | . . 0{2} 1{2} 2{2}"


@core
def test_seq_select_in_one_stream_copies_nothing():
    memory = noisy("0{0} 1{0} 0{1} | 0{2}", TWO)
    selected = jaxkv.seq_select(memory, [0, 1], [1, 0])
    assert selected.buffers.k[0] is memory.buffers.k[0]
    assert drawing(selected) == "0{1} 1{1} 0{0} | 0{2}"
