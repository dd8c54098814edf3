"""Edge cases of llama.cpp's saved states, numbered as in `docs/reference/llama_cpp_traps.md`."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import snapshot
from tests.cells.plans import make_small_cache, plan_of, run_tokens
from tests.helpers import edit_sequences
from tests.helpers.caches import SMALL, SPLIT, drawing, parse_cache
from tests.helpers.edit_sequences import list_states

pytestmark = pytest.mark.core


def test_load_into_empties_targets_of_empty_sequences():
    """Trap 76: in llama.cpp attention keeps the target's cells and loses its states."""
    cache = edit_sequences.make_filled_twin(kept=1, counts=(3, 2, 0), kinds="ar").cache
    loaded = snapshot.load(snapshot.save(cache, sequences=2), into=cache, sequences=0)
    attention, states = loaded.parts
    for part in (attention, states, loaded):
        assert part.seq_pos_max([0, 1, 2]).tolist() == [-1, 1, -1]


def test_load_into_refused_leaves_the_cache():
    """Trap 78: llama.cpp also refuses another number of streams, after it emptied the cells."""
    cache = jax.tree.map(jax.numpy.copy, make_small_cache(4, 3))
    before = drawing(cache)
    bfloats = snapshot.save(replace(SMALL, dtype="bfloat16").make())
    crowded = snapshot.save(parse_cache(" ".join(f"{i}{{2}}" for i in range(12))), sequences=2)
    for data, message in ((bfloats, "the dtype of this one"), (crowded, "expected 12 free cells")):
        with pytest.raises((ValueError, jaxkv.PlanRefusedError), match=message):
            snapshot.load(data, into=cache, sequences={2: 2}, donate=True)
        assert drawing(cache) == before and plan_of(cache, 1).ok
    split = snapshot.save(parse_cache("0{0} 1{0} | 0{1} | 4{2}", SPLIT))
    assert snapshot.load(split, into=cache).seq_pos_max([0, 1, 2]).tolist() == [1, 0, 4]


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
