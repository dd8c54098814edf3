"""Prompts and generation: one contract for every loop, whatever kind of function a model is."""

import gc
import weakref
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from jaxkv.loops import programs
from tests.memories import SMALL, SPLIT, assert_identical, filled, think

DATA = Path(__file__).parent / "data"
MODELS = ("llama_tied", "mamba2", "granite_hybrid", "recurrent_gemma")
FIRST = [MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])]
CLOSE = dict(rtol=0, atol=2e-4)
TOKENS = np.array([7, 3, 11, 5, 2, 9, 13, 4, 6, 1, 8], np.int32)
NONE = np.zeros(0, np.int32)

load = cache(lambda name: models.load(DATA / name))


def forward(weights, memory, ubatch):
    """A tiny transformer; it applies the ubatch once more."""
    del weights
    return think(memory, ubatch)


def best(logits, sequences, positions):
    del sequences, positions
    return jnp.argmax(logits, axis=-1)


def state_of(tokens, sequences=None, active=None):
    count = len(tokens)
    return loops.DecodeState(
        token=jnp.asarray(tokens, jnp.int32),
        sequence=jnp.asarray(range(count) if sequences is None else sequences, jnp.int32),
        active=jnp.ones(count, bool) if active is None else jnp.asarray(active),
        full=jnp.array(False),
    )


def buffers_of(memory):
    return jax.tree.leaves(jaxkv.split(memory)[1])


# ---- a whole computation, by several kinds of function


@cache
def whole(name):
    """Logits after each token of a text, all computed at once in a step written by hand."""
    model = load(name)
    memory = model.make_memory(cells=32)
    batch = make_batch(TOKENS, outputs=np.ones(len(TOKENS), bool))
    (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
    step = jax.jit(lambda w, m, u: model.forward(w, jaxkv.apply(m, u), u))
    return np.asarray(step(model.weights, memory, ubatch)[1])[: len(TOKENS)]


class Wrapped:
    """A model that is an object with a method."""

    def __init__(self, model):
        self.model = model

    def run(self, weights, memory, ubatch):
        return self.model.forward(weights, memory, ubatch)

    def applying(self, weights, memory, ubatch):
        return self.model.forward(weights, jaxkv.apply(memory, ubatch), ubatch)


def kinds_of(model):
    wrapped = Wrapped(model)
    return {
        "plain": model.forward,
        "compiled": jax.jit(model.forward),
        "method": wrapped.run,
        "applies by itself": wrapped.applying,
        "partial": partial(Wrapped.run, wrapped),
        "lambda": lambda *args: model.forward(*args),
    }


@pytest.mark.parametrize("name", FIRST)
def test_a_prompt_in_parts_gives_the_logits_of_the_whole(name):
    model = load(name)
    batch = make_batch(TOKENS, outputs=np.ones(len(TOKENS), bool))
    memory = model.make_memory(cells=32)
    after, logits = jaxkv.prefill(model.forward, model.weights, memory, batch, ubatch_size=4)
    np.testing.assert_allclose(logits, whole(name), **CLOSE)
    assert jaxkv.seq_pos_max(after, 0) == len(TOKENS) - 1
    assert jaxkv.seq_pos_max(memory, 0) == -1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=() if name == "llama_tied" else pytest.mark.slow,
        )
        for name in MODELS
        for kind in ("compiled", "method", "applies by itself", "partial", "lambda")
    ],
)
def test_any_kind_of_function_gives_the_same_logits(name, kind):
    model = load(name)
    memory = model.make_memory(cells=32)
    run = kinds_of(model)[kind]
    _, logits = jaxkv.prefill(run, model.weights, memory, make_batch(TOKENS), ubatch_size=16)
    np.testing.assert_allclose(logits[0], whole(name)[-1], **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_generation_feeds_what_was_picked(name):
    """The tokens of a loop, fed once more as a prompt, are each the best one of their logits."""
    model = load(name)
    memory = model.make_memory(cells=32)
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, make_batch(TOKENS[:4]))
    first = np.asarray(logits).argmax(-1)
    memory, state, tokens = jaxkv.decode(
        model.forward, best, model.weights, memory, state_of(first), NONE, steps=5
    )
    text = np.concatenate([TOKENS[:4], first, tokens[0]])
    batch = make_batch(text, outputs=np.ones(len(text), bool))
    _, logits = jaxkv.prefill(model.forward, model.weights, model.make_memory(cells=32), batch)
    assert np.asarray(logits)[3:-1].argmax(-1).tolist() == text[4:].tolist()
    assert jaxkv.seq_pos_max(memory, 0) == len(text) - 2 and state.token[0] == text[-1]


