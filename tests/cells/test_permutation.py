"""Which cell a token is in means nothing (trap 96).

Tables, masks and contents are compared with oracles that spell out every cell, in `test_stateful`.
Here a model with rotated keys answers the same, but for the rounding of sums in another order.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from jaxkv.cache import merge, split
from tests.caches import assert_identical, filled, run


def dealt(cache, order):
    """Bring the contents of cell `order[i]` to cell i."""
    table, buffers = split(cache)
    per_cell = ("position", "owners", "shift", "cell_hash")
    table = replace(table, **{name: getattr(table, name)[..., order] for name in per_cell})
    buffers = jax.tree.map(lambda x: x[:, :, order], buffers)
    return merge(table, buffers)


@pytest.mark.core
def test_logits_do_not_depend_on_the_order_of_cells():
    cache = jaxkv.seq_cp(filled(4, 3), 0, 2, 0, 3).cache
    for seq in (0, 1):
        cache, _ = jaxkv.seq_rm(cache, seq, 1, 2)
    cache = jaxkv.seq_add(jaxkv.seq_add(cache, 1, 1, -1, delta=2).cache, 0, 2, -1, delta=3).cache
    order = np.random.default_rng(0).permutation(12)
    other = dealt(cache, order)
    assert not np.array_equal(other.table.position, cache.table.position)
    cache, other = (jaxkv.apply(one, jaxkv.init_update(one)) for one in (cache, other))
    assert_identical(other, dealt(cache, order))
    tidy = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
    assert not np.array_equal(tidy.table.position, cache.table.position)
    for tokens, seq in (([5], 0), ([6, 7, 8], 1), ([9], 2)):
        cache, logits = run(cache, make_batch(tokens, sequences=seq))
        for one in (other, tidy):
            one, again = run(one, make_batch(tokens, sequences=seq))
            np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)
            assert one.seq_pos_max(seq) == cache.seq_pos_max(seq)
