"""Speculation in full caches, of ended texts, without an allowed token, and with wrong drafts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation import Constraint, make_sampler
from jaxkv.generation.speculative import token_tree
from jaxkv.generation.speculative.acceptance import _find_first_accepted, verify_branches
from jaxkv.generation.speculative.drafters import DraftTokens
from tests.generation.test_speculation import Known
from tests.generation.tiny import (
    BEST,
    decode,
    forward,
    init_state,
    last_of,
    list_texts,
    speculate,
    table_model,
)
from tests.helpers.caches import VOCABULARY, Kind, attention_cache, fill_cache, run_batch

pytestmark = pytest.mark.core
ROOMY = Kind("roomy", cells=48, sequences=4)
NEAR = Kind("near", cells=6, sequences=2, windows=(jaxkv.Window.sliding(3),))


def assert_as_decode(made, wanted):
    assert list_texts(made) == list_texts(wanted)
    for name in ("token", "active", "remaining", "reason", "draw_index"):
        found, expected = (getattr(out.state, name).tolist() for out in (made, wanted))
        assert found == expected, name
    jax.tree.map(
        np.testing.assert_array_equal, made.state.sampler_state, wanted.state.sampler_state
    )
    kept = [np.asarray(out.tokens >= 0) for out in (made, wanted)]
    np.testing.assert_allclose(
        np.asarray(made.logprobs)[kept[0]], np.asarray(wanted.logprobs)[kept[1]], atol=2e-4
    )
    assert last_of(made.cache, [0, 1]) == last_of(wanted.cache, [0, 1])
    assert made.cache.num_used_cells() == wanted.cache.num_used_cells()


RULE = dict(allowed=lambda s: jnp.arange(VOCABULARY) >= 16 * (s > 1), advance=lambda s, t: s + 1)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_speculate_without_an_allowed_token_ends_as_decode(count):
    """After `count` more tokens, no token is allowed."""
    cache, prompts = fill_cache(2, 3, kind=ROOMY), [[1, 2, 1], [5, 3, 5]]
    for temperature in (0.0, 1.0):
        sampler = make_sampler(temperature=temperature)
        sampler = Constraint(first=jnp.int32(1 - count), **RULE).constrain(sampler)
        state = init_state(cache, tokens=[1, 5], sampler=sampler, max_new_tokens=9)
        run = dict(num_tokens=4, sampler=sampler)
        wanted = decode(cache, state, **run)
        assert [len(text) for text in list_texts(wanted)] == [count, count]
        drafters = [Known.make(jnp.maximum(wanted.tokens, 0), wrong=False)]
        drafters += [generation.prompt_lookup(prompts, ngram=1, num_branches=2)]
        for drafter in drafters[: 2 if temperature == 0 else 1]:
            made = speculate(drafter, cache, state, **run)
            if temperature:  # other draws
                wanted = wanted._replace(tokens=made.tokens, logprobs=made.logprobs)
                wanted = wanted._replace(state=replace(wanted.state, token=made.state.token))
                assert [len(text) for text in list_texts(made)] == [count, count]
            assert_as_decode(made, wanted)


def test_speculate_in_a_full_cache_ends_as_decode():
    """A draft that does not fit is not counted; the text goes on without drafts."""
    cache = fill_cache(5, 4)  # 3 of 12 cells are free
    state = init_state(cache, tokens=[1, 5], max_new_tokens=[9, 1])
    wanted = decode(cache, state, num_tokens=6)
    assert wanted.state.reason.tolist() == [jaxkv.Reason.OUT_OF_CELLS, jaxkv.Reason.OK]
    free = jnp.pad(wanted.tokens, [(0, 0), (0, 3)])
    made = speculate(Known.make(free, wrong=False), cache, state, num_tokens=6)
    assert_as_decode(made, wanted)
    assert made.num_drafted.tolist() == made.num_accepted.tolist() == [0, 0]


def test_speculate_branches_in_a_full_cache_end_as_decode():
    cache = fill_cache(10)  # 2 of 12 cells are free
    state = init_state(cache, tokens=[1])
    wanted = decode(cache, state, num_tokens=6)
    assert wanted.state.reason.tolist() == [jaxkv.Reason.OUT_OF_CELLS]
    draft = generation.prompt_lookup([[1, 5, 6, 1, 7, 8]], ngram=1, num_branches=2)
    made = speculate(draft, cache, state, num_tokens=6)
    assert_as_decode(made, wanted)
    assert made.num_drafted.tolist() == [0]


@pytest.mark.parametrize("drafted", [[0], [0, 1]])
def test_speculate_in_a_window_near_full_goes_on_as_decode(drafted):
    """Each text needs three cells at a time; a draft of three tokens next to it does not fit."""
    cache = fill_cache(4, 3, kind=NEAR)
    state = init_state(cache, tokens=[1, 5], max_new_tokens=[9, 7])
    wanted = decode(cache, state, num_tokens=9)
    assert [len(text) for text in list_texts(wanted)] == [9, 7]
    free = jnp.full_like(wanted.tokens, -1).at[jnp.array(drafted)].set(wanted.tokens[drafted, :])
    made = speculate(Known.make(free, wrong=False), cache, state, num_tokens=9)
    assert_as_decode(made, wanted)


def test_speculate_limit_ends_in_a_draft_as_decode():
    cache = fill_cache(2, 2, kind=ROOMY)
    for limits in ([1, 2], [3, 4], [5, 0]):
        state = init_state(cache, tokens=[1, 5], max_new_tokens=limits)
        wanted = decode(cache, state, num_tokens=8)
        free = decode(cache, init_state(cache, tokens=[1, 5]), num_tokens=8).tokens
        made = speculate(Known.make(free, wrong=False), cache, state, num_tokens=8)
        assert_as_decode(made, wanted)
        assert (made.num_model_steps > 0).tolist() == [limit > 0 for limit in limits]


def propose_drafts(prompts, tokens, active=None, **options):
    """The valid drafts of `prompt_lookup` for each text, after its last token."""
    count = len(prompts)
    cache = fill_cache(*[1] * count, kind=ROOMY)
    state = init_state(cache, tokens=tokens)
    options = dict(num_draft_tokens=3, recent=16) | options
    drafter = generation.prompt_lookup(prompts, **options)
    active = jnp.ones(count, bool) if active is None else jnp.array(active, bool)
    _, draft = drafter.propose(BEST, state, active, jnp.ones(count, jnp.int32))
    shape = (count, options.get("num_branches", 1), 3)
    rows = np.where(draft.valid, draft.tokens, -1).reshape(shape).tolist()
    return [[[token for token in branch if token >= 0] for branch in text] for text in rows]


def test_prompt_lookup_proposes_what_followed_the_last_match_of_all_tokens():
    prompts = [[1, 2, 7, 8, 9, 3, 2, 4, 6, 1], [1, 2, 7, 5, 2, 6, 1], [3, 4, 5, 6], [4, 7, 7]]
    assert propose_drafts(prompts, [2, 2, 7, 7], ngram=2) == [[[7, 8, 9]], [[7, 5, 2]], [[]], [[7]]]
    assert propose_drafts(prompts, [2, 2, 7, 7], [1, 0, 1, 1], ngram=2)[:2] == [[[7, 8, 9]], [[]]]
    assert propose_drafts([[0, 6, 5, 0], [6]], [6, 6], ngram=2) == [
        [[5, 0, 6]],
        [[]],
    ]  # 0 is a token
    assert propose_drafts([[3, 4, 5, 6]], [7], ngram=2, recent=4) == [[[]]]


def test_prompt_lookup_branches_differ():
    prompts = [[1, 5, 6, 1, 7, 8, 1, 5, 6], [1, 5, 6, 1, 5, 6, 2]]
    found = propose_drafts(prompts, [1, 1], ngram=1, num_branches=3)
    assert found == [[[5, 6, 1], [7, 8, 1], []], [[5, 6, 2], [5, 6, 1], []]]


def test_draft_model_update_keeps_the_token_that_its_cache_lacks():
    fed = jnp.array([[7, 8, 9, 4]] * 4)
    cache = fill_cache(5, 5, 5, 3, kind=ROOMY)
    draft = generation.draft_model(forward, None, cache, batch_size=4, num_draft_tokens=3)
    at, counts = jnp.array([3, 3, 4, 4]), jnp.array([3, 2, 1, 0])
    after = draft.update(jnp.arange(4), at, fed, counts)
    assert after.cache.seq_pos_max([0, 1, 2, 3]).tolist() == [4, 4, 4, 2]
    assert after.unfed.tolist() == [9, -1, -1, -1]
    again = after.update(jnp.arange(1), jnp.array([6]), fed[:1], jnp.array([0]))
    assert again.unfed.tolist()[0] == 9  # nothing was fed


def test_tree_draft_model_says_what_decode_says():
    cache = fill_cache(3, 2, kind=ROOMY)
    state = init_state(cache, tokens=[1, 5], max_new_tokens=[6, 3])
    wanted = decode(cache, state, num_tokens=6)
    options = dict(num_branches=2, batch_size=2, num_draft_tokens=2)
    draft = generation.draft_model(forward, None, cache, **options)
    made = speculate(draft, cache, state, num_tokens=6)
    assert_as_decode(made, wanted)
    assert made.num_accepted.tolist() == [4, 2] and made.num_model_steps.tolist() == [2, 1]


def content_of_positions(cache):
    cells = zip(cache.cell_positions(0).tolist(), cache.table.content[0].tolist(), strict=True)
    return {position: content for position, content in cells if position >= 0}


@pytest.mark.parametrize("branch", [0, 1])
def test_tree_draft_model_keeps_the_branch_that_was_fed(branch):
    cache = fill_cache(3, kind=Kind("pair", cells=8, sequences=2))
    options = dict(num_branches=2, batch_size=1, num_draft_tokens=3)
    draft = generation.draft_model(forward, None, cache, **options)
    state = init_state(cache, tokens=[1])
    draft, guess = draft.propose(BEST, state, jnp.ones(1, bool), jnp.array([3]))
    fed = jnp.append(jnp.array([1]), guess.tokens[0, branch])
    for count in (2, 3):
        after = draft.update(jnp.arange(1), jnp.array([3]), fed[None], jnp.array([count]))
        expected, _ = run_batch(cache, make_batch(fed[:count]))
        assert content_of_positions(after.cache) == content_of_positions(expected)


@pytest.mark.parametrize("cells, fits", [(8, True), (3, False)])
def test_tree_draft_model_proposes_in_every_sequence_if_its_cache_has_cells(cells, fits):
    cache = fill_cache(3, kind=Kind("pair", cells=cells, sequences=2))
    options = dict(num_branches=2, batch_size=1, num_draft_tokens=2)
    draft = generation.draft_model(forward, None, cache, **options)
    _, guess = draft.propose(BEST, init_state(cache, tokens=[1]), jnp.ones(1, bool), jnp.array([3]))
    assert guess.valid.tolist() == [[[fits, fits]] * 2]


def test_branches_take_free_sequences_of_the_stream():
    cache = fill_cache(1, 0, 0, 0, 1, 1, 0, 1, kind=Kind("two", cells=8, sequences=8, streams=2))
    found = token_tree.assign_branch_sequences(cache.table, jnp.array([4, 0]), 3)
    assert found.tolist() == [[4, 6, 8], [0, 1, 2]]  # 8: none is left


def test_verified_branches_are_those_that_agree_with_the_text_so_far():
    """Branch 0 is rejected at its first token, so its second token is not offered."""
    none, certain = -jnp.inf, jnp.array([0.0, -jnp.inf, -jnp.inf])
    half = jnp.array([0.0, none, 0.0])
    logits = jnp.stack([certain[::-1], half, half, half, half])  # root, then branch by branch
    rows, tokens = 64, jnp.array([[[1, 0], [2, 2]]])
    drawn_from = jnp.broadcast_to(certain[::-1], (rows, 2, 2, 3))
    drawn_from = drawn_from.at[:, :, 0].set(jnp.array([none, 0.0, 0.0]))
    draft = DraftTokens(jnp.repeat(tokens, rows, axis=0), jnp.ones((rows, 2, 2), bool), drawn_from)
    cache = attention_cache(layers=1, kv_heads=1, head_dim=1, cells=8, sequences=rows)
    state = init_state(cache, tokens=[0] * rows, sequences=range(rows), seed=1)
    sampler, ok = make_sampler(temperature=1.0), jnp.ones(rows, bool)
    made, _, holds, _, branch = verify_branches(
        sampler, jnp.broadcast_to(logits, (rows, 5, 3)), draft, state, ok
    )
    assert (made[:, 0] == 2).all() and holds[:, 1].all() and (branch == 1).all()
    assert 16 < (made[:, 1] == 0).sum() < 48 and set(made[:, 1].tolist()) == {0, 2}


def test_verified_branches_of_a_greedy_sampler_have_its_tokens():
    """A drafter may return logits also for a sampler that draws nothing."""
    tokens, rows = jnp.array([[[0], [2]]]), 8
    draft = DraftTokens(
        jnp.repeat(tokens, rows, axis=0), jnp.ones((rows, 2, 1), bool), jnp.zeros((rows, 2, 1, 3))
    )
    cache = attention_cache(layers=1, kv_heads=1, head_dim=1, cells=8, sequences=rows)
    state = init_state(cache, tokens=[0] * rows, sequences=range(rows))
    logits = jnp.broadcast_to(jnp.array([0.0, 0.1, 0.0]), (rows, 3, 3))
    made, *_ = verify_branches(BEST, logits, draft, state, jnp.ones(rows, bool))
    assert (made[:, 0] == 1).all()


def test_tree_draft_model_with_fewer_tokens_than_branches_raises():
    cache = attention_cache(layers=1, kv_heads=1, head_dim=1, cells=32, sequences=8)
    cache, *_ = jaxkv.prefill(table_model, jnp.ones((4, 4)), cache, make_batch([1]))
    state = init_state(cache, tokens=[1])
    draft = generation.draft_model(table_model, jnp.ones((4, 4)), cache, num_branches=5)
    with pytest.raises(ValueError, match="at most as many branches as the 4 tokens"):
        generation.speculate(
            table_model, jnp.ones((4, 4)), cache, state, drafter=draft, num_tokens=2
        )


def test_rejected_drafts_leave_what_the_model_has_in_addition():
    """The first draft token has no chance: p becomes max(p - q, 0), and q loses the token."""
    p, q = jnp.array([[0.0, 0.5, 0.5]]), jnp.array([[0.6, 0.4, 0.0]])
    keys = jax.random.split(jax.random.key(0), 1)
    for asked, rest in (([True, False], [0.0, 1 / 6, 5 / 6]), ([False, False], [0.0, 0.5, 0.5])):
        accepted, logits = _find_first_accepted(
            jnp.log(p), jnp.array([[0, 1]]), jnp.array([asked]), jnp.log(q), keys
        )
        assert accepted.tolist() == [-1]
        np.testing.assert_allclose(jnp.exp(logits)[0], rest, atol=1e-6)
    same = jnp.log(jnp.array([[0.5, 0.5, 0.0]]))  # nothing is left of p, so all of it is
    options = dict(asked=jnp.array([[True]]), drawn_from=same, keys=keys)
    accepted, logits = _find_first_accepted(same, jnp.array([[2]]), **options)
    assert accepted.tolist() == [-1]
    np.testing.assert_allclose(jnp.exp(logits)[0], [0.5, 0.5, 0.0], atol=1e-6)
    asks = dict(asked=jnp.array([[True, True]]), drawn_from=jnp.log(q), keys=keys)
    certain = jnp.log(jnp.array([[0.0, 1.0, 0.0]]))
    accepted, _ = _find_first_accepted(certain, jnp.array([[0, 1]]), **asks)
    assert accepted.tolist() == [1]
    none = jnp.full((1, 3), -jnp.inf)
    accepted, logits = _find_first_accepted(none, jnp.array([[0, 1]]), **asks)
    assert accepted.tolist() == [-1] and (logits == -jnp.inf).all()
