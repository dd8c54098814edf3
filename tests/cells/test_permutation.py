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
from tests.memories import assert_identical, filled, run


def dealt(memory, order):
    """Bring the contents of cell `order[i]` to cell i."""
    table, buffers = jaxkv.split(memory)
    per_cell = ("position", "owners", "shift", "stamp")
    table = replace(table, **{name: getattr(table, name)[..., order] for name in per_cell})
    buffers = jax.tree.map(lambda x: x[:, :, order], buffers)
    return jaxkv.join(table, buffers)


@pytest.mark.core
def test_logits_do_not_depend_on_the_order_of_cells():
    memory = jaxkv.seq_cp(filled(4, 3), 0, 2, 0, 3).cache
    for seq in (0, 1):
        memory, _ = jaxkv.seq_rm(memory, seq, 1, 2)
    memory = jaxkv.seq_add(jaxkv.seq_add(memory, 1, 1, -1, 2).cache, 0, 2, -1, 3).cache
    order = np.random.default_rng(0).permutation(12)
    other = dealt(memory, order)
    assert not np.array_equal(other.table.position, memory.table.position)
    memory, other = (jaxkv.apply(one, jaxkv.init_update(one)) for one in (memory, other))
    assert_identical(other, dealt(memory, order))
    tidy = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert not np.array_equal(tidy.table.position, memory.table.position)
    for tokens, seq in (([5], 0), ([6, 7, 8], 1), ([9], 2)):
        memory, logits = run(memory, make_batch(tokens, sequences=seq))
        for one in (other, tidy):
            one, again = run(one, make_batch(tokens, sequences=seq))
            np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)
            assert jaxkv.seq_pos_max(one, seq) == jaxkv.seq_pos_max(memory, seq)
