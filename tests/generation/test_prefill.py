"""Prompts: their logits, existing plans, and the lifetime of compiled programs."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import make_batch
from jaxkv.cache import split
from jaxkv.core import compile_cache
from jaxkv.generation.model_step import compiled_step
from tests.generation.tiny import BEST, DATA, forward, init_state
from tests.helpers.caches import SMALL, assert_identical, fill_cache
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases

MODELS = ["llama_tied", "mamba2", "granite_hybrid", "recurrent_gemma"]
OUTPUTS = [("last", 2), ("known", 3), ("traced", 10)]


@pytest.mark.core
def test_prefill_with_plan_does_not_plan_again():
    cache, batch = fill_cache(2), make_batch([1, 2, 3, 4, 5], sequences=1)
    plan = jaxkv.init_batch(cache, batch, ubatch_size=4)
    prefill = partial(jaxkv.prefill, forward, None)
    wanted = prefill(cache, batch, ubatch_size=4)
    after, *rest = prefill(cache, batch, plan=plan)
    assert_identical((after, *rest), tuple(wanted))
    for row in mistakes("prefill"):
        assert_raises(*row, globals() | locals())
    logits = jax.jit(lambda params: jaxkv.prefill(forward, params, cache, batch, plan=plan).logits)
    np.testing.assert_allclose(logits(None)[:1], wanted.logits, atol=1e-6)


@pytest.mark.parametrize("case, num_outputs", mark_cases(OUTPUTS, core=[OUTPUTS[0], OUTPUTS[2]]))
def test_prefill_in_jit_computes_logits_of_outputs_only(case, num_outputs):
    tokens = np.arange(10, dtype=np.int32).reshape(2, 5)
    outputs = np.zeros((2, 5), bool)
    outputs[0, [2, 4]] = outputs[1, 1] = True

    def run(tokens, traced, cache):
        flags = {"last": None, "known": known, "traced": traced}[case]
        return jaxkv.prefill(forward, None, cache, make_batch(tokens, outputs=flags))

    cache, known = fill_cache(), jnp.array(outputs)
    inside = jax.jit(run)(tokens, outputs, cache)
    flags = None if case == "last" else outputs
    outside = jaxkv.prefill(forward, None, cache, make_batch(tokens, outputs=flags))
    rows = max(num_outputs, 8)
    assert inside.logits.shape[0] == inside.sequences.shape[0] == rows
    n = outside.logits.shape[0]
    np.testing.assert_allclose(inside.logits[:n], outside.logits, atol=1e-5)
    assert inside.sequences[:n].tolist() == outside.sequences.tolist()
    assert inside.sequences[n:].tolist() == [-1] * (rows - n)


@pytest.mark.core
def test_prefill_in_jit_holds_no_logits_of_other_tokens():
    vocabulary, cache = 4096, replace(SMALL, cells=64).make()

    def wide(params, step):
        step, hidden = forward(None, step)
        return step, hidden @ params

    def run(params, cache, tokens):
        return jaxkv.prefill(wide, params, cache, make_batch(tokens)).logits

    width = jaxkv.prefill(forward, None, cache, make_batch([1])).logits.shape[1]
    args = jax.ShapeDtypeStruct((width, vocabulary), np.float32), cache
    program = jax.jit(run).lower(*args, jax.ShapeDtypeStruct((2, 32), np.int32)).compile()
    assert f"[8,{vocabulary}]" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 64 * vocabulary * 4


class Shifted:
    by = 0

    def run(self, params, step):
        step, logits = forward(params, step)
        return step, logits + self.by


@pytest.fixture
def limit_collection():
    """Limit garbage collection to objects of the test, without those of JAX."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.nightly
def test_program_dies_with_its_function(limit_collection):
    _, wanted, *_ = jaxkv.prefill(forward, None, fill_cache(4), make_batch([1, 2]))
    before = len(compile_cache._kept)
    shifted, others = Shifted(), [lambda *args: forward(*args), partial(forward)]
    shifted.by = 1
    others.append(jax.jit(others[0]))
    for one in (*others, shifted.run):
        cache, logits, *_ = jaxkv.prefill(one, None, fill_cache(4), make_batch([1, 2]))
        np.testing.assert_allclose(logits, wanted + (one == shifted.run), atol=1e-5)
    state = init_state(cache, tokens=[1])
    jaxkv.decode(shifted.run, None, cache, state, num_tokens=1, sampler=BEST)
    del state
    dead = [weakref.ref(each) for each in (shifted, *others)]
    assert len(compile_cache._kept) == before + 5  # for a prompt of each, and a loop
    del shifted, others, one
    gc.collect()
    assert [ref() for ref in dead] == [None] * 4
    assert len(compile_cache._kept) == before


@pytest.mark.core
@pytest.mark.parametrize("name", mark_cases(MODELS, fast=MODELS[:1]))
def test_weights_of_a_model_die_with_it(name, limit_collection):
    model = models.load(DATA / name)
    jaxkv.prefill(model.forward, model.params, model.make_cache(cells=8), make_batch([1]))
    dead = [weakref.ref(one) for one in (model, model.forward, *jax.tree.leaves(model.params))]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in dead)


def test_step_of_dead_function_raises():
    step = compiled_step(lambda *args: forward(*args))
    (ubatch,) = jaxkv.init_batch(fill_cache(4), make_batch([1])).ubatches
    with pytest.raises(ReferenceError, match="was deleted; keep"):
        step(None, *split(fill_cache(4)), ubatch)
