"""Common properties of all loops: donation, and use as a part of any program."""

from dataclasses import dataclass
from functools import partial, partialmethod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation.sampler import Sampler
from jaxkv.ops.attention.bias import check_bias
from jaxkv.serving import PrefixStore
from tests.generation import tiny
from tests.generation.tiny import forward, init_state, last_of, load_tiny
from tests.helpers.caches import SPLIT, VOCABULARY, assert_identical, fill_cache
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch, apply_plan

LOGITS = jnp.sin(jnp.arange(VOCABULARY, dtype=jnp.float32))[None]
BATCH = make_batch([1, 2, 3, 4, 5, 6])
TEXT = [1, 2, 3]


def call_prefill(cache, **options):
    result = jaxkv.prefill(forward, None, cache, BATCH, ubatch_size=4, **options)
    return result.cache, result.logits, result.ok


def call_decode(cache, **options):
    state = init_state(cache, tokens=[3], max_new_tokens=2)
    out = tiny.decode(cache, state, num_tokens=3, **options)
    return out.cache, out[2:4], out.state.remaining


def call_speculate(cache, **options):
    draft = generation.prompt_lookup([[1, 2, 1, 2]], recent=8)
    state = init_state(cache, tokens=[1], max_new_tokens=5)
    out = tiny.speculate(draft, cache, state, num_tokens=6, **options)
    return out.cache, out[2:7], out.state.remaining


def call_beam(cache, **options):
    options |= dict(num_beams=2, num_tokens=3, stop_tokens=[4])
    cache, *found = generation.beam(forward, None, cache, LOGITS, **options)
    return cache, found


def call_context_shift(cache, **options):
    return generation.context_shift(cache, 0, num_keep=1, num_discard=2, **options)


@pytest.fixture(scope="module")
def stored_text():
    cache = apply_batch(SPLIT.make(), TEXT, sequences=0)
    store = PrefixStore(cache, sequences=[1])
    return store.store(cache, TEXT, 0)[:2]


LOOPS = {
    "prefill": call_prefill,
    "decode": call_decode,
    "speculate": call_speculate,
    "beam": call_beam,
}
GIVE_UP = LOOPS | {"slide": call_context_shift}


def assert_gives_up(call, cache):
    before = jax.tree.map(np.array, cache)
    given = jax.tree.map(jnp.copy, cache)
    wanted = call(cache)
    assert_identical(cache, before)
    assert_identical(call(given, donate=True), wanted)
    assert all(one.is_deleted() for one in jax.tree.leaves(given.buffers))
    assert_identical(given.table, before.table)
    with pytest.raises(ValueError, match="buffers were donated"):
        call(given)


@pytest.mark.parametrize("loop", mark_cases(GIVE_UP, fast=["prefill", "slide"], core=[*LOOPS][1:]))
def test_loop_donated_cache_same_result(loop):
    assert_gives_up(GIVE_UP[loop], fill_cache(4, 1))


@pytest.mark.core
@pytest.mark.parametrize("verb", ["fork", "store"])
def test_store_donated_cache_same_result(verb, stored_text):
    cache, store = stored_text
    cache = apply_batch(cache, [4, 5], sequences=2)
    cases = {"fork": ([*TEXT, 4], 0), "store": ([4, 5], 2)}

    def call(cache, **options):
        return getattr(store, verb)(cache, *cases[verb], **options).cache

    assert_gives_up(call, cache)


def assert_same(found, wanted):
    """A traced loop returns the same as outside of a program, except for padded logits."""
    (after, made, *rest), (cache, others, *_) = found, wanted
    assert_identical(after.table, cache.table)
    if isinstance(made, jax.Array):
        made = made[: len(others)]
        assert rest[0]  # ok
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), made, others)


@pytest.mark.core
@pytest.mark.parametrize("loop", LOOPS)
def test_loop_in_jit_same_result_without_host(loop):
    inside = jax.jit(LOOPS[loop]).lower(fill_cache(2, 1))
    assert_same(inside.compile()(fill_cache(2, 1)), LOOPS[loop](fill_cache(2, 1)))
    text = inside.as_text()
    assert "callback" not in text and "infeed" not in text


EDITS = {  # edits of 5 tokens after a state was made, and whether it may continue
    "nothing": (lambda cache: cache, True),
    "another text is removed": (lambda cache: jaxkv.seq_rm(cache, 1)[0], True),
    "it slid": (lambda cache: call_context_shift(cache)[0], True),
    "its end is removed": (lambda cache: jaxkv.seq_rm(cache, 0, 4)[0], False),
    "it is removed": (lambda cache: jaxkv.seq_rm(cache, 0)[0], False),
    "its end is another": (lambda cache: apply_batch(jaxkv.seq_rm(cache, 0, 4)[0], [9]), False),
}


