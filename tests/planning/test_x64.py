"""With 64-bit JAX, as for gradient checks, dtypes are unchanged."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch, serving
from tests.attention.lives import by_formula, draw_qkv, make_edited, start_step
from tests.helpers import caches
from tests.helpers.caches import SMALL, assert_identical, attention_cache
from tests.helpers.edit_sequences import StateKind
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan

pytestmark = pytest.mark.core


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


CACHES = {
    **{kind.name: kind for kind in (caches.STRIPES, caches.TILES, caches.TWO_SPLIT, caches.WINDOW)},
    "states": StateKind("states", 0, 3, kept=2),
    "states, split": StateKind("states, split", 0, 3, streams=3, kept=2),
    "hybrid": StateKind("hybrid", 12, 3, model="ba", kept=2),
}


def tables_of_life(cache):
    """The table after each edit; dtypes never change."""
    given, tables = dtypes(cache), []
    for verb in (
        lambda m: apply_plan(m, jaxkv.init_batch(m, make_batch([[1, 2, 3, 4], [5, 6, 7, 8]]))),
        lambda m: jaxkv.seq_cp(m, 0, [1, 2], 0, 2).cache,
        lambda m: jaxkv.seq_add(m, 0, 2, -1, delta=3).cache,
        lambda m: jaxkv.seq_div(m, 0, 4, -1, divisor=2).cache,
        lambda m: jaxkv.seq_keep(m, 0).cache,
        lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
        lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
        lambda m: apply_plan(m, jaxkv.plan_step(m, [7, 8], sequences=[2, 1], active=[1, 1])),
        lambda m: jaxkv.rewind(m, to=tables[-2])[0],
        lambda m: jaxkv.seq_rm(m, 0)[0],
        jaxkv.clear,
    ):
        cache = verb(cache)
        assert dtypes(cache) == given
        tables.append(cache.table)
    return tables


@pytest.mark.parametrize("name", mark_cases(CACHES, fast=["striped"]))
def test_edits_x64_keep_dtypes_and_tables(name):
    with jax.enable_x64(True):
        found = tables_of_life(CACHES[name].make())
    for one, other in zip(found, tables_of_life(CACHES[name].make()), strict=True):
        assert_identical(one, other)


@pytest.mark.parametrize("implementation", [None, "tiles", "xla"])
def test_attend_x64_sums_in_float64(implementation, wide):
    """Except JAX's own attention, which rounds its weights."""
    step = start_step(make_edited(replace(SMALL, dtype="float64")))
    q, k, v = draw_qkv(step, dtype="float64")
    step, out = jaxkv.attend(step, 0, q, k, v, implementation=implementation)
    assert out.dtype == jnp.float64
    atol = 1e-6 if implementation == "xla" else 1e-12
    np.testing.assert_allclose(out, by_formula(step, 0, q), rtol=0, atol=atol)


def forward(params, step):
    x = params[step.tokens]
    step, out = jaxkv.attend(step, 0, *3 * [x[:, :, None]])
    return step, out.reshape(-1, 8)[step.outputs] @ params.T


@pytest.mark.nightly
@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_loops_x64_keep_dtypes_and_pick_the_same(draft, wide):
    prompts, numbers = [[1, 2, 1, 2], [3, 4, 3]], {np.dtype(np.int32), np.dtype(np.float32)}
    params = jax.random.normal(jax.random.key(0), (12, 8), jnp.float64)
    sizes = dict(layers=1, cells=40, kv_heads=1, head_dim=8, sequences=2, streams=2)
    empty = attention_cache(rope=None, **sizes)
    cache, logits, ids, *_ = jaxkv.prefill(forward, params, empty, make_batch(prompts))

    make_sampler = generation.make_sampler
    sampler = make_sampler(temperature=[0.7, 0.0], top_p=0.9, top_k=5, repeat_penalty=1.1)
    begin = partial(generation.init_decode, cache, logits=logits, sequences=ids, max_new_tokens=9)
    state = begin(sampler=sampler, stop_tokens=[0], seed=2, prompts=prompts).state
    options = dict(num_tokens=8, sampler=sampler, stop_tokens=[0])
    _, after, *_ = picked = jaxkv.decode(forward, params, cache, state, **options)
    assert dtypes(after) == dtypes(state) and {*dtypes(picked[2:4])} == numbers

    rest = params, cache, begin(sampler=make_sampler()).state
    picked = jaxkv.decode(forward, *rest, num_tokens=8)
    guesses = generation.prompt_lookup(prompts, ngram=1)
    if draft == "model":
        guesses = generation.draft_model(forward, params, cache, batch_size=2)
    made = generation.speculate(forward, *rest, drafter=guesses, num_tokens=8)
    assert {*dtypes(made[2:7])} == numbers
    np.testing.assert_array_equal(made.tokens[:, :8], picked.tokens)

    options = dict(num_beams=2, num_tokens=4, stop_tokens=[0])
    beams = generation.beam(forward, params, cache, logits[0], **options)
    assert beams.tokens.dtype == np.int32 and beams.scores.dtype == np.float32
    slid, ok = generation.context_shift(cache, 0, num_keep=1, num_discard=1)
    grouped, grew, _ = generation.self_extend(cache, 0, 0, group=2, width=2)
    assert ok and grew and dtypes(slid) == dtypes(grouped) == dtypes(cache)
    request = serving.Request(prompt=prompts[1], max_new_tokens=5)
    engine = serving.Engine(forward, params, empty, prefill_chunk=8)
    engine.submit(request)
    (result,) = engine.results()
    assert len(result.tokens) == 5


def test_refused_plan_of_several_ubatches_keeps_dtypes(wide):
    cache = attention_cache(
        layers=1, kv_heads=1, head_dim=4, cells=5, sequences=2, window=jaxkv.Window.sliding(3)
    )
    plan = partial(
        jaxkv.init_batch, batch=make_batch([[1] * 6, [1] * 4]), ubatch_size=4, split_by="equal"
    )
    for refused in (plan(cache), jax.jit(plan)(cache)):
        answers = refused.reason, refused.expected, refused.actual
        assert [x.tolist() for x in answers] == [[1, 0], [6, 0], [1, 0]]
        assert {x.dtype for x in answers} == {jnp.dtype("int32")}
