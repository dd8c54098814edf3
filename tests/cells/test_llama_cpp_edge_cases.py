"""Edge cases of llama.cpp's cache, numbered as in `docs/reference/llama_cpp_traps.md`.

Cells are drawn by index: `1{0,2}` is position 1, owned by sequences 0 and 2, and `.` is empty.
"""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.planning.layout import preceding_tokens, split_batch
from tests.cells.plans import plan_of
from tests.cells.pools import parse_random
from tests.helpers.caches import SMALL, assert_identical, drawing, edit, parse_cache
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
