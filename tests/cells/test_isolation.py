"""What a sequence answers does not depend on others in the same memory.

That a verb leaves the cells of others alone is a rule of the machine in `test_stateful`.
"""

from dataclasses import replace

import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from tests.memories import SMALL, filled, run


def test_logits_of_sequences_in_one_ubatch_equal_those_alone():
    prompts, tokens, alone = [[1, 2, 3, 4], [5], [7, 8, 9]], [10, 11, 12], []
    memory = SMALL.make()
    for seq, (prompt, token) in enumerate(zip(prompts, tokens, strict=True)):
        memory, _ = run(memory, make_batch(prompt, sequences=seq))
        own, _ = run(SMALL.make(), make_batch(prompt))
        alone.append(run(own, make_batch([token]))[1][0])
    _, together = run(memory, make_batch([[token] for token in tokens]))
    np.testing.assert_allclose(together, np.asarray(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_keys_that_are_nan_reach_no_other_sequence():
    """Neither those of a neighbour nor those that it left behind in free cells."""
    memory = filled(4, 3)
    table, buffers = jaxkv.split(memory)
    broken = np.flatnonzero(np.asarray(table.owners)[0, 0] >> 1 & 1)
    # What is stored for a token that is no number: a key that says so, and a value of zero.
    spoil = replace(
        buffers,
        k=tuple(x.at[:, :, broken].set(np.nan) for x in buffers.k),
        v=tuple(x.at[:, :, broken].set(0.0) for x in buffers.v),
    )
    sick = jaxkv.join(table, spoil)
    _, clean = run(memory, make_batch([9]))
    for other in (sick, jaxkv.seq_rm(sick, 1)[0]):
        _, beside = run(other, make_batch([9]))
        np.testing.assert_allclose(beside, clean, rtol=1e-5, atol=1e-6)
    assert np.isnan(run(sick, make_batch([9], sequences=1))[1]).all()
