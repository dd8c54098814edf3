"""Which cell a token is in means nothing (trap 96).

Cells are dealt out anew, with their keys and values; questions, answers and outputs stay the same,
but for the rounding of sums in another order.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from tests.memories import SMALL, WIDE, assert_identical, drawn, filled, run
from tests.twins import lived_in

pytestmark = pytest.mark.core


def dealt(memory, order):
    """Bring the contents of cell `order[i]` to cell i."""
    table, buffers = jaxkv.split(memory)
    per_cell = ("position", "owners", "shift", "stamp")
    table = replace(table, **{name: getattr(table, name)[..., order] for name in per_cell})
    buffers = jax.tree.map(lambda x: x[:, :, order], buffers)
    return jaxkv.join(table, buffers)


@pytest.mark.parametrize("seed", range(4))
def test_outputs_do_not_depend_on_where_keys_lie(seed):
    memory = jaxkv.seq_cp(filled(4, 3), 0, 2, 0, 3)
    memory, _ = jaxkv.seq_rm(memory, 0, 1, 2)
    order = np.random.default_rng(seed).permutation(12)
    other = dealt(memory, order)
    for tokens, seq in (([5], 0), ([6, 7, 8], 1), ([9], 2)):
        memory, logits = run(memory, make_batch(tokens, sequences=seq))
        other, again = run(other, make_batch(tokens, sequences=seq))
        np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)
    everyone = [0, 1, 2]
    assert_identical(jaxkv.seq_pos_max(other, everyone), jaxkv.seq_pos_max(memory, everyone))


VERBS = {
    "seq_rm": lambda memory: jaxkv.seq_rm(memory, 1, 1, 3)[0],
    "seq_rm of all": lambda memory: jaxkv.seq_rm(memory, -1, 1, 2)[0],
    "seq_cp": lambda memory: jaxkv.seq_cp(memory, 0, [1, 2], 0, 3),
    "seq_keep": lambda memory: jaxkv.seq_keep(memory, 0),
    "seq_add": lambda memory: jaxkv.seq_add(memory, 0, 1, -1, -2),
    "seq_div": lambda memory: jaxkv.seq_div(memory, 0, 1, -1, 2),
    "clear": jaxkv.clear,
}
QUESTIONS = {
    "used": jaxkv.used,
    "seq_pos_min": lambda memory: jaxkv.seq_pos_min(memory, [0, 1, 2]),
    "seq_pos_max": lambda memory: jaxkv.seq_pos_max(memory, [0, 1, 2]),
    "can_resume": lambda memory: jaxkv.can_resume(memory, 0, 2),
    "check_invariants": jaxkv.check_invariants,
}


@pytest.mark.parametrize("kind", [SMALL, WIDE], ids=lambda kind: kind.name)
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_commute_with_dealing(kind, verb):
    memory = lived_in(kind)
    order = np.random.default_rng(1).permutation(kind.cells)
    assert_identical(VERBS[verb](dealt(memory, order)), dealt(VERBS[verb](memory), order))


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_do_not_depend_on_dealing(question):
    memory = lived_in(WIDE)
    order = np.random.default_rng(2).permutation(WIDE.cells)
    assert_identical(QUESTIONS[question](dealt(memory, order)), QUESTIONS[question](memory))


def test_update_rotates_each_key_where_it_lies():
    memory = jaxkv.seq_add(filled(4, 3), 0, 2, -1, 3)
    memory = jaxkv.seq_add(memory, 1, 0, -1, 1)
    order = np.random.default_rng(3).permutation(12)

    def update(memory):
        return jaxkv.apply(memory, jaxkv.init_update(memory))

    assert_identical(update(dealt(memory, order)), dealt(update(memory), order))


def test_defrag_is_a_dealing():
    """Closing gaps brings keys along: outputs stay, and no cell is used beyond the others."""
    memory, _ = jaxkv.seq_rm(filled(8, 3), 0, 2, 6)
    tidy = jaxkv.apply(memory, jaxkv.defrag_plan(memory))
    assert (jaxkv.split(tidy)[0].position[0, :7] >= 0).all()
    for seq in (0, 1):
        _, logits = run(memory, make_batch([5], sequences=seq))
        _, again = run(tidy, make_batch([5], sequences=seq))
        np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)


def test_drawn_memories_tell_dealing_apart():
    """The check itself can fail: another order is another memory."""
    assert not np.array_equal(drawn("0{0} 1{0}").table.position, drawn("1{0} 0{0}").table.position)
