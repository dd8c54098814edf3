"""Additional model inputs in loops: rotary positions of three axes, against recomputation."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.serving import MissReason
from jaxkv.serving.engine import Engine, Request
from jaxkv.serving.prefix_cache.store import PrefixStore
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch

pytestmark = pytest.mark.core

SPEC = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=12)
PARAMS = {
    "embed": jax.random.normal(jax.random.key(2), (16, 12)),
    "head": jax.random.normal(jax.random.key(52), (12, 16)),
}
FREQUENCIES = np.array([[[1.0, 0.7, 0.5, 0.3, 0.2, 0.1]]], np.float32)
LENGTH = 64


def inputs_of(offsets):
    """Offsets of the axes, and an array with an empty axis, which also passes through all loops."""
    return {"rope_offsets": offsets, "none": np.zeros((*offsets.shape[:-1], 2, 0), np.float32)}


def forward(params, step):
    """Predict tokens by one attention layer, whose heads have two frequencies for each axis."""
    assert step.extra["none"].shape == (*step.tokens.shape, 2, 0)
    positions = step.positions[..., None] + step.extra["rope_offsets"]
    angles = jnp.repeat(positions, 2, axis=-1) * FREQUENCIES
    x = params["embed"][step.tokens]
    low, high = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    rotated = jnp.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)
    step, out = jaxkv.attend(step, 0, *(y[:, :, None] for y in (rotated, rotated, x)))
    return step, (0.2 * x + out[:, :, 0]).reshape(-1, 12)[step.outputs] @ params["head"]


def image_prompt(before, size, after, seed):
    """A prompt with a `size` x `size` image: its tokens, and the offset of each axis."""
    tokens = np.random.default_rng(seed).integers(0, 16, before + size**2 + after).astype(np.int32)
    grid = np.indices((1, size, size)).reshape(3, -1).T + before
    text = np.arange(after)[:, None] + before + size  # after the largest position of the image
    axes = np.concatenate([np.arange(before)[:, None].repeat(3, 1), grid, text.repeat(3, 1)])
    return tokens, (axes - np.arange(len(tokens))[:, None]).astype(np.int32)


IMAGES = [image_prompt(3, 4, 2, 0), image_prompt(1, 2, 4, 1)]
PROMPTS = [tokens for tokens, _ in IMAGES]
OFFSETS = np.concatenate([offsets for _, offsets in IMAGES])
EXTRA = inputs_of(OFFSETS)
WIDTH = max(map(len, PROMPTS))
ROWS = np.stack([np.pad(x, (WIDTH - len(x), 0), constant_values=-1) for x in PROMPTS])
EXTRA_OF_ROWS = inputs_of(np.stack([np.pad(x, [(WIDTH - len(x), 0), (0, 0)]) for _, x in IMAGES]))


@jax.jit
def _logits_of(tokens, offsets, valid):
    cache = jaxkv.make_cache(SPEC, cells=LENGTH)
    batch = make_batch(tokens, valid=valid, outputs=valid, extra=inputs_of(offsets))
    return jaxkv.prefill(forward, PARAMS, cache, batch).logits


def logits_of(tokens, offsets):
    """Logits after each token, in a new cache; tokens after the prompt have its last offsets."""
    index = np.minimum(np.arange(LENGTH), len(offsets) - 1)
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits_of(padded, offsets[index], np.arange(LENGTH) < len(tokens)))


@functools.cache
def greedy_texts(num_tokens):
    texts = []
    for tokens, offsets in IMAGES:
        text = [*tokens]
        for _ in range(num_tokens):
            text.append(int(np.argmax(logits_of(text, offsets)[len(text) - 1])))
        texts.append(text[len(tokens) :])
    return texts


def logprobs_of(tokens, offsets, begin):
    logprobs = jax.nn.log_softmax(logits_of(tokens, offsets)[: len(tokens)])
    index = np.arange(begin - 1, len(tokens) - 1)
    return np.asarray(logprobs)[index, np.asarray(tokens[begin:])]


def generate(**options):
    options = dict(spec=SPEC, max_new_tokens=12, extra=EXTRA) | options
    return jaxkv.generate(forward, PARAMS, PROMPTS, **options)


def test_offsets_change_texts():
    plain = generate(extra=inputs_of(np.zeros_like(OFFSETS)))
    assert all(one != other for one, other in zip(plain.lists(), greedy_texts(12), strict=True))


def test_generate_continues_with_the_offsets_of_the_last_prompt_token():
    assert generate().lists() == greedy_texts(12)
    samples = generate(num_samples=2).lists()
    assert samples == [text for text in greedy_texts(12) for _ in range(2)]


def test_rows_with_padding_have_inputs_in_the_same_places():
    options = dict(spec=SPEC, max_new_tokens=12, extra=EXTRA_OF_ROWS)
    assert jaxkv.generate(forward, PARAMS, ROWS, **options).lists() == greedy_texts(12)


def prefill_prompts(**sizes):
    cache = jaxkv.make_cache(SPEC, cells=128, **sizes)
    result = jaxkv.prefill(forward, PARAMS, cache, make_batch(PROMPTS, extra=EXTRA))
    last = np.cumsum([*map(len, PROMPTS)]) - 1
    return result, inputs_of(OFFSETS[last])


def test_plan_step_passes_inputs_to_the_model():
    result, extra = prefill_prompts(sequences=2)
    cache, token = result.cache, np.argmax(result.logits, axis=1)
    texts = [token]
    for _ in range(4):
        plan = jaxkv.plan_step(cache, token, extra=extra)
        assert plan.ubatch.extra["rope_offsets"].shape == (1, 2, 3)
        cache, logits = generation.model_step(forward, PARAMS, cache, plan.ubatch)
        token = np.argmax(logits, axis=1)
        texts.append(token)
    assert np.stack(texts, axis=1).tolist() == [text[:5] for text in greedy_texts(12)]


def make_lookup():
    return generation.prompt_lookup(PROMPTS, ngram=1, num_draft_tokens=3)


@pytest.mark.parametrize("branches", [0, 1, 2])
def test_drafts_have_the_inputs_of_their_sequence(branches):
    result, extra = prefill_prompts(sequences=4 if branches else 2)
    drafter = make_lookup()
    if branches:
        drafter = generation.draft_model(
            forward, PARAMS, result.cache, batch_size=2, num_draft_tokens=3, num_branches=branches
        )
    state = generation.init_decode(result.cache, logits=result, extra=extra).state
    out = generation.speculate(forward, PARAMS, result.cache, state, drafter=drafter, num_tokens=11)
    assert out.lists() == [text[1:] for text in greedy_texts(12)]
    if branches == 1:  # the draft model is the model
        assert out.num_accepted.sum() == out.num_drafted.sum() > 0
    assert out.num_accepted.sum() >= 6 * (branches > 0)


def test_beam_scores_are_those_of_recomputation():
    cache = jaxkv.make_cache(SPEC, cells=64, sequences=2)
    tokens, offsets = IMAGES[0]
    batch = make_batch(tokens, extra=inputs_of(offsets))
    cache, logits, *_ = jaxkv.prefill(forward, PARAMS, cache, batch)
    options = dict(num_beams=2, num_tokens=5, extra=inputs_of(offsets[-1]))
    out = generation.beam(forward, PARAMS, cache, logits, **options)
    for text, found in zip(np.asarray(out.tokens), out.scores, strict=True):
        known = logprobs_of([*tokens, *text.tolist()], offsets, len(tokens))
        np.testing.assert_allclose(found, known.sum(), atol=1e-4)


@pytest.mark.parametrize("is_traced", [False, True])
def test_score_equals_sampling_and_shares_only_equal_inputs(is_traced):
    tokens, offsets = image_prompt(2, 4, 3, 5)
    shifted = offsets + np.array([[0, 1, 2]], np.int32)
    prompts = np.stack([tokens, tokens])
    extra = inputs_of(np.stack([offsets, shifted]))
    texts = np.random.default_rng(2).integers(0, 16, (4, 6)).astype(np.int32)

    def score(texts, prompts, extra):
        return jaxkv.score(forward, PARAMS, texts, prompts=prompts, extra=extra, spec=SPEC)

    found = (jax.jit(score) if is_traced else score)(texts, prompts, extra)
    whole = np.concatenate([prompts.repeat(2, axis=0), texts], axis=1)
    known = [
        logprobs_of(text.tolist(), extra["rope_offsets"][i // 2], len(tokens))
        for i, text in enumerate(whole)
    ]
    np.testing.assert_allclose(found, known, atol=1e-5)
    # Without prompts, the inputs are those of the texts.
    index = np.minimum(np.arange(whole.shape[1]), len(tokens) - 1)
    whole_extra = inputs_of(extra["rope_offsets"].repeat(2, axis=0)[:, index])
    alone = (jax.jit(score) if is_traced else score)(whole, None, whole_extra)
    np.testing.assert_allclose(alone[:, len(tokens) :], known, atol=1e-5)


def make_engine(**options):
    sizes = dict(cells=options.pop("cells", 256), sequences=6)
    cache = jaxkv.make_cache(SPEC, **sizes)
    defaults = inputs_of(np.zeros(3, np.int32))
    return Engine(forward, PARAMS, cache, extra=defaults, prefill_chunk=8, **options)


def requests():
    return [
        Request(prompt=tokens, max_new_tokens=12, extra=inputs_of(offsets))
        for tokens, offsets in IMAGES
    ]


ENGINES = [{}, {"prefix_sequences": [5]}, {"cells": 48, "reserve": False, "tokens_per_step": 2}]


@pytest.mark.parametrize(
    "options", mark_cases(ENGINES, core=ENGINES[1:]), ids=["plain", "store", "preempted"]
)
def test_engine_generates_with_inputs(options):
    engine = make_engine(**options)
    outputs = engine.generate([*requests(), Request(prompt=PROMPTS[0], max_new_tokens=4)])
    assert [output.tokens.tolist() for output in outputs[:2]] == greedy_texts(12)
    zeros = np.zeros_like(IMAGES[0][1])
    plain = [*PROMPTS[0]]
    for _ in range(4):
        plain.append(int(np.argmax(logits_of(plain, zeros)[len(plain) - 1])))
    assert outputs[2].tokens.tolist() == plain[len(PROMPTS[0]) :]


def test_store_forks_only_prefixes_with_equal_inputs():
    engine = make_engine(prefix_sequences=[4, 5])
    engine.warm_up()
    first, later = requests()[0], (np.arange(len(PROMPTS[0])) >= 9).astype(np.int32)
    moved = replace(first, extra=inputs_of(IMAGES[0][1] + later[:, None]))
    engine.generate([first])
    asked = [first, moved, Request(prompt=PROMPTS[0], max_new_tokens=1)]
    again, other, text = engine.generate(asked)
    assert again.prefix_hit.length == 20 and again.prefix_hit.miss is MissReason.NONE
    assert again.tokens.tolist() == greedy_texts(12)[0]
    assert other.prefix_hit.length == 9 and text.prefix_hit.length == 4


MIXES = [(traced, rows) for traced in ("texts", "prompts", "extra") for rows in (False, True)]


@pytest.mark.parametrize(("traced", "are_rows"), mark_cases(MIXES, core=MIXES[1:2]))
def test_score_takes_traced_and_concrete_arguments_together(traced, are_rows):
    texts = np.random.default_rng(3).integers(0, 16, (2, 5)).astype(np.int32)
    arguments = {"texts": texts, "prompts": PROMPTS, "extra": EXTRA}
    if are_rows or traced == "prompts":
        arguments |= {"prompts": ROWS, "extra": EXTRA_OF_ROWS}

    def score(argument):
        return jaxkv.score(forward, PARAMS, spec=SPEC, **arguments | {traced: argument})

    known = [
        logprobs_of([*tokens.tolist(), *text.tolist()], offsets, len(tokens))
        for (tokens, offsets), text in zip(IMAGES, texts, strict=True)
    ]
    np.testing.assert_allclose(jax.jit(score)(arguments[traced]), known, atol=1e-5)


def test_score_with_traced_inputs_takes_empty_texts():
    def score(offsets):
        options = dict(prompts=PROMPTS, extra=inputs_of(offsets), spec=SPEC)
        return jaxkv.score(forward, PARAMS, [[], [3, 1, 4]], **options)

    known = np.asarray(score(OFFSETS))[:, :3]
    np.testing.assert_allclose(jax.jit(score)(OFFSETS), known, atol=1e-5)


def embed_forward(params, step):
    """Predict tokens without additional inputs."""
    x = params["embed"][step.tokens]
    step, out = jaxkv.attend(step, 0, *(x[:, :, None] for _ in range(3)))
    return step, out[:, :, 0].reshape(-1, 12)[step.outputs] @ params["head"]


@pytest.mark.parametrize(
    "stored, other, length",
    [
        (np.full(6, np.nan, np.float32), np.full(6, np.nan, np.float32), 5),
        (np.zeros(6, np.float32), np.float32([0, 0, -0.0, 0, 0, 0]), 2),
        (np.full(6, 0.1), np.full(6, 0.1, np.float32), 5),
        (np.zeros(6, np.int8), np.zeros(6, bool), 0),
        (np.zeros((6, 2), jnp.bfloat16), np.zeros((6, 2), jnp.bfloat16), 5),
        (np.zeros((6, 3), np.int32), np.zeros((6, 2), np.int32), 0),
        (np.zeros((6, 1), np.int32), np.zeros((6, 3), np.int32), 0),
        (np.zeros((6, 2, 0), np.float32), np.zeros((6, 2, 0), np.float32), 5),
        (np.zeros((6, 0), np.float32), np.zeros((6, 1), np.float32), 0),
    ],
)
def test_store_compares_dtypes_shapes_and_bits_of_inputs(stored, other, length):
    cache, tokens = jaxkv.make_cache(SPEC, cells=16, sequences=3), np.arange(6)
    store = PrefixStore(cache, sequences=[2])
    cache = apply_batch(cache, tokens, extra={"x": stored})
    cache, store, hit = store.store(cache, tokens, 0, extra={"x": stored})
    assert hit.length == 6
    assert store.store(cache, tokens, 0, extra={"x": stored}).store.prompts == store.prompts
    assert store.fork(cache, tokens, 1, extra={"x": other}).hit.length == length
    assert store.fork(cache, tokens[:1], 1, extra={"x": other[:1]}).hit.length == 0


def test_with_prompts_takes_additional_inputs():
    cache, tokens = jaxkv.make_cache(SPEC, cells=16, sequences=3), np.arange(6)
    store, extra = PrefixStore(cache, sequences=[2]), {"x": np.arange(6, dtype=np.int32)}
    cache = apply_batch(cache, tokens, sequences=2, extra=extra)
    loaded = store.with_prompts({2: tokens}, extra={2: extra})
    assert loaded.fork(cache, tokens, 1, extra=extra).hit.length == 5
    assert store.with_prompts({2: tokens}).fork(cache, tokens, 1).hit.length == 0
    with pytest.raises(ValueError, match="expected sequences of the store"):
        store.with_prompts({2: tokens}, extra={1: extra})


def test_engine_with_a_store_takes_prompts_of_one_token():
    engine = make_engine(prefix_sequences=[5])
    one = Request(prompt=[3], max_new_tokens=2)
    (first,), (again,) = engine.generate([one]), engine.generate([one])
    assert first.tokens.tolist() == again.tokens.tolist()


def test_engine_takes_default_floats_of_python():
    cache = jaxkv.make_cache(SPEC, cells=16)
    engine = Engine(embed_forward, PARAMS, cache, extra={"x": 1.0})
    request = Request(prompt=[1, 2], max_new_tokens=1, extra={"x": jnp.ones(2)})
    assert engine.generate([request])[0].tokens.size == 1


def beams(extra):
    return generation.beam(
        forward, PARAMS, EMPTY, np.zeros(16), num_beams=2, num_tokens=2, extra=extra
    )


EMPTY = jaxkv.make_cache(SPEC, cells=8, sequences=2)
NAMES = dict(cache=EMPTY, make_engine=make_engine, Request=Request, generate_images=generate)
NAMES |= dict(forward=forward, PARAMS=PARAMS, SPEC=SPEC, beams=beams, Engine=Engine)


@pytest.mark.parametrize("call, outcome", mistakes("extra"))
def test_wrong_inputs_raise(call, outcome):
    assert_raises(call, outcome, NAMES)