@pytest.mark.core
@pytest.mark.parametrize("edit", EDITS)
def test_state_from_before_an_edit_ends_its_text(edit):
    change, goes_on = EDITS[edit]
    cache, state = fill_cache(5, 2), init_state(fill_cache(5, 2), tokens=[3, 3])
    cache = apply_plan(change(cache), jaxkv.init_update(change(cache)))
    draft = generation.prompt_lookup([[1, 2, 1], [1, 2, 1]], recent=8)
    after, now, *_ = tiny.decode(cache, state, num_tokens=1)
    assert (now.reason[0] == jaxkv.Reason.EDITED) != goes_on
    assert last_of(after, [0]) == [position + goes_on for position in last_of(cache, [0])]
    other = tiny.speculate(draft, cache, state, num_tokens=1).state
    again = tiny.decode(after, now, num_tokens=1).state
    assert other.reason.tolist() == again.reason.tolist() == now.reason.tolist()


@pytest.mark.core
def test_prefill_in_jit_refused_returns_cache():
    inside = jax.jit(lambda m, t: jaxkv.prefill(forward, None, m, make_batch(t)))
    result = inside(fill_cache(4), jnp.ones(9, jnp.int32))
    assert not result.ok and result.reason[0] == jaxkv.Reason.OUT_OF_CELLS
    assert_identical(result.cache, fill_cache(4))


@pytest.mark.core
def test_speculate_in_scan_carries_all_that_it_returns():
    cache, state = fill_cache(4), init_state(fill_cache(4), tokens=[1])

    def turn(carry, _):
        cache, state, draft = carry
        made = tiny.speculate(draft, cache, state, num_tokens=3)
        return (made.cache, made.state, made.drafter), made.tokens[0]

    first = cache, state, generation.prompt_lookup([[1, 2, 1, 2]], recent=8)
    (after, _, _), tokens = jax.lax.scan(turn, first, length=2)
    for made in tokens:
        cache, state, *_ = wanted = tiny.decode(cache, state, num_tokens=3)
        assert made.tolist() == wanted.tokens[0].tolist()
    assert last_of(after, [0]) == last_of(cache, [0])


@pytest.mark.nightly
def test_prefill_derivative_same_in_jit():
    model = load_tiny("llama_tied")
    cache = model.make_cache(cells=32)

    def loss(params):
        result = jaxkv.prefill(model.forward, params, cache, make_batch([7, 3, 11]))
        return jnp.sum(result.logits[0] ** 2), result.ok

    slope = jax.value_and_grad(loss, has_aux=True)
    (value, ok), slopes = jax.jit(slope)(model.params)
    assert np.isfinite(value) and ok and all(map(jnp.any, jax.tree.leaves(slopes)))
    (plain, _), others = slope(model.params)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), slopes, others)


@pytest.mark.parametrize("donate", [False, True])
def test_prefill_refused_leaves_cache(donate):
    cache = jax.tree.map(jnp.copy, fill_cache(4))
    with pytest.raises(jaxkv.PlanRefusedError, match="OUT_OF_CELLS"):
        jaxkv.prefill(forward, None, cache, make_batch([1] * 99), ubatch_size=4, donate=donate)
    assert_identical(cache, fill_cache(4))


def make_equal_classes(count, bases, name, method):
    """Registered dataclasses with one field, and a method that gets the number of its class."""
    for i in range(count):
        body = {"__annotations__": {"x": jax.Array}, name: partialmethod(method, i)}
        made = dataclass(frozen=True)(type("Made", bases, body))
        yield i, jax.tree_util.register_dataclass(made, ["x"], [])(jnp.float32(0))


DRAFT = generation.prompt_lookup([[1]])  # one made during tracing is a part of the program
LOOPS_OF_SAMPLERS = {
    "begin": lambda m, state, **s: generation.init_decode(m, logits=LOGITS, sequences=[0], **s),
    "decode": partial(tiny.decode, num_tokens=1),
    "speculate": partial(tiny.speculate, DRAFT, num_tokens=1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("loop", LOOPS_OF_SAMPLERS)
def test_samplers_of_equal_fields_share_no_program(loop):
    """JAX compares their fields and not their types; only `begin` runs: others take 50 MB each."""
    cache = fill_cache(3, kind=SPLIT)
    state, asked = init_state(cache, tokens=[1]), []

    def only(_, i, logits, state):
        asked.append(i)
        return jnp.full_like(logits, -jnp.inf).at[:, i % 16].set(0)

    for i, sampler in make_equal_classes(60, (Sampler,), "adjust", only):
        run = partial(LOOPS_OF_SAMPLERS[loop], cache, state, sampler=sampler)
        if loop == "begin":
            assert run().tokens[0, 0] == i % 16
        else:
            jax.eval_shape(run)
        assert set(asked) == {i}
        asked.clear()


def test_biases_of_equal_fields_share_no_program():
    one, other = make_equal_classes(2, (), "__call__", lambda _, i, at, key, head: i * 1.0 * key)
    assert jax.tree.structure(one[1]) == jax.tree.structure(other[1])  # fixed in JAX: do without
    one, other = (check_bias(bias, (1, 1, 1, 2)) for _, bias in (one, other))
    assert jax.tree.structure(one) != jax.tree.structure(other)