def test_a_sampler_is_told_where_tokens_will_stand():
    """A token each for two sequences, the third one having ended; the memory knows the rest."""
    memory, state = filled(1, 3, 2), state_of([9, 8, 7], [2, 0, 1], [True, False, True])
    for wanted in ([[3, 4], [-1, -1], [4, 5]], [[5], [-1], [6]]):
        memory, state, tokens = jaxkv.decode(
            forward, where, None, memory, state, NONE, steps=len(wanted[0])
        )
        assert tokens.tolist() == wanted
    assert jaxkv.seq_pos_max(memory, [2, 0, 1]).tolist() == [4, 0, 5]


def where(logits, sequences, positions):
    del logits, sequences
    return positions


def test_a_loop_ends_when_the_memory_is_full():
    cells = SMALL.cells
    memory, state = filled(4, cells - 6), state_of([1, 2])
    memory, state, tokens = jaxkv.decode(forward, where, None, memory, state, NONE, steps=3)
    assert tokens.tolist() == [[5, -1, -1], [cells - 5, -1, -1]]
    assert state.full and state.active.all() and jaxkv.used(memory) == cells
    assert state.token.tolist() == [5, cells - 5]  # they are not in the memory yet
    after, again, tokens = jaxkv.decode(forward, where, None, memory, state, NONE, steps=3)
    assert_identical((after, again), (memory, state))
    assert (tokens == -1).all()


# ---- what is taken and what is left


@pytest.mark.parametrize(
    "kind",
    [pytest.param(SMALL, id="pool"), pytest.param(SPLIT, id="streams", marks=pytest.mark.slow)],
)
def test_the_memory_that_is_passed_in_stays_unless_it_is_donated(kind):
    def run(memory, donate):
        memory, logits = jaxkv.prefill(
            forward, None, memory, make_batch([1] * 6), ubatch_size=4, donate=donate
        )
        memory, state, tokens = jaxkv.decode(
            forward, best, None, memory, state_of([3]), NONE, steps=2, donate=donate
        )
        return memory, logits, state, tokens

    memory = filled(2, 3, kind=kind)
    before = jax.tree.map(np.array, memory)
    wanted = run(memory, False)
    assert_identical(memory, before)

    given = jax.tree.map(jnp.copy, memory)
    assert_identical(run(given, True), wanted)
    assert all(one.is_deleted() for one in buffers_of(given))
    assert_identical(jaxkv.split(given)[0], jaxkv.split(before)[0])


@pytest.mark.parametrize("donate", [False, True])
def test_a_refused_prompt_leaves_the_memory(donate):
    memory = jax.tree.map(jnp.copy, filled(4))
    before = jax.tree.map(np.array, memory)
    with pytest.raises(jaxkv.RefusedError, match="NO_ROOM"):
        jaxkv.prefill(forward, None, memory, make_batch([1] * 99), ubatch_size=4, donate=donate)
    assert_identical(memory, before)


@pytest.mark.slow
def test_a_prompt_inside_of_a_program_says_whether_it_was_taken():
    traced = jax.jit(
        lambda memory, tokens: jaxkv.prefill(forward, None, memory, make_batch(tokens))
    )
    memory = filled(4)
    for count in (3, 99):
        batch = make_batch([1] * count)
        after, logits, ok = traced(memory, jnp.ones(count, jnp.int32))
        if count == 3:
            wanted, found = jaxkv.prefill(forward, None, memory, batch)
            assert_identical(jaxkv.split(after)[0], jaxkv.split(wanted)[0])
            np.testing.assert_allclose(logits[0], found[0], atol=1e-5)
        else:
            assert_identical(after, memory)
        assert ok == (count == 3)


def test_a_whole_loop_inside_of_a_program_is_that_outside():
    def whole(memory, tokens):
        memory, logits, *ok = jaxkv.prefill(forward, None, memory, make_batch(tokens))
        first = jnp.argmax(logits[:1], axis=-1)
        return jaxkv.decode(forward, best, None, memory, state_of(first), NONE, steps=3), ok

    tokens = jnp.array([1, 2, 3])
    (_, _, wanted), none = whole(filled(4), tokens)
    (_, _, found), (ok,) = jax.jit(whole)(filled(4), tokens)
    assert found.tolist() == wanted.tolist() and ok and none == []


