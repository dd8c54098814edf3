"""Decoding: tokens, ends and reasons of each text, and the inputs of a draw."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation import Constraint, make_sampler
from tests.generation.tiny import BEST, assert_sound, decode, forward, init_state, last_of
from tests.helpers.caches import SMALL, SPLIT, VOCABULARY, fill_cache
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core


# Generates 1, 2, 3 and so on.
COUNTING = Constraint(
    first=0,
    allowed=lambda count: jnp.arange(VOCABULARY) == count,
    advance=lambda count, token: count + 1,
).constrain(BEST)


def test_init_decode_reads_lists_and_asks_nothing_of_empty_texts():
    stops = dict(sampler=BEST, stop_tokens=frozenset([1, 2]))
    first = generation.init_decode(fill_cache(2), logits=[[0.0, 2.0, 1.0]], **stops)
    assert first.tokens.tolist() == [[1]] and not first.state.active.any()
    for ids, limit in (([1], 3), ([0, 1], [0, 1])):  # sequence 1 has no logits
        options = dict(logits=jnp.zeros((len(ids), 5)), sampler=BEST, max_new_tokens=limit)
        state = init_state(fill_cache(0, 2), sequences=ids, **options)
        assert state.active.tolist() == [limit == 3] * len(ids)


def test_init_decode_pairs_rows_of_logits_with_their_sequences():
    prompts = make_batch([[1, 2], [3]], sequences=[1, 0])
    result = jaxkv.prefill(forward, None, fill_cache(0, 0), prompts)
    assert result.sequences.tolist() == [1, 0] and result.ok
    run = partial(init_state, result.cache, sampler=BEST)
    state, again = run(logits=result), run(logits=result.logits[::-1], sequences=[0, 1])
    assert state.sequence.tolist() == [1, 0]
    assert again.token.tolist() == state.token.tolist()[::-1]


@pytest.mark.parametrize("sampler", ["rule", "penalties"])
def test_init_decode_of_tokens_or_logits_counts_the_first_token(sampler):
    if sampler == "rule":
        rising = dict(allowed=lambda n: jnp.arange(VOCABULARY) > n, advance=lambda n, token: token)
        sampler = Constraint(first=-1, **rising).constrain(BEST)
    else:
        sampler = make_sampler(presence_penalty=9.0, frequency_penalty=2.0)
    result = jaxkv.prefill(forward, None, fill_cache(2, 1), make_batch([[3], [4]]))
    options = dict(sampler=sampler, prompts=[[3], [4]])
    first = generation.init_decode(result.cache, logits=result, **options)
    again = init_state(result.cache, tokens=first.tokens[:, 0], **options)
    run = partial(decode, result.cache, num_tokens=5, sampler=sampler)
    np.testing.assert_array_equal(run(again).tokens, run(first.state).tokens)


def test_start_draws_are_numbered_by_position():
    sampler = make_sampler(temperature=1.0)
    cache = fill_cache(3, 2)
    state = init_state(cache, tokens=[1, 2], seed=[7, 8], max_new_tokens=[4, 1])
    assert state.draw_index.tolist() == [4, 3]
    after, state, *_ = decode(cache, state, num_tokens=3, sampler=sampler)
    assert state.draw_index.tolist() == [7, 4]
    again = init_state(after, tokens=state.token, seed=[7, 8], max_new_tokens=[1, 0])
    assert again.draw_index.tolist() == [7, 4]
    run = partial(decode, after, num_tokens=3, sampler=sampler)
    np.testing.assert_array_equal(run(again).tokens, run(state).tokens)


def test_decode_in_pieces_has_logprobs_of_the_model():
    sampler = make_sampler(temperature=3.0, top_k=5, repeat_penalty=1.3, penalty_last_n=4)
    cache, logits, *_ = jaxkv.prefill(forward, None, fill_cache(), make_batch([1, 2, 3]))
    options = dict(seed=3, prompts=[[1, 2, 3]], max_new_tokens=7)
    _, state, *_ = first = generation.init_decode(cache, logits=logits, sampler=sampler, **options)
    pieces, now, rest = [first[2:4]], cache, state
    for _ in range(3):
        now, rest, *_ = picked = decode(now, rest, num_tokens=2, sampler=sampler)
        pieces.append(picked[2:4])
    whole = decode(cache, state, num_tokens=6, sampler=sampler)
    text, logprobs = (np.concatenate(one, axis=1)[0] for one in zip(*pieces, strict=True))
    np.testing.assert_array_equal(text[1:], whole.tokens[0])
    batch = make_batch([1, 2, 3, *text.tolist()], outputs=np.ones(len(text) + 3, bool))
    _, logits, *_ = jaxkv.prefill(forward, None, fill_cache(), batch)
    wanted = jax.nn.log_softmax(logits)[np.arange(2, len(text) + 2), text]
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def test_decode_ends_by_limit_or_own_stop_token():
    cache = fill_cache(1, 1, 1)
    options = dict(sequences=[2, 0, 1], max_new_tokens=[2, 9, 9], sampler=COUNTING)
    state = init_state(cache, tokens=[9, 8, 7], **options)
    run = dict(stop_tokens=[[-1, -1], [4, 2], [-1, 4]], num_tokens=3, sampler=COUNTING)
    none = [-1] * 3
    for wanted in ([[1, 2, -1], [1, 2, -1], [1, 2, 3]], [none, none, [4, -1, -1]], [none] * 3):
        cache, state, *_ = picked = decode(cache, state, **run)
        assert picked.tokens.tolist() == wanted
    assert last_of(cache, [2, 0, 1]) == [2, 2, 4]
    assert not state.active.any() and not state.reason.any()
    assert state.remaining.tolist() == [0, 7, 5]


@pytest.mark.parametrize("kind", mark_cases([SMALL, SPLIT], [SMALL]), ids=["pool", "streams"])
def test_decode_full_cache_ends_texts_without_room(kind):
    """Others continue, each as it would without the rest; in one pool, the first ones do."""
    cells = kind.cells
    counts = (2, cells - 2, 1) if kind is SPLIT else (1, cells - 6, 1)
    cache = fill_cache(*counts, kind=kind)
    state = init_state(cache, tokens=[1, 2, 3], max_new_tokens=6)
    after, state, *_ = picked = decode(cache, state, num_tokens=6)
    made = (picked.tokens >= 0).sum(axis=1).tolist()
    assert made == ([6, 2, 6] if kind is SPLIT else [2, 1, 1])
    assert state.reason.tolist() == ([0, 1, 0] if kind is SPLIT else [1, 1, 1])  # OUT_OF_CELLS
    assert not state.active.any()
    assert_sound(after)
    for seq in range(3):
        alone = init_state(cache, tokens=[seq + 1], sequences=[seq], max_new_tokens=made[seq])
        text = decode(cache, alone, num_tokens=6)
        assert text.tokens[0].tolist() == picked.tokens[seq].tolist()
        np.testing.assert_allclose(text.logprobs[0], picked.logprobs[seq], atol=1e-5)
