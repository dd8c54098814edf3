"""Edge cases of llama.cpp's cache and saved states, as in `docs/reference/llama_cpp_traps.md`.

Cells are drawn by index: `1{0,2}` is position 1, owned by sequences 0 and 2, and `.` is empty.
"""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch, snapshot
from jaxkv.planning.layout import preceding_tokens, split_batch
from tests.cells.plans import make_small_cache, plan_of, run_tokens
from tests.cells.pools import parse_random
from tests.helpers import edit_sequences
from tests.helpers.caches import SMALL, SPLIT, assert_identical, drawing, edit, parse_cache
from tests.helpers.edit_sequences import list_states
from tests.helpers.steps import apply_plan

ROOT = Path(__file__).parents[2]
FIVE = "0{0} 1{0} 2{0} 3{0} 4{0}"


def test_traps_page_lists_1_to_97_with_tests():
    """Each case has a reason, or a test file that mentions its number."""
    page = (ROOT / "docs" / "reference" / "llama_cpp_traps.md").read_text()
    cases = dict(re.findall(r"^(\d+)\. (.+(?:\n {4}.+)*)", page, re.M))
    assert [*map(int, cases)] == [*range(1, 98)]
    tested = {int(number) for number, text in cases.items() if "(Cannot happen:" in text}
    for file in (ROOT / "tests").rglob("*.py"):
        mentions = re.findall(r"[Tt]raps?[ _]([\d_, and]+)", file.read_text())
        tested |= {*map(int, re.findall(r"\d+", " ".join(mentions)))}
    assert tested == {*range(1, 98)}


EDITS = [
    ("seq_rm", (0, 1, 3), FIVE, "0{0} . . 3{0} 4{0}"),  # trap 01
    ("seq_rm", (0, -1, 2), FIVE, ". . 2{0} 3{0} 4{0}"),  # trap 02: -1 is an open end
    ("seq_rm", (0, 3, -1), FIVE, "0{0} 1{0} 2{0}"),
    ("seq_rm", (0, -1, -1), FIVE, ""),
    ("seq_rm", (0, 3, 3), FIVE, FIVE),  # trap 03: empty and reversed ranges
    ("seq_rm", (0, 4, 2), FIVE, FIVE),
    ("seq_rm", (0, 2, 0), FIVE, FIVE),  # trap 04: an end of 0 is not open
    ("seq_rm", (-1, 1, 2), "0{0} 1{0,1} 2{1}", "0{0} . 2{1}"),  # trap 05
    ("seq_rm", (0,), "0{0,1} 1{0,1}", "0{1} 1{1}"),  # trap 06
    ("seq_rm", (0, 1, 2), "0{0,1} 1{0,1} 2{0,1}", "0{0,1} 1{1} 2{0,1}"),
    # Trap 07: a copy is added to the cells of the target.
    ("seq_cp", (0, 1, 1, 3), "0{0} 1{0} 2{0} 0{1} 1{1}", "0{0} 1{0,1} 2{0,1} 0{1} 1{1}"),
    ("seq_cp", (0, 1), "0{0,1} 1{0,1}", "0{0,1} 1{0,1}"),  # trap 08: twice is once
    ("seq_cp", (0, 0, 0, 5), FIVE, FIVE),  # trap 09: to itself
    ("seq_keep", (1,), "0{0} 1{0,1} 2{1} 0{2}", ". 1{1} 2{1}"),  # trap 17
    ("seq_add", (0, 2, -1, -1), "0{0,1} 1{1} 2{0,1} 3{0,1}", "0{0,1} 1{1} 1{0,1}-1 2{0,1}-1"),
    ("clear", (), "0{0} 1{0,1} 2{1} 0{2}", ""),
]


@pytest.mark.parametrize(("verb", "args", "cells", "after"), EDITS)
def test_edits_leave_drawn_cells_and_all_bytes(verb, args, cells, after):  # trap 18
    before = parse_random(cells, SMALL)
    cache, ok = edit(verb, before, *args)
    assert ok
    assert drawing(cache) == after and cache.num_used_cells() == after.count("{")
    assert_identical(cache.buffers, before.buffers)
    assert jaxkv.init_update(cache).num_changes == after.count("}-")


def test_make_cache_cells_are_exact_and_all_usable():
    """Trap 22, and ollama's edge 07: a batch longer than the cache is refused immediately."""
    cache = jaxkv.make_cache(jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=1)
    refused = plan_of(cache, 2)
    assert (*refused.reason, *refused.expected, *refused.actual) == (Reason.OUT_OF_CELLS, 2, 1)
    cache = apply_plan(cache, plan_of(cache, 1))
    assert jaxkv.show(cache).split() == ["owner", "0", "position", "0"]
    assert not plan_of(cache, 1).ok
    cache, _ = jaxkv.seq_rm(cache, 0)
    assert cache.num_used_cells() == 0 and plan_of(cache, 1).ok


