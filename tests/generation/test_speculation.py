"""Speculation: the same texts as a plain loop, or equally distributed draws, in fewer steps."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation import Constraint, make_sampler
from jaxkv.generation.speculative import token_tree
from jaxkv.generation.speculative.drafters import DraftTokens
from tests.generation import tiny
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
from tests.helpers.caches import SMALL, SPLIT, VOCABULARY, Kind, attention_cache, fill_cache
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core
HELD = [((),), ((1,),), ((2, 4),)]
WAYS_TO_DRAW = [("lookup", 1.0), ("model", 0.6), ("tree", 1.0)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Known(generation.Drafter):
    tokens: jax.Array
    start: jax.Array
    num_draft_tokens: int = field(default=3, metadata={"static": True})

    @property
    def batch_size(self):
        return len(self.start)

    @classmethod
    def make(cls, tokens, *, wrong=True):
        """Draft the tokens of the true text, every third one wrong."""
        if wrong:
            tokens = jnp.where(jnp.arange(tokens.shape[1])[None] % 3 == 2, 0, tokens)
        return cls(jnp.pad(tokens, [(0, 0), (0, 3)]), jnp.zeros(len(tokens), jnp.int32))

    def propose(self, sampler, state, active, at):
        where = self.start[:, None] + jnp.arange(3)[None]
        tokens = jnp.take_along_axis(self.tokens, where, axis=1)
        valid = active[:, None] & (tokens >= 0)
        return self, DraftTokens(tokens, jnp.cumprod(valid, axis=1) > 0, None)

    def update(self, sequences, at, fed, taken, features):
        return replace(self, start=self.start + taken)


def test_nodes_of_branches_with_a_common_prefix_are_shared():
    tokens = jnp.array([[[5, 6, 7], [5, 6, 8], [5, 9, 7]]])
    nodes = token_tree.find_tree_nodes(DraftTokens(tokens, jnp.ones(tokens.shape, bool), None))
    np.testing.assert_array_equal(nodes.first[0], [[1, 1, 1], [0, 0, 1], [0, 1, 1]])
    np.testing.assert_array_equal(nodes.owns[0, 0], [[1, 1, 1], [1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("kind", mark_cases([SMALL, SPLIT], [SPLIT]), ids=["pool", "streams"])
def test_speculate_ends_texts_as_decode_does(kind):
    prompts = jaxkv.prefill(forward, None, kind.make(), make_batch([[1, 2, 1], [3]]))
    cache = prompts.cache
    for max_new_tokens in ([9, 2], [3, 9], [9, 9]):
        state = init_state(cache, logits=prompts, sampler=BEST, max_new_tokens=max_new_tokens)
        free = decode(cache, state, [-1], num_tokens=8)
        for stop_tokens in ([-1], [int(free.tokens[0, 2])]):
            wanted = decode(cache, state, stop_tokens, num_tokens=8)
            pieces = [speculate(Known.make(free.tokens), cache, state, stop_tokens, num_tokens=4)]
            before = pieces[0].drafter, pieces[0].cache, pieces[0].state
            pieces.append(speculate(*before, stop_tokens, num_tokens=4))
            found = [sum(both, []) for both in zip(*map(list_texts, pieces), strict=True)]
            assert found == list_texts(wanted)
            for name in ("reason", "active", "remaining"):
                now, then = (getattr(out.state, name).tolist() for out in (pieces[1], wanted))
                assert now == then
            assert last_of(pieces[1].cache, [0, 1]) == last_of(wanted.cache, [0, 1])


def test_speculate_sampler_follows_only_accepted_tokens():
    prompts = [[1, 2, 1, 2], [3, 4, 3, 4]]
    length_penalty = make_sampler(repeat_penalty=1.5, penalty_last_n=6)
    odd = dict(allowed=lambda s: jnp.arange(VOCABULARY) % 2 == s, advance=lambda s, t: 1 - t % 2)
    rule = Constraint(first=0, **odd).constrain(length_penalty)
    cache, logits, ids, *_ = jaxkv.prefill(forward, None, SMALL.make(), make_batch(prompts))
    state = init_state(cache, logits=logits, sampler=rule, sequences=ids, prompts=prompts)
    wanted = decode(cache, state, num_tokens=2, sampler=rule)
    draft = generation.prompt_lookup(prompts, ngram=1)
    made = speculate(draft, cache, state, num_tokens=2, sampler=rule)
    assert list_texts(made) == list_texts(wanted)
    seen = made.state.sampler_state, wanted.state.sampler_state
    jax.tree.map(np.testing.assert_array_equal, *seen)


@pytest.mark.parametrize("num_branches", mark_cases([1, 2], fast=[1]))
def test_speculate_nan_logit_of_hidden_token_ends_text(num_branches):
    params = (jnp.roll(jnp.eye(4), 1, axis=1) + 0.01).at[3, 0].set(jnp.nan)
    prompt, rule = [1, 2, 3, 1], dict(allowed=lambda s: jnp.arange(4) > s, advance=lambda s, t: s)
    hiding = Constraint(first=0, **rule).constrain(BEST)
    cache = attention_cache(layers=1, kv_heads=1, head_dim=1, cells=64, sequences=4)
    cache, logits, *_ = jaxkv.prefill(table_model, params, cache, make_batch(prompt))
    state = init_state(cache, logits=logits, sampler=hiding)
    draft = generation.prompt_lookup([prompt], num_branches=num_branches, ngram=1)
    options = dict(drafter=draft, num_tokens=6, sampler=hiding)
    made = generation.speculate(table_model, params, cache, state, **options)
    assert made.tokens[0].tolist() == [3, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("kind, temperature", mark_cases(WAYS_TO_DRAW, fast=WAYS_TO_DRAW[:1]))
def test_speculate_draws_have_chances_of_the_model(kind, temperature):
    count, rounds, each = 256, 16, 1 + (kind == "tree")
    sampler, cache = make_sampler(temperature=temperature), tiny.table_cache(count, each=each)
    found = np.zeros((4, 4, 4))
    for seed in range(rounds):
        begin = dict(sequences=np.arange(0, each * count, each), seed=seed, max_new_tokens=3)
        state = init_state(cache, tokens=[0] * count, **begin)
        if kind == "lookup":
            options = dict(ngram=1, num_draft_tokens=2, recent=8)
            draft = generation.prompt_lookup([[0, 1, 2, 0, 1, 3]] * count, **options)
        else:
            options = dict(num_branches=each, batch_size=count, num_draft_tokens=2)
            draft = generation.draft_model(table_model, tiny.CHANCES[1], cache, **options)
        run = dict(drafter=draft, num_tokens=3, sampler=sampler)
        made = generation.speculate(table_model, tiny.CHANCES[0], cache, state, **run)
        np.add.at(found, tuple(np.asarray(made.tokens).T), 1)
        assert 0 < made.num_accepted.sum() < made.num_drafted.sum()
    tiny.assert_chances(found, count * rounds, temperature)


@pytest.mark.parametrize(("num_branches", "ngram"), mark_cases([(1, 9), (2, 1)], [(2, 1)]))
def test_speculate_lookup_draws_what_decode_draws(num_branches, ngram):
    """Also without matches; a tree leaves every draw unchanged, on any branch."""
    sampler, cache = make_sampler(temperature=1.0), tiny.table_cache(64, each=num_branches)
    ids = np.arange(0, 64 * num_branches, num_branches)
    state = init_state(cache, tokens=[0] * 64, sequences=ids, seed=3, max_new_tokens=8)
    run = table_model, tiny.CHANCES[0], cache, state
    wanted = jaxkv.decode(*run, num_tokens=8, sampler=sampler)
    options = dict(ngram=ngram, num_draft_tokens=2, recent=16, num_branches=num_branches)
    draft = generation.prompt_lookup([[0, 1, 2, 0, 1, 3]] * 64, **options)
    made = generation.speculate(*run, drafter=draft, num_tokens=8, sampler=sampler)
    assert list_texts(made) == list_texts(wanted)
    wrong = made.num_drafted.sum() - made.num_accepted.sum()
    assert wrong > 0 if num_branches == 2 else not made.num_drafted.any()


def test_speculate_guess_that_ends_a_text_is_accepted():
    cache = fill_cache(3)
    state = init_state(cache, tokens=[1])
    free = decode(cache, state, num_tokens=4).tokens[:, :3]
    for stop in (tokens := free[0].tolist()):
        made = speculate(Known.make(free, wrong=False), cache, state, [stop], num_tokens=4)
        assert made.num_model_steps.tolist() == [1] and made.num_drafted.tolist() == [3]
        assert made.num_accepted.tolist() == [tokens.index(stop) + 1] == [len(list_texts(made)[0])]


@pytest.mark.parametrize(
    "held", mark_cases(HELD, HELD[2:]), ids=["empty", "short", "other sequence"]
)
def test_draft_model_of_another_text_guesses_nothing(held):
    cache = fill_cache(4)
    state = init_state(cache, tokens=[1])
    wanted = decode(cache, state, num_tokens=4)
    draft = generation.draft_model(forward, None, fill_cache(*held))
    made = speculate(draft, cache, state, num_tokens=4)
    assert list_texts(made) == list_texts(wanted)
    assert made.num_drafted.tolist() == [0] and made.num_model_steps.tolist() == [4]


def negate_some(params, step):
    step, logits = forward(params, step)
    sequences = step.sequences.reshape(-1)[step.outputs]
    return step, jnp.where(sequences[:, None] == 0, logits, -logits)


@pytest.mark.nightly
def test_draft_model_goes_on_where_a_text_pauses():
    cache = fill_cache(2, 3, kind=Kind("roomy", cells=48, sequences=2))
    draft = generation.draft_model(negate_some, None, cache, batch_size=2, num_draft_tokens=3)
    state = init_state(cache, tokens=[1, 5])
    plain = decode(cache, state, num_tokens=16)
    pieces, turns = [], 0
    for _ in range(4):
        made = speculate(draft, cache, state, num_tokens=4)
        cache, state, draft = made.cache, made.state, made.drafter
        pieces.append(made.tokens)
        turns += made.num_model_steps
        own = draft.cache.seq_pos_max([0, 1]) + (draft.unfed >= 0)
        assert own.tolist() == last_of(cache, [0, 1])
    assert np.concatenate(pieces, axis=1).tolist() == plain.tokens.tolist()
    assert turns.tolist() == [4, 16]
