"""Every field of a cell goes where the cell's keys go; a new field is tested without a change."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import snapshot
from jaxkv.cache import merge
from jaxkv.kv.record import INITIAL
from tests.cells.pools import FOUR, TWO, parse_random
from tests.helpers.caches import WIDE, cells_of, edit
from tests.helpers.steps import apply_plan

core = pytest.mark.core
DRAWN = {"position", "owners", "shift"}
KEPT = INITIAL.keys() - {"owners", "stamp"}

EDITS = {
    "seq_cp": lambda cache: edit("seq_cp", cache, 0, [1, 3], 2),
    "seq_select": lambda cache: edit("seq_select", cache, [0, 2], [2, 0]),
    "defrag": lambda cache: (apply_plan(cache, jaxkv.defrag_plan(cache)), True),
    "load": lambda cache: (
        snapshot.load(snapshot.save(cache), into=jaxkv.clear(cache), sequences={0: 3, 2: 1}),
        True,
    ),
}


def random_cache(kind, seed):
    """A cache with gaps, shared cells and shifts, and with random numbers in all other fields."""
    rng, sharing = np.random.default_rng(seed), kind.sequences // kind.streams
    lines = []
    for stream in range(kind.streams):
        line = np.full(kind.cells, ".", object)
        for position, cell in enumerate(rng.choice(kind.cells, 5, replace=False)):
            owners = rng.choice(min(sharing, 4), rng.integers(1, min(sharing, 2) + 1), False)
            names = ",".join(str(stream * sharing + owner) for owner in owners)
            line[cell] = f"{position + 1}{{{names}}}+{rng.integers(position + 2)}"
        lines.append(" ".join(line))
    cache = parse_random("|".join(lines), kind)
    fields = {name: getattr(cache.table, name) for name in INITIAL.keys() - DRAWN}
    fields = {n: jnp.asarray(rng.integers(2**31, size=x.shape), x.dtype) for n, x in fields.items()}
    return merge(replace(cache.table, **fields), cache.buffers)


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(
    "kind", [TWO, pytest.param(FOUR, marks=core), pytest.param(WIDE, marks=core)], ids=str
)
def test_edits_move_every_field_with_the_keys(kind, name):
    num_moved = 0
    for seed in range(3):
        cache = random_cache(kind, seed)
        edited, ok = EDITS[name](cache)
        assert ok
        old, new = ({n: np.asarray(getattr(x.table, n)) for n in INITIAL} for x in (cache, edited))
        keys, moved_keys = (np.asarray(x.buffers.k[0]) for x in (cache, edited))
        origin = {keys[s, :, i].tobytes(): (s, i) for s, i in cells_of(cache.table)}
        for stream, cell in cells_of(edited.table):
            home, index = origin[moved_keys[stream, :, cell].tobytes()]
            for field in KEPT:
                values = new[field][stream, ..., cell], old[field][home, ..., index]
                np.testing.assert_array_equal(*values, err_msg=field)
            if (stream, cell) != (home, index):
                num_moved += 1
                assert new["stamp"][stream, cell] != old["stamp"][stream, cell]
    assert num_moved or (name, kind) == ("seq_cp", WIDE) or (name, kind) == ("seq_select", WIDE)
