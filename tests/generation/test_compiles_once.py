"""After a first call or a warm-up no values cause tracing or compilation."""

import functools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from models.compiling import counting
from tests.generation import tiny
from tests.generation.tiny import forward, init_state
from tests.helpers import caches as kinds
from tests.helpers.caches import (
    SMALL,
    SPLIT,
    Kind,
    apply_update,
    assert_identical,
    fill_cache,
    run_model,
    run_ubatch,
)
from tests.helpers.parametrize import mark_cases
from tests.helpers.reference_caches import make_edited

pytestmark = pytest.mark.core
POOL = Kind("pool", cells=24, sequences=4)


def numbers(kind, i):
    """Arguments that differ in every call, of the types that callers use."""
    seq, other = (7 * i) % kind.sequences, (5 * i + 1) % kind.sequences
    if i % 3 == 1:
        return np.int32(seq), np.int64(other), i, i + 2
    if i % 3 == 2:
        return jnp.int32(seq), jnp.int32(other), -1, jnp.int32(i)
    return seq, other, -1, -1


EDITS: dict[str, Callable] = {
    "seq_rm": lambda m, seq, other, p0, p1: jaxkv.seq_rm(m, seq, p0, p1),
    "seq_cp": jaxkv.seq_cp,
    "seq_add": lambda m, seq, other, p0, p1: jaxkv.seq_add(m, seq, p0, p1, delta=1).cache,
    "seq_div": lambda m, seq, other, p0, p1: jaxkv.seq_div(m, seq, p0, p1, divisor=2).cache,
    "seq_keep": lambda m, seq, *_: jaxkv.seq_keep(m, seq).cache,
    "seq_pos_min": lambda m, seq, *_: m.seq_pos_min(seq),
    "seq_pos_max": lambda m, seq, *_: m.seq_pos_max(seq),
    "can_resume": lambda m, seq, other, p0, p1: m.can_resume(seq, p0),
    "clear": lambda m, *_: jaxkv.clear(m),
    "used": lambda m, *_: m.num_used_cells(),
    "defrag": lambda m, *_: jaxkv.apply(m, jaxkv.defrag_plan(m)),
    "update": lambda m, seq, other, p0, p1: apply_update(
        jaxkv.seq_add(m, seq, p0, p1, delta=1).cache
    ),
}


@pytest.mark.parametrize("verb", EDITS)
def test_edit_with_other_arguments_traces_nothing(verb):
    caches = [make_edited(SMALL, seed) for seed in range(3)]
    for i in range(3):  # one call for each type of number
        EDITS[verb](caches[0], *numbers(SMALL, i))
    if verb in ("defrag", "update"):  # the first may have had nothing to do
        EDITS[verb](jaxkv.seq_rm(fill_cache(4, 3), 0, 1, 2)[0], 1, 0, -1, -1)
    with counting(traces=True) as heard:
        for i in range(3, 12):
            EDITS[verb](caches[i % 3], *numbers(SMALL, i))
    assert heard() == 0


class Thinker:
    """Its method is a new object at each access."""

    def run(self, params, step):
        return run_model(step)


THINKER = Thinker()
step = jax.jit(jaxkv.plan_step)


@functools.cache
def caches():
    return [fill_cache(*counts) for counts in ((4, 1), (3, 2), (5, 2), (2, 2))]


def plan(i):
    cache = caches()[i]
    for ids in ([i % 3] * 3, [0, 1, 2], [0, 0, 0, 1], [2, 1, 2, 0], [i % 3]):
        made = jaxkv.init_batch(cache, make_batch(range(len(ids)), sequences=ids), ubatch_size=4)
        made.gather_outputs([run_ubatch(cache, ubatch)[1] for ubatch in made.ubatches])
    ids, tokens = np.arange(3), np.arange(3) + i
    plan = step(cache, tokens, sequences=(ids + i) % 3, active=ids != i)
    run_ubatch(cache, plan.ubatch)


def ubatches(i):
    batch = make_batch([1] * (12, 15, 11, 16)[i], sequences=i)
    jaxkv.prefill(forward, None, kinds.WIDE.make(), batch, ubatch_size=4)


def chat(i):
    cache, tokens = jax.tree.map(jnp.copy, caches()[i]), [[1, 2, 3], [1, 2, 3, 4]][i % 2]
    batch, donate = make_batch(tokens, sequences=2), i in (1, 2)
    cache, logits, *_ = jaxkv.prefill(THINKER.run, None, cache, batch, ubatch_size=4, donate=donate)
    picking = dict(sampler=generation.make_sampler(temperature=1.0 + i), stop_tokens=[i])
    state = init_state(cache, logits=logits, sequences=[2], seed=i, **picking)
    for _ in range(2):
        options = dict(num_tokens=2, donate=donate, **picking)
        cache, state, *_ = jaxkv.decode(THINKER.run, None, cache, state, **options)


