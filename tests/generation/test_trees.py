"""Trees of guesses: the texts of a plain loop, in fewer steps than with a single branch."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from jaxkv.loops import trees
from jaxkv.loops.sampling import make_sampler
from tests.generation.test_speculation import BEST, CHANCES, by_table, forward, load, plainly, texts
from tests.generation.test_speculation_weights import PROMPTS as SENTENCES
from tests.memories import SMALL, SPLIT

PROMPTS = [[7, 3, 11, 5, 7, 3, 9, 5, 7, 3], [2, 9, 13, 2, 9, 4, 2, 9]]


# ------------------------------------------------------------------------------- without a memory


def test_what_branches_begin_with_alike_is_computed_once():
    tokens = jnp.array([[[5, 6, 7], [5, 6, 8], [5, 9, 7], [4, 6, 7]]])
    guess = loops.Guess(tokens, jnp.ones(tokens.shape, bool).at[0, 0, 2].set(False), None)
    nodes = jax.jit(trees.nodes_of)(guess)
    first = [[1, 1, 0], [0, 0, 1], [0, 1, 1], [1, 1, 1]]
    assert np.asarray(nodes.first[0]).astype(int).tolist() == first
    owners = np.asarray(nodes.owns[0]).astype(int).tolist()
    assert owners[0] == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert owners[2] == [[1, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 0]]


def test_mistakes_are_named():
    cases = [
        (lambda: loops.lookup([[1]], branches=0), "wanted branches of at least 1, got 0"),
        (lambda: told(SMALL.make(), [5, 6]), "each of 2 branches of 2 texts, .* got 3 sequences"),
        (lambda: told(SPLIT.make(), [5]), "got 3 sequences in 3 streams"),
        (
            lambda: told(load("granite_hybrid").make_memory(cells=8, rollback=3, sequences=2), [5]),
            "of attention alone for branches=2, since a state belongs to one text, got hybrid",
        ),
        (
            lambda: loops.draft_tree(forward, None, SMALL.make(), texts=2),
            "wanted the draft's memory with a sequence for each of 2 branches of 2 texts",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def told(memory, tokens):
    draft = loops.lookup([[1]] * len(tokens), branches=2)
    return loops.speculate(forward, draft, BEST, None, memory, loops.start(memory, tokens), steps=1)


# ----------------------------------------------------------------------------------- with a memory


def begun(name, *, sampler=BEST, sequences=(0, 1), limit=24, **options):
    """A model, its memory after the prompts, and how far these have come."""
    model = load(name)
    memory = model.make_memory(**{"cells": 160, "sequences": 6} | options)
    batch = make_batch(PROMPTS, sequences=[*sequences])
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, batch)
    options = {"limit": limit, "sequences": [*sequences], "prompts": PROMPTS}
    return model, memory, loops.begin(sampler, memory, logits, **options)[0]


def guessing(model, draft, memory, state, *, sampler=BEST, steps=24):
    run = partial(loops.speculate, model.forward, draft, sampler, model.weights)
    return run(memory, state, steps=steps)


def nearly(model):
    """Weights that say nearly the same."""
    noise = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: x + 0.05 * noise.normal(size=x.shape).astype(x.dtype), model.weights
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "streams", "ids", "kind"),
    [("gemma3", 2, (2, 4), "lookup"), ("llama_tied", 1, (3, 0), "model")],
    ids=["groups of windows", "model"],
)
def test_texts_are_those_of_a_plain_loop_in_fewer_steps(name, streams, ids, kind):
    model, memory, state = begun(name, streams=streams, sequences=ids)
    after, ended, wanted = plainly(model, memory, state)
    if kind == "lookup":
        tree, most = loops.lookup(PROMPTS, ngram=1, branches=3), 24 + 24
    else:
        own, _ = jaxkv.prefill(
            model.forward,
            nearly(model),
            model.make_memory(cells=160, sequences=6),
            make_batch(PROMPTS, sequences=[*ids]),
        )
        chain = loops.draft_model(model.forward, nearly(model), own, texts=2)
        most = guessing(model, chain, memory, state)[3].turns.sum()
        tree = loops.draft_tree(model.forward, nearly(model), own, texts=2, branches=3)
    found, now, draft, made = guessing(model, tree, memory, state)
    assert texts(made) == texts(wanted) and made.turns.sum() < most
    assert (made.turns + made.accepted).tolist() == [len(text) for text in texts(made)]
    np.testing.assert_allclose(made.logprobs, wanted.logprobs, atol=2e-4)
    assert now.token.tolist() == ended.token.tolist() and not now.active.any()
    for one in (found, getattr(draft, "memory", found)):  # nothing is left of the branches
        ends = [jaxkv.seq_pos_max(each, [*range(6)]).tolist() for each in (one, after)]
        assert ends[0] == ends[1] and jaxkv.used(one) == jaxkv.used(after)
        assert not sum(map(int, jaxkv.check_invariants(one).values()))


@pytest.mark.core
def test_sequences_that_hold_something_are_left_alone_and_full_memories_end_texts_alike():
    """Of three branches there is room for two; and the cells end in the middle of a guess."""
    model, memory, state = begun("llama_tied", cells=45, sequences=(0, 1))
    kept = make_batch([[1], [2], [3]], sequences=[2, 4, 5])
    memory, _ = jaxkv.prefill(model.forward, model.weights, memory, kept)
    after, ended, wanted = plainly(model, memory, state)
    assert wanted.tokens.min() < 0  # it ends early
    draft = loops.lookup(PROMPTS, ngram=1, branches=3)
    found, now, _, made = guessing(model, draft, memory, state)
    assert now.reason.tolist() == ended.reason.tolist() and made.accepted.sum() > 0
    for got, whole in zip(texts(made), texts(wanted), strict=True):  # who gets the last cells
        assert got[: len(whole)] == whole[: len(got)]
    assert jaxkv.seq_pos_max(found, [2, 3, 4, 5]).tolist() == [0, -1, 0, 0]


def table_memory(count):
    """A memory of `by_table`, in which each text has a stream with a sequence to branch."""
    memory = jaxkv.make_kv_cache(
        layers=1, cells=16, kv_heads=1, head_dim=1, sequences=2 * count, streams=count
    )
    ids = np.arange(0, 2 * count, 2)
    batch = make_batch([[0]] * count, sequences=ids)
    return jaxkv.prefill(by_table, CHANCES[0], memory, batch)[0], ids


@pytest.mark.core
def test_branches_that_are_looked_up_leave_every_draw_as_it_is():
    """A token is drawn as it would be, and followed where a branch offers it; also in a program."""
    sampler, (memory, ids) = make_sampler(temperature=1.0), table_memory(64)
    state = loops.start(memory, [0] * 64, ids, seed=3, limit=8)
    wanted = jaxkv.decode(by_table, sampler, CHANCES[0], memory, state, steps=8)[2]
    draft = loops.lookup([[0, 1, 2, 0, 1, 3]] * 64, ngram=1, tries=2, recent=16, branches=2)
    run = jax.jit(partial(loops.speculate, by_table, steps=8))
    made = run(draft, sampler, CHANCES[0], memory, state)[3]
    assert texts(made) == texts(wanted)
    assert 0 < made.accepted.sum() < made.tried.sum()


@pytest.mark.nightly
def test_draws_with_branches_of_a_model_have_the_distribution_of_the_model():
    """Chi-square over all texts of three tokens; 4,096 texts, so that what is likely shows."""
    count, rounds = 256, 16
    sampler, (memory, ids) = make_sampler(temperature=1.0), table_memory(count)
    found = np.zeros((4, 4, 4))
    for seed in range(rounds):
        state = loops.start(memory, [0] * count, ids, seed=seed, limit=3)
        draft = loops.draft_tree(by_table, CHANCES[1], memory, texts=count, tries=2)
        made = loops.speculate(by_table, draft, sampler, CHANCES[0], memory, state, steps=3)[3]
        np.add.at(found, tuple(np.asarray(made.tokens).T), 1)
        assert 0 < made.accepted.sum() < made.tried.sum()
    chances = CHANCES[0] / CHANCES[0].sum(axis=1, keepdims=True)
    wanted = count * rounds * chances[0][:, None, None] * chances[:, :, None] * chances[None]
    statistic = ((found - wanted) ** 2 / wanted).sum()
    assert statistic < 106  # the 99.95 % point of 63 degrees of freedom is 106.4


@pytest.mark.nightly
def test_real_weights_go_on_alike(smollm2):
    tokens = [smollm2.tokenizer.prompt(SENTENCES[i]) for i in (2, 4, 10)]
    memory = smollm2.make_memory(sequences=9, cells=512)
    memory, logits = jaxkv.prefill(smollm2.forward, smollm2.weights, memory, make_batch(tokens))
    state, _ = loops.begin(BEST, memory, logits)
    wanted = plainly(smollm2, memory, state)[2]
    draft = loops.lookup(tokens, ngram=1, branches=3)
    found, _, _, made = guessing(smollm2, draft, memory, state)
    np.testing.assert_array_equal(made.tokens, wanted.tokens)
    assert 0 < made.accepted.sum() < made.tried.sum()
    assert jaxkv.used(found) == sum(map(len, tokens)) + 3 * 24


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Hiding(loops.sampling.Sampler):
    """Allows all tokens but the first."""

    @property
    def draws(self):
        return False

    def adjust(self, logits, state):
        return logits.at[:, 0].set(-jnp.inf)


@pytest.mark.core
@pytest.mark.parametrize("branches", [1, 2])
def test_a_text_without_an_answer_ends_though_a_sampler_hides_it(branches):
    """After token 3 a logit is NaN, of a token that is not allowed."""
    weights = jnp.roll(jnp.eye(5) * 5, 1, axis=1).at[3, 0].set(jnp.nan)

    def cycle(weights, memory, ubatch):
        x = jnp.ones((*ubatch.tokens.shape, 1, 2))
        memory, _ = jaxkv.attend(memory, 0, ubatch, x, x, x)
        return memory, weights[ubatch.tokens].reshape(-1, 5)[ubatch.outputs]

    prompt = [1, 2, 3, 4, 1]
    memory = jaxkv.make_kv_cache(layers=1, cells=64, kv_heads=1, head_dim=2, sequences=4)
    memory, logits = jaxkv.prefill(cycle, weights, memory, make_batch(prompt))
    state, _ = loops.begin(Hiding(), memory, logits)
    draft = loops.lookup([prompt], branches=branches)
    made = loops.speculate(cycle, draft, Hiding(), weights, memory, state, steps=6)[3]
    assert made.tokens[0].tolist() == [3, -1, -1, -1, -1, -1]
