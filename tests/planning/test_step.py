"""Planning the next tokens of several sequences, and editing several sequences at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason
from jaxkv.planning.planners import plan_next
from tests.generation.tiny import load_tiny
from tests.helpers.caches import SMALL, SPLIT, assert_identical, fill_cache, parse_cache
from tests.helpers.edit_sequences import StateKind, make, run_rows
from tests.helpers.steps import apply_plan

MODELS = ("llama_tied", "mamba2", "granite_hybrid", "recurrent_gemma")


def started(kind):
    return fill_cache(3, 2, 4, kind=kind)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_plan_step_gives_logits_of_one_by_one(name):
    """Padding is before, between and after them; sequences are in any order, or default."""
    model = load_tiny(name)

    @jax.jit
    def feed(cache, tokens, sequences, valid):
        plan = jaxkv.plan_step(cache, tokens, sequences=sequences, active=valid)
        step, logits = model.forward(model.params, jaxkv.apply(cache, plan))
        return step.cache, logits.reshape(*valid.shape, -1), plan.ok

    tokens = np.array([[7, 3, 9, 5], [2, 8, 4, 6], [1, 1, 1, 1]])
    valid = np.array([[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]], bool)
    for streams, sequences in ((1, [2, 0, 1]), (3, [1, 2, 0])):
        start = model.make_cache(cells=8 * 3 // streams, sequences=3, streams=streams)
        cache, together, ok = feed(start, tokens, np.array(sequences), valid)
        alone = start
        for i, column in enumerate(np.eye(4, dtype=bool)[:, None] & valid):
            alone, logits, fine = feed(alone, tokens, np.array(sequences), column)
            there = column.any(axis=1)
            np.testing.assert_allclose(together[there, i], logits[there, i], atol=2e-4)
            assert ok and fine
        for one in (cache, alone):
            assert one.seq_pos_max(sequences).tolist() == [1, 2, -1]


@pytest.mark.core
@pytest.mark.parametrize("ids", [[2, 0], [2, 0, 1]])
def test_plan_step_of_states_outputs_each_token_in_its_place(ids):
    cache = make(kept=1)
    tokens = jnp.array([[0, 3, 4], [5, 0, 6], [0, 0, 0]])[: len(ids)]
    plan = jaxkv.plan_step(cache, tokens, sequences=jnp.array(ids), active=tokens > 0)
    output_tokens = plan.ubatch.tokens.reshape(-1)[plan.ubatch.outputs].reshape(tokens.shape)
    assert plan.ok and output_tokens[tokens > 0].tolist() == tokens[tokens > 0].tolist()
    cache = run_rows(cache, [], [], [1, 2])
    plan = jaxkv.plan_step(cache, jnp.array(ids), sequences=ids, active=jnp.array(ids) == 2)
    assert apply_plan(cache, plan).table.position[2].tolist() == [1, 2]


@pytest.mark.core
def test_plan_step_of_a_hybrid_in_one_stream_takes_cells_in_the_order_of_rows():
    cache = StateKind("hybrid", 16, 3, model="ar").make()
    plan = jaxkv.plan_step(cache, [5, 6], sequences=[1, 0])
    assert plan.ubatch.slots[0].tolist() == [[0], [1]]


@pytest.mark.core
def test_plan_step_refused_changes_nothing():
    """Without enough cells, or with a repeated traced sequence."""
    cache = started(SMALL)  # of 12 cells, 3 are free
    plan = jax.jit(jaxkv.plan_step)
    tokens, valid = jnp.ones((2, 2), int), jnp.ones((2, 2), bool)
    for ids, there in (([0, 1], valid), ([1, 1], valid.at[:, 1].set(False))):
        planned = plan(cache, tokens, sequences=jnp.array(ids), active=there)
        assert not planned.ok
        assert_identical(apply_plan(cache, planned), cache)
    assert plan(cache, tokens, active=valid.at[0, 0].set(False)).ok


@pytest.mark.core
def test_plan_next_beside_a_refused_sequence_names_those_that_fit():
    cache = parse_cache(" ".join(f"{i}{{0}}" for i in range(8)), SPLIT)  # stream 0 is full
    for ids, wrong, reason in (
        ([0, 1, 2], 0, Reason.OUT_OF_CELLS),
        ([1, 1, 2], 1, Reason.DUPLICATE_POSITION),
    ):
        tokens = jnp.ones((3, 1), int)
        plan = plan_next(cache.table, tokens, jnp.array(ids), tokens > 0)
        assert plan.reason.tolist() == [reason if seq == wrong else 0 for seq in range(3)]
        assert plan.fits.tolist() == [seq != wrong for seq in range(3)] and not plan.ok


def test_plan_step_flags_may_be_integers():
    steps = [jaxkv.plan_step(SMALL.make(), [5, 6], active=on) for on in ([1, 0], [True, False])]
    assert_identical(*steps)