@pytest.mark.slow
def test_derivatives_go_through_a_prompt():
    """Outside of `jit` too, where a refusal is raised and no `ok` is needed."""
    model = load("llama_tied")
    memory = model.make_memory(cells=32)

    def loss(weights):
        _, logits, *ok = jaxkv.prefill(model.forward, weights, memory, make_batch(TOKENS[:3]))
        return jnp.sum(logits[0] ** 2), ok

    slope = jax.value_and_grad(loss, has_aux=True)
    (value, (ok,)), slopes = jax.jit(slope)(model.weights)
    assert np.isfinite(value) and ok and all(map(jnp.any, jax.tree.leaves(slopes)))
    (plain, none), others = slope(model.weights)
    assert none == []
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), slopes, others)


@pytest.mark.slow
def test_many_memories_at_once():
    memories = [filled(2, 3), filled(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    batch = make_batch([1, 2, 3], sequences=1)
    together = jax.vmap(lambda memory: jaxkv.prefill(forward, None, memory, batch))(stacked)
    for i, memory in enumerate(memories):
        after, logits = jaxkv.prefill(forward, None, memory, batch)
        found = jax.tree.map(lambda x, i=i: x[i], together)
        assert_identical(jaxkv.split(found[0])[0], jaxkv.split(after)[0])
        np.testing.assert_allclose(found[1][0], logits[0], atol=1e-5)
        assert found[2]


# ---- mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(sequence=[1, 1]), "sequence 1 comes twice"),
        (dict(sequence=[0, 9]), "ids from 0 to"),
        (dict(token=[1, 2, 3]), r"got \(3,\), \(2,\), \(2,\), \(\)"),
        (dict(active=[True]), r"got \(2,\), \(2,\), \(1,\), \(\)"),
        (dict(full=[False]), r"got \(2,\), \(2,\), \(2,\), \(1,\)"),
        (
            dict(token=1, sequence=0, active=True),
            r"of one shape \[T\], .*got \(\), \(\), \(\), \(\)",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_cannot_be_is_refused(change, message, donate):
    memory = jax.tree.map(jnp.copy, filled(2, 3))
    state = loops.DecodeState(
        **(dict(token=[1, 2], sequence=[0, 1], active=[True, True], full=False) | change)
    )
    with pytest.raises(ValueError, match=message):
        jaxkv.decode(forward, best, None, memory, state, NONE, steps=2, donate=donate)
    assert_identical(memory, filled(2, 3))


@pytest.mark.parametrize(
    ("sample", "got"),
    [
        (lambda logits, *_: jnp.max(logits, axis=-1), r"float32\[2\]"),
        (lambda logits, *_: jnp.argmax(logits, axis=-1, keepdims=True), r"int32\[2, 1\]"),
    ],
)
def test_what_picks_no_tokens_is_refused(sample, got):
    memory = jax.tree.map(jnp.copy, filled(2, 3))
    with pytest.raises(ValueError, match=rf"integers of shape \(2,\), got {got}"):
        jaxkv.decode(forward, sample, None, memory, state_of([1, 2]), NONE, steps=2, donate=True)
    assert_identical(memory, filled(2, 3))


def forgetful(weights, memory, ubatch):
    return memory, forward(weights, memory, ubatch)[1]


def verbose(weights, memory, ubatch):
    memory, logits = forward(weights, memory, ubatch)
    return memory, logits[None]


def mute(weights, memory, ubatch):
    return forward(weights, memory, ubatch)[0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (forgetful, "nothing written"),
        (verbose, r"logits \[O, V\] from forward.*got \(1, "),
        (mute, "a pair from forward"),
    ],
)
def test_a_model_that_breaks_the_contract_is_told(model, message):
    with pytest.raises(ValueError, match=message):
        jaxkv.prefill(model, None, filled(4), make_batch([1, 2]))


def test_no_steps_are_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        jaxkv.decode(forward, best, None, filled(2), state_of([1]), NONE, steps=0)


# ---- programs live as long as what they are made of


def passed(*objects):
    """Prefill and decode with each."""
    for one in objects:
        memory, _ = jaxkv.prefill(one, None, filled(4), make_batch([1, 2]))
        jaxkv.decode(one, best, None, memory, state_of([1]), NONE, steps=1)


class Tiny:
    def run(self, weights, memory, ubatch):
        return forward(weights, memory, ubatch)


@pytest.fixture
def collected_soon():
    """Let garbage be looked for in what the test makes, not in all that JAX holds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
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


def test_a_program_dies_with_what_picks_in_it(collected_soon):
    before, pick = len(programs._kept), lambda *args: best(*args)
    jaxkv.decode(forward, pick, None, filled(4), state_of([1]), NONE, steps=1)
    assert len(programs._kept) == before + 1
    del pick
    gc.collect()
    assert len(programs._kept) == before


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
