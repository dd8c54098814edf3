"""Programs of loops live as long as what they are made of, and no longer."""

import gc
import weakref
from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from jaxkv.loops import programs
from tests.generation.test_loops import BEST, DATA, FIRST, forward
from tests.memories import filled


def passed(*objects):
    """Prefill and decode with each."""
    for one in objects:
        memory, _ = jaxkv.prefill(one, None, filled(4), make_batch([1, 2]))
        jaxkv.decode(one, BEST, None, memory, loops.start(memory, [1]), steps=1)


class Tiny:
    def run(self, weights, memory, ubatch):
        return forward(weights, memory, ubatch)


@pytest.fixture
def collected_soon():
    """Let garbage be looked for in what the test makes, not in all that JAX holds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.core
def test_a_program_dies_with_its_function(collected_soon):
    before = len(programs._kept)
    tiny, others = Tiny(), [lambda *args: forward(*args), partial(forward)]
    others.append(jax.jit(others[0]))
    passed(tiny.run, *others)
    dead = [weakref.ref(one) for one in (tiny, *others)]
    assert len(programs._kept) == before + 8  # a prompt and a loop of each
    del tiny, others
    gc.collect()
    assert [ref() for ref in dead] == [None] * 4
    assert len(programs._kept) == before


@pytest.mark.parametrize("name", FIRST)
def test_the_weights_of_a_model_die_with_it(name, collected_soon):
    model = models.load(DATA / name)
    jaxkv.prefill(model.forward, model.weights, model.make_memory(cells=8), make_batch([1]))
    dead = [weakref.ref(one) for one in (model, model.forward, *jax.tree.leaves(model.weights))]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in dead)


def test_what_cannot_be_kept_weakly_is_refused():
    class Bare:
        __slots__ = ()

        def __call__(self, weights, memory, ubatch):
            return forward(weights, memory, ubatch)

    with pytest.raises(TypeError, match="referenced weakly, got .*Bare.*wrap it in a function"):
        jaxkv.prefill(Bare(), None, filled(4), make_batch([1]))


def test_a_program_whose_function_is_gone_says_so():
    step = loops.step_of(lambda *args: forward(*args))
    (ubatch,) = jaxkv.init_batch(filled(4), make_batch([1])).ubatches
    with pytest.raises(ReferenceError, match="is gone: keep it"):
        step(None, *jaxkv.split(filled(4)), ubatch)


def test_two_objects_of_one_class_are_two_models():
    shifts = [Shifted(0), Shifted(1)]
    batch = make_batch([1, 2])
    one, two = (jaxkv.prefill(each.run, None, filled(4), batch)[1] for each in shifts)
    np.testing.assert_allclose(two, one + 1, atol=1e-5)


class Shifted(Tiny):
    def __init__(self, by):
        self.by = by

    def run(self, weights, memory, ubatch):
        memory, logits = super().run(weights, memory, ubatch)
        return memory, logits + self.by