def search_and_slide(i):
    cache, sequences = caches()[i], [[0, 2], [1, 0], [0, 1], [0, 2]][i]
    logits = jnp.arange(kinds.VOCABULARY)[None] * jnp.float32(i + 1)
    options = dict(stop_tokens=[i], sequences=sequences, length_penalty=0.1 * i)
    generation.beam(forward, None, cache, logits, num_beams=2, num_tokens=3, **options)
    generation.context_shift(cache, sequences[0], num_keep=i % 2, num_discard=1)
    generation.self_extend(cache, sequences[0], 0, group=2, width=2)


def speculate(i):
    cache = caches()[i]
    state = init_state(cache, tokens=[i], sequences=[i % 2], max_new_tokens=i, seed=i)
    draft = generation.prompt_lookup([[i, 1, 2]], recent=8)
    tiny.speculate(draft, cache, state, num_tokens=6, sampler=generation.make_sampler())


LOOPS = {loop.__name__: loop for loop in (plan, ubatches, chat, speculate, search_and_slide)}


@pytest.mark.parametrize("loop", mark_cases(LOOPS, [name for name in LOOPS if name != "speculate"]))
def test_loop_other_values_trace_nothing(loop):
    LOOPS[loop](0)
    with counting(traces=True) as heard:
        for i in range(1, 4):
            LOOPS[loop](i)
    assert heard() == 0


def prompts(kind):
    """Prompts of some ubatches, and several at once; warm-up leaves the cache unchanged."""
    cache, several = fill_cache(2, 3, kind=kind), kind.streams > 1
    for sequences in [(0,), (0, 1), (0, 1, 2)] if several else [(0,)]:  # more than two tokens
        warm = generation.warm_up(forward, None, cache, ubatch_size=2, sequences=sequences)
        assert_identical(warm, cache)
    empty = jaxkv.clear(cache)

    def use():
        batches = [make_batch([1] * count, sequences=2) for count in (1, 2)]
        batches += [make_batch([[1], [2]], sequences=[2, 0])][:several]
        for batch in batches:
            jaxkv.prefill(forward, None, empty, batch, ubatch_size=2)

    return use


def run_longest():
    cache, loop = POOL.make(), THINKER.run
    sampler = generation.make_sampler(temperature=0.7, top_p=0.9, repeat_penalty=1.1)
    picking = dict(sampler=sampler, stop_tokens=[1])

    def text(length, max_new_tokens=2):
        tokens = list(range(length))
        after, logits, *_ = jaxkv.prefill(loop, None, cache, make_batch(tokens), ubatch_size=4)
        options = dict(max_new_tokens=max_new_tokens, seed=length, prompts=[tokens])
        state = init_state(after, logits=logits, **options, **picking)
        jaxkv.decode(loop, None, after, state, num_tokens=4, **picking)
        jaxkv.seq_rm(after, 0, length // 2)

    generation.warm_up(loop, None, cache, ubatch_size=4, longest=21)
    text(2, max_new_tokens=0)
    return lambda: [text(length) for length in range(1, 22)]


def a_token_more_than_a_ubatch():
    cache = Kind("pool", cells=23, sequences=4).make()  # planned by no other test
    generation.warm_up(forward, None, cache, ubatch_size=1, longest=2)
    return lambda: jaxkv.prefill(forward, None, cache, make_batch([1, 2]), ubatch_size=1)


WARMED: dict[str, Callable] = {
    "prompts-streams": partial(prompts, SPLIT),
    "prompts-hybrid": partial(prompts, kinds.TWO),
    "longest": run_longest,
    "two-ubatches": a_token_more_than_a_ubatch,
}


@pytest.mark.parametrize("what", mark_cases(WARMED, fast=["longest", "two-ubatches"]))
def test_warm_up_leaves_nothing_to_compile(what):
    use = WARMED[what]()
    with counting(traces=True) as heard:
        use()
    assert heard() == 0


@pytest.mark.parametrize("num_samples", [1, 2])
def test_first_generate_of_ragged_prompts_compiles_few_programs(num_samples):
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=num_samples)
    prompts, params = [[1] * length for length in (5, 1, 3)], jnp.float32(1)

    def model(params, step):
        x = jnp.ones((*step.valid.shape, 1, num_samples)) * params
        step, x = jaxkv.attend(step, 0, x, x, x)
        return step, jnp.tile(x.reshape(-1, num_samples)[step.outputs], 3)

    with counting() as compiled:
        options = dict(max_new_tokens=4, num_samples=num_samples)
        out = jaxkv.generate(model, params, prompts, spec=spec, **options)
    assert out.tokens.shape == (3 * num_samples, 4)
    assert compiled() <= (8 if num_samples == 1 else 11)