def test_split_by_keeps_order_of_tokens_with_several_sequences():
    """Trap 48: llama.cpp does not split such a batch into equal parts."""
    sets = [[0, 1, 2], [0, 1, 2], [0, 1], [2], [0], [1], [2]]
    others = np.array([[*one[1:], -1, -1][:2] for one in sets])
    lowest = np.array([one[0] for one in sets], np.int32)
    for split_by, size in product(("simple", "equal"), (1, 2, 3, 8)):
        parts = split_batch(split_by, lowest, size, preceding_tokens(lowest, others))
        turn = {int(i): n for n, part in enumerate(parts) for i in part[part < len(sets)]}
        assert sorted(turn) == [*range(len(sets))]
        for (i, one), (j, other) in product(enumerate(sets), repeat=2):
            assert i >= j or not {*one} & {*other} or turn[i] <= turn[j]


def test_make_batch_outputs_are_the_last_of_each_sequence():
    """Trap 45: if no outputs are chosen."""
    batch = make_batch([1, 2, 3, 4, 5, 6, 7], sequences=[0, 1, 0, 1, 0, 1, 0])
    plan = jaxkv.init_batch(parse_cache(""), batch, ubatch_size=8)
    (ubatch,) = plan.ubatches
    logits = ubatch.tokens.reshape(-1)[ubatch.outputs]  # of a model that returns its input
    assert plan.gather_outputs([logits[:, None]])[:, 0].tolist() == [6, 7]


# -------------------------------------------------------------------------------- saved states


@pytest.mark.core
def test_load_into_empties_targets_of_empty_sequences():
    """Trap 76: in llama.cpp attention keeps the target's cells and loses its states."""
    cache = edit_sequences.make_filled_twin(kept=1, counts=(3, 2, 0), kinds="ar").cache
    loaded = snapshot.load(snapshot.save(cache, sequences=2), into=cache, sequences=0)
    attention, states = loaded.parts
    for part in (attention, states, loaded):
        assert part.seq_pos_max([0, 1, 2]).tolist() == [-1, 1, -1]


@pytest.mark.core
def test_load_into_refused_leaves_the_cache():
    """Trap 78: llama.cpp also refuses another number of streams, after it emptied the cells."""
    cache = jax.tree.map(jnp.copy, make_small_cache(4, 3))
    before = drawing(cache)
    bfloats = snapshot.save(replace(SMALL, dtype="bfloat16").make())
    crowded = snapshot.save(parse_cache(" ".join(f"{i}{{2}}" for i in range(12))), sequences=2)
    for data, message in ((bfloats, "the dtype of this one"), (crowded, "expected 12 free cells")):
        with pytest.raises((ValueError, jaxkv.PlanRefusedError), match=message):
            snapshot.load(data, into=cache, sequences={2: 2}, donate=True)
        assert drawing(cache) == before and plan_of(cache, 1).ok
    split = snapshot.save(parse_cache("0{0} 1{0} | 0{1} | 4{2}", SPLIT))
    assert snapshot.load(split, into=cache).seq_pos_max([0, 1, 2]).tolist() == [1, 0, 4]


@pytest.mark.core
def test_load_into_holes_goes_on_alike():
    """Trap 82; and a second snapshot leaves the first one unchanged (trap 81)."""
    cache = make_small_cache(4, 3)
    data = snapshot.save(cache, sequences=1)
    holed = cache
    for seq, start, stop in ((1, -1, -1), (0, 1, 2), (0, 3, 4)):
        holed, _ = jaxkv.seq_rm(holed, seq, start, stop)
    snapshot.save(holed)
    loaded = snapshot.load(data, into=holed)
    assert drawing(loaded) == "0{0} 0{1} 2{0} 1{1} 2{1}"
    np.testing.assert_allclose(
        run_tokens(loaded, [9], 1)[1], run_tokens(cache, [9], 1)[1], rtol=1e-5
    )


@pytest.mark.core
def test_load_into_rolled_back_cache_goes_on_alike():
    """Trap 84: for any contents of the target, including its checkpoints."""
    cache = edit_sequences.make_filled_twin(kept=3, counts=(8, 2)).cache
    data = snapshot.save(cache, sequences=0)
    target, ok = jaxkv.seq_rm(cache, 0, 6)
    assert ok
    target = edit_sequences.run_rows(target, [70, 71], [72])
    for seq in (0, 2):
        loaded = snapshot.load(data, into=target, sequences=seq)
        assert list_states(loaded, seq) == list_states(cache)
        rows = [[50] if seq == one else [] for one in range(3)]
        after = edit_sequences.run_rows(loaded, *rows)
        assert list_states(after, seq) == list_states(edit_sequences.run_rows(cache, [50]))
