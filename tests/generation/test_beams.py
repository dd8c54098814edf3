"""Beam search: the same beams as a search that recomputes every text, on any cache."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from tests.generation.tiny import CLOSE, assert_sound, last_of, load_tiny
from tests.helpers.caches import VOCABULARY, Kind, run_model
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

POOL = Kind("pool", cells=30, sequences=5)
SPLIT = Kind("split", cells=16, sequences=5, streams=5)
PROMPT = (7, 3, 11, 5)
WIDTH, STEPS = 3, 5
FREE = jnp.zeros((VOCABULARY, VOCABULARY))
STOPS = [(4, 7, -1), (10, 15, -1), (2, 10, 13)]
NONE = (-1, -1, -1)


def forward(params, step):
    """A tiny transformer with nearly uniform logits, plus `[V, V]` biases by the last token."""
    step, logits = run_model(step)
    token = step.tokens.reshape(-1)[step.outputs]
    return step, jnp.roll(logits, 5, axis=1) / 8 + params[token]


def make_uncached_logits(forward, params, make):
    """Return a function that computes the logits after texts of one length, from an empty cache."""

    @jax.jit
    def run(params, cache, rows, length):
        place = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        batch = make_batch(rows, valid=place < length, outputs=place == length - 1)
        plan = jaxkv.init_batch(cache, batch)
        _, logits = forward(params, jaxkv.apply(cache, plan))
        return plan.gather_outputs([logits])

    def logits_after(texts, params=params):
        padded = np.zeros((WIDTH, len(PROMPT) + STEPS), np.int32)
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        return np.asarray(run(params, make(), padded, len(texts[0])))[: len(texts)]

    return logits_after


@functools.cache
def tiny():
    return make_uncached_logits(
        forward, FREE, Kind("", cells=16, sequences=WIDTH, streams=WIDTH).make
    )


def search_plainly(logits_after, *, num_tokens=STEPS, stop_tokens=(), length_penalty=1.0):
    """Beam search as the docstring of `beam` defines it: pairs of a text and its score."""

    def best(texts):
        ranked = sorted(texts, key=lambda one: -one[1] / len(one[0]) ** length_penalty)
        return ranked[:WIDTH]

    living, ended = [((), np.float32(0))], []
    for _ in range(num_tokens):
        if not living:
            break
        logits = logits_after([(*PROMPT, *text) for text, _ in living]).astype(np.float32)
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        candidates = [
            ((*text, token), score + logprobs[row, token])
            for row, (text, score) in enumerate(living)
            for token in range(logits.shape[1])
            if logits[row, token] > -np.inf
        ]
        candidates.sort(key=lambda one: -one[1])
        ended = best(ended + [one for one in candidates[:WIDTH] if one[0][-1] in stop_tokens])
        living = [one for one in candidates if one[0][-1] not in stop_tokens][:WIDTH]
    return best(ended + living)


def assert_found(beams, wanted):
    rows = zip(beams.tokens.tolist(), beams.lengths.tolist(), strict=True)
    texts = [(row[:length], set(row[length:])) for row, length in rows]
    assert [text for text, _ in texts] == [list(text) for text, _ in wanted]
    assert all(rest <= {-1} for _, rest in texts)
    np.testing.assert_allclose(beams.scores, [score for _, score in wanted], **CLOSE)


@functools.cache
def prefill_prompt(kind):
    return jaxkv.prefill(forward, FREE, kind.make(), make_batch(PROMPT))[:2]


search = partial(generation.beam, forward, FREE, num_beams=WIDTH, num_tokens=STEPS)


@pytest.mark.parametrize("kind", mark_cases([POOL, SPLIT], fast=[POOL]), ids=str)
def test_beam_matches_search_without_cache(kind):
    cache, logits = prefill_prompt(kind)
    for length_penalty, number in ((1.0, 0), (0.0, 1), (3.0, 2), (-1.0, 0), (0.0, 2), (1.0, 2)):
        options = dict(stop_tokens=STOPS[number], length_penalty=length_penalty)
        after, *_ = beams = search(cache, logits[0], **options)
        assert_found(beams, search_plainly(tiny(), **options))
        assert beams.reason == jaxkv.Reason.OK
        assert_sound(after)


@partial(jax.jit, static_argnums=0)
def step_logits(forward, params, cache, tokens, sequences):
    plan = jaxkv.plan_step(cache, tokens, sequences=sequences)
    _, logits = forward(params, jaxkv.apply(cache, plan))
    return logits, plan.ok


def assert_held(cache, beams, sequences, logits_after, forward=forward, params=FREE):
    """Each sequence has its reported cached length, and the logits of a recomputed text."""
    held, lengths = np.asarray(beams.num_cached), np.asarray(beams.lengths)
    assert (held < lengths).all() and (held >= 0).all()
    assert last_of(cache, sequences) == (len(PROMPT) - 1 + held).tolist()
    texts = np.asarray(beams.tokens)
    found, ok = step_logits(
        forward, params, cache, texts[np.arange(WIDTH), held], jnp.asarray(sequences)
    )
    wanted = [
        logits_after([(*PROMPT, *text[: count + 1])])[0]
        for text, count in zip(texts.tolist(), held.tolist(), strict=True)
    ]
    assert ok
    np.testing.assert_allclose(found, wanted, **CLOSE)


def make_crowded_cache(left):
    cache, logits = prefill_prompt(POOL)
    others = make_batch([1] * (POOL.cells - len(PROMPT) - left), sequences=4)
    return jaxkv.prefill(forward, FREE, cache, others)[0], logits


def test_beam_full_cache_ends_search():
    for num_tokens in range(STEPS - 1):
        after, *_ = beams = search(*make_crowded_cache(num_tokens * WIDTH), stop_tokens=NONE)
        assert beams.reason == jaxkv.Reason.OUT_OF_CELLS
        assert beams.lengths.tolist() == [num_tokens + 1] * WIDTH
        assert set(beams.num_cached.tolist()) == {num_tokens}
        assert_found(beams, search_plainly(tiny(), num_tokens=num_tokens + 1))
        assert_sound(after)
        assert_held(jaxkv.seq_rm(after, 4)[0], beams, [0, 1, 2], tiny())


def test_beam_ends_once_nothing_better_can_come():
    for length_penalty, reason in ((0.0, "OK"), (-1.0, "OK"), (1.0, "OUT_OF_CELLS")):
        options = dict(stop_tokens=STOPS[2], length_penalty=length_penalty)
        after, *_ = beams = search(*make_crowded_cache(0), **options)
        assert beams.reason == jaxkv.Reason[reason], length_penalty
        assert_found(beams, search_plainly(tiny(), num_tokens=1, **options))
        assert last_of(after, [0, 1, 2]) == [len(PROMPT) - 1] * WIDTH


def test_beam_text_that_left_the_window_is_not_held():
    """An ended text is cut to its common part with the last step, which the window has evicted."""
    kind = Kind("window", cells=4, sequences=2, streams=2, windows=(jaxkv.Window.sliding(3),))
    gone, options = 0, dict(num_beams=2, num_tokens=7, length_penalty=0.0)
    for stop in range(VOCABULARY):
        after, *_ = beams = search(*prefill_prompt(kind), stop_tokens=[stop], **options)
        held = np.asarray(beams.num_cached)
        assert last_of(after, [0, 1]) == np.where(held < 0, -1, len(PROMPT) + held - 1).tolist()
        gone += (held < 0).sum()
        assert jaxkv.init_batch(after, make_batch([[1], [1]])).ok  # both can continue or restart
    assert gone


def test_beam_fewer_texts_than_width():
    """Only 6 and 9 are allowed, and nothing after 9; the cells suffice for 6 6 6 6 and a 9."""
    cache, logits = make_crowded_cache(5)
    only = np.full((VOCABULARY, VOCABULARY), -np.inf, np.float32)
    only[:9, [6, 9]] = 0
    run = partial(generation.beam, forward, jnp.asarray(only), cache, logits[0] + only[0])
    anew = partial(tiny(), params=jnp.asarray(only))
    for stop_tokens, found in [(NONE, 2), ((9, -1, -1), 3)]:
        options = dict(stop_tokens=stop_tokens, length_penalty=0.0)
        after, *_ = beams = run(num_beams=WIDTH, num_tokens=STEPS, **options)
        wanted = search_plainly(anew, **options)
        none = [((), -np.inf)] * (WIDTH - found)
        assert len(wanted) == found
        assert_found(beams, wanted + none)
        assert beams.reason == jaxkv.Reason.OK
        assert last_of(after, range(WIDTH)) == (len(PROMPT) - 1 + beams.num_cached).tolist()
        assert_sound(after)


def test_beam_ends_where_powers_of_the_length_exceed_float32():
    """Normalised scores of two tokens or more are 0, so the ended 6 9, 6 6 9, 6 6 6 9 suffice.

    Two of the three beams are empty, and the cells suffice for 6 6 6.
    """
    cache, logits = make_crowded_cache(3)
    only = np.full((VOCABULARY, VOCABULARY), -np.inf, np.float32)
    only[6, [6, 9]] = only[:6, 6] = 0
    run = partial(generation.beam, forward, jnp.asarray(only), cache, logits[0] + only[0])
    options = dict(num_beams=WIDTH, num_tokens=STEPS, stop_tokens=(9, -1, -1))
    beams = run(length_penalty=200.0, **options)
    assert beams.reason == jaxkv.Reason.OK and beams.lengths.tolist() == [2, 3, 4]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "streams"),
    [
        ("llama_tied", 1),
        ("llama_tied", 4),
        ("granite_hybrid", 1),
        ("qwen3_next", 1),
        ("qwen3_5", 1),
        ("gemma4", 4),
        ("recurrent_gemma", 4),
    ],
)
def test_beam_of_a_model_matches_search_without_cache(name, streams):
    """Other sequences are left alone, and those of the beams may hold something before.

    States allow a rollback of one step, so ended texts may have no cached tokens.
    """
    model = load_tiny(name)
    make = partial(model.make_cache, cells=48, sequences=4, streams=streams)
    fresh = partial(model.make_cache, cells=16, sequences=WIDTH, streams=WIDTH)
    anew = make_uncached_logits(model.forward, model.params, fresh)
    run = model.forward, model.params
    cache, logits, *_ = jaxkv.prefill(*run, make(), make_batch(PROMPT, sequences=2))
    cache, *_ = jaxkv.prefill(*run, cache, make_batch([[5, 6, 7], [1, 2]], sequences=[0, 1]))
    options = dict(num_beams=WIDTH, num_tokens=STEPS, sequences=[2, 0, 3])
    after, *_ = beams = generation.beam(*run, cache, logits, **options)
    wanted = search_plainly(anew)
    assert_found(beams, wanted)
    assert_held(after, beams, [2, 0, 3], anew, *run)
    stop_tokens = (wanted[0][0][2], wanted[1][0][3])
    stops = dict(stop_tokens=stop_tokens, length_penalty=0.0)  # so that short texts are good
    after, *_ = beams = generation.beam(*run, cache, logits, **stops, **options)
    assert_found(beams, search_plainly(anew, **stops))
    held = np.asarray(beams.num_cached)
    assert last_of(after, [2, 0, 3]) == np.where(held < 0, -1, len(PROMPT) - 1 + held).tolist()
    ended = np.isin(beams.tokens, stop_tokens).any(axis=1)
    assert ended.any() and (held[~ended] == STEPS - 1).all() and min(held) < STEPS - 1
    if held.min() >= 0:
        assert_held(after, beams, [2, 0, 3], anew, *run)
    assert last_of(after, [1]) == [1]
    assert_sound(after)


def test_beams_of_fewer_than_2_31_extensions_are_traced():
    count, vocabulary = 2**16, 2**14  # 2**30 extensions
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=1)
    cache = jaxkv.make_cache(spec, cells=2, sequences=count)

    def model(params, step):
        x = jnp.zeros((*step.valid.shape, 1, 1))
        step, _ = jaxkv.attend(step, 0, x, x, x)
        return step, jnp.zeros((step.outputs.size, vocabulary))

    search = partial(generation.beam, model, None, num_beams=count, num_tokens=1)
    assert jax.eval_shape(search, cache, jnp.zeros(vocabulary)).scores.shape == (count,)
