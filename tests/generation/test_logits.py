"""Very large logits, and those with NaN or +inf: the same result in all loops."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, generation, make_batch
from jaxkv.generation.filters import make_sampler
from jaxkv.serving.engine import Engine, FinishReason, Request
from tests.generation.tiny import BEST, init_state, table_model
from tests.helpers.caches import attention_cache
from tests.helpers.parametrize import mark_cases
from tests.serving.servers import run_requests

WARM = make_sampler(temperature=1.0)
TABLE = jnp.roll(jnp.eye(4), 1, axis=1) + 0.01


def prefill_prompt(*prompt):
    sizes = dict(layers=1, cells=32, kv_heads=1, head_dim=1, sequences=2, streams=2)
    cache = attention_cache(**sizes)
    return jaxkv.prefill(table_model, TABLE, cache, make_batch([prompt]))[:2]


def test_logprobs_large_logits_are_exact():
    cache, _ = prefill_prompt(1, 2)
    for more in (0.0, 1e3, 4e6, -4e6):
        logits = jnp.array([[0.0, 0.5, 1.0, 1.5]]) + more
        picked = generation.init_decode(cache, logits=logits, sampler=BEST)
        assert picked.logprobs[0, 0] == pytest.approx(1.5 - np.log(np.exp([0, 0.5, 1, 1.5]).sum()))


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("sampler", [BEST, WARM], ids=["best", "drawn"])
def test_init_decode_broken_logits_end_the_text_by_name(sampler, wrong):
    cache, _ = prefill_prompt(1, 2)
    logits = jnp.array([[0.0, wrong, 1.0, 2.0], [0.0, -jnp.inf, 1.0, 2.0]])
    forked = jaxkv.seq_cp(cache, 0, 1).cache
    options = dict(logits=logits, sampler=sampler, sequences=[0, 1])
    picked = generation.init_decode(forked, **options)
    assert picked.state.reason.tolist() == [Reason.NONFINITE_LOGITS, Reason.OK]
    assert picked.state.active.tolist() == [False, True]
    assert picked.tokens[0, 0] == -1 and picked.tokens[1, 0] in (0, 2, 3)
    assert np.isnan(picked.logprobs).tolist() == [[True], [False]]


@pytest.mark.parametrize("wrong", mark_cases([jnp.nan, jnp.inf], core=[jnp.nan]))
def test_loops_broken_logits_end_the_text_by_name(wrong):
    """After token 3, which the third step feeds."""
    table = jnp.log(TABLE).at[3, 0].set(wrong)

    def forward(params, step):
        step, _ = table_model(jnp.ones((4, 4)), step)
        return step, table[step.tokens.reshape(-1)[step.outputs]]

    cache, logits = prefill_prompt(0)
    run = forward, None, cache, init_state(cache, logits=logits, sampler=BEST)
    options = dict(num_tokens=5, sampler=BEST)
    draft = generation.prompt_lookup([[0]], ngram=1)
    made = generation.speculate(*run, drafter=draft, **options)
    for found in (jaxkv.decode(*run, **options), made):
        assert found.tokens[0].tolist() == [2, 3, -1, -1, -1]
        assert np.isnan(found.logprobs[0]).tolist()[:3] == [False, False, True]
        assert found.state.reason[0] == Reason.NONFINITE_LOGITS and not found.state.active[0]

    beams = generation.beam(forward, None, cache, logits, num_beams=2, num_tokens=5)
    assert beams.reason == Reason.NONFINITE_LOGITS
    assert beams.tokens[0].tolist() == [1, 2, 3, -1, -1] and np.isfinite(beams.scores[0])
    asked = [Request(prompt=[0], max_new_tokens=9), Request(prompt=[0, 3], max_new_tokens=9)]
    results = run_requests(Engine(forward, None, jaxkv.clear(cache), prefill_chunk=8), asked)
    assert {result.reason for result in results} == {FinishReason.NONFINITE_LOGITS}
    assert [result.tokens.tolist() for result in results] == [[1, 2, 3], []]
