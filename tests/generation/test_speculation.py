"""Speculation: the texts of a plain loop, or draws of the same distribution, in fewer steps."""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from jaxkv.loops.sampling import constrained, make_sampler
from tests.cases import mostly_nightly
from tests.memories import SMALL, SPLIT, WEIGHTS, Kind, filled, think

DATA = Path(__file__).parent.parent / "data"
WAYS = [  # each family with a lookup and with a model that drafts, in a pool and split
    ("llama_tied", "itself", "pool"),
    ("llama_tied", "lookup", "split"),
    ("gemma3", "lookup", "pool"),
    ("gemma3", "another", "split"),
    ("mamba2", "lookup", "split"),
    ("mamba2", "itself", "pool"),
    ("granite_hybrid", "lookup", "pool"),
    ("granite_hybrid", "another", "split"),
    ("recurrent_gemma", "lookup", "split"),
    ("recurrent_gemma", "another", "pool"),
]
BEST = make_sampler()
PROMPTS = [[7, 3, 11, 5, 7, 3, 11, 5, 7, 3], [2, 9, 13, 2, 9, 13, 2], [4, 6, 1, 8, 4, 6]]
DRAWN = np.random.default_rng(5)
TWENTY = [*PROMPTS, *(DRAWN.integers(1, 14, DRAWN.integers(2, 10)).tolist() for _ in range(17))]


@cache
def load(name):
    return models.load(DATA / name)


def begun(model, prompts, sampler=BEST, *, limit=24, stop=(), cells=160, **options):
    """Prefill prompts, and pick their first tokens."""
    count = len(prompts)
    memory = model.make_memory(cells=cells, sequences=count, rollback=4, **options)
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, make_batch(prompts))
    state, first = loops.begin(sampler, memory, logits, stop, limit=limit, prompts=prompts)
    return memory, state, first


def plainly(model, memory, state, *, stop=(), steps=24, sampler=BEST):
    return jaxkv.decode(model.forward, sampler, model.weights, memory, state, stop, steps=steps)


def texts(made):
    return [row[row >= 0].tolist() for row in np.asarray(made.tokens)]


def copying(name):
    """Another model, nearly the same: it guesses right now and then."""
    model = load(name)
    noise = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: x + 0.02 * noise.normal(size=x.shape).astype(x.dtype), model.weights
    )
    return model.forward, weights


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind", "pools"),
    mostly_nightly(
        WAYS,
        few=[
            ("llama_tied", "lookup", "split"),
            ("gemma3", "another", "split"),
            ("mamba2", "itself", "pool"),
            ("granite_hybrid", "lookup", "pool"),
        ],
    ),
)
def test_twenty_texts_are_those_of_a_plain_loop(name, kind, pools):
    model, count = load(name), len(TWENTY)
    cells, streams = (40 * count, 1) if pools == "pool" else (40, count)
    memory, state, _ = begun(model, TWENTY, streams=streams, cells=cells)
    after, ended, wanted = plainly(model, memory, state)
    if kind == "lookup":
        draft = loops.lookup(TWENTY)
    else:
        forward, weights = (model.forward, model.weights) if kind == "itself" else copying(name)
        own, _ = jaxkv.prefill(
            forward,
            weights,
            model.make_memory(cells=40 * count, sequences=count, rollback=4),
            make_batch(TWENTY),
        )
        draft = loops.draft_model(forward, weights, own, texts=count)
    found, now, draft, made = loops.speculate(
        model.forward, draft, BEST, model.weights, memory, state, steps=24
    )
    assert texts(made) == texts(wanted)
    np.testing.assert_allclose(made.logprobs, wanted.logprobs, atol=2e-4)
    assert now.token.tolist() == ended.token.tolist() and not now.active.any()
    ids = [*range(count)]
    assert jaxkv.seq_pos_max(found, ids).tolist() == jaxkv.seq_pos_max(after, ids).tolist()
    assert not sum(jaxkv.check_invariants(found).values())
    picked = made.turns + made.accepted  # no text ends with a guess: none has a stop token
    assert picked.tolist() == [len(text) for text in texts(made)]
    if kind == "itself":
        assert (made.accepted >= made.tried - 1).all() and (made.turns <= 7).all()
    # The memory goes on as if nothing had been guessed.
    step = partial(jaxkv.prefill, model.forward, model.weights, batch=make_batch([[1]] * count))
    np.testing.assert_allclose(step(memory=found)[1], step(memory=after)[1], atol=2e-4)


@pytest.mark.nightly
def test_texts_of_a_model_in_a_pool_are_those_of_a_plain_loop():
    """The fast part's case of the test above."""
    model = load("llama_tied")
    memory, state, _ = begun(model, PROMPTS[:2], limit=[12, 5])
    after, ended, wanted = plainly(model, memory, state, steps=12)
    found, now, _, made = loops.speculate(
        model.forward, loops.lookup(PROMPTS[:2]), BEST, model.weights, memory, state, steps=12
    )
    assert texts(made) == texts(wanted) and made.accepted.sum() > 0
    assert now.token.tolist() == ended.token.tolist() and now.draw.tolist() == ended.draw.tolist()
    ends = [jaxkv.seq_pos_max(one, [0, 1]).tolist() for one in (found, after)]
    assert ends[0] == ends[1]


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


@pytest.mark.core
@pytest.mark.parametrize(
    "kind", mostly_nightly([SMALL, SPLIT], few=[SPLIT]), ids=["pool", "streams"]
)
def test_stop_tokens_limits_and_full_memories_end_texts_alike(kind):
    """Also within a guess; at whatever number of steps a call ends."""
    prompts = [[1, 2, 1], [3]]
    memory = kind.make()
    memory, logits = jaxkv.prefill(forward, None, memory, make_batch(prompts))
    for limit in ([9, 2], [3, 9], [9, 9]):
        state, first = loops.begin(BEST, memory, logits, limit=limit)
        _, _, free = jaxkv.decode(forward, BEST, None, memory, state, steps=8)
        for stop in ([], [int(free.tokens[0, 2])]):
            plain = partial(jaxkv.decode, forward, BEST, None, stop=stop)
            after, ended, wanted = plain(memory=memory, state=state, steps=8)
            now, at, draft, pieces = memory, state, Told.make(free.tokens), []
            for steps in (3, 5):
                now, at, draft, made = loops.speculate(
                    forward, draft, BEST, None, now, at, stop, steps=steps
                )
                pieces.append(made)
            found = [sum(both, []) for both in zip(*map(texts, pieces), strict=True)]
            assert found == texts(wanted)
            assert at.reason.tolist() == ended.reason.tolist()
            assert at.active.tolist() == ended.active.tolist()
            assert at.left.tolist() == ended.left.tolist()
            held = [jaxkv.seq_pos_max(one, [0, 1]).tolist() for one in (now, after)]
            assert held[0] == held[1]


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "start"], meta_fields=["tries"])
@dataclass(frozen=True)
class Told(loops.Draft):
    """Guesses what it was told will come, and every third token wrong."""

    tokens: jax.Array
    start: jax.Array
    tries: int = 3

    @property
    def texts(self):
        return len(self.start)

    @classmethod
    def make(cls, tokens):
        wrong = jnp.where(jnp.arange(tokens.shape[1])[None] % 3 == 2, 0, tokens)
        return cls(jnp.pad(wrong, [(0, 0), (0, 3)]), jnp.zeros(len(tokens), jnp.int32))

    def guess(self, sampler, state, active, at):
        where = self.start[:, None] + jnp.arange(3)[None]
        tokens = jnp.take_along_axis(self.tokens, where, axis=1)
        valid = active[:, None] & (tokens >= 0)
        return self, loops.Guess(tokens, jnp.cumprod(valid, axis=1) > 0, None)

    def follow(self, sequences, at, fed, taken):
        return replace(self, start=self.start + taken)


@pytest.mark.core
def test_samplers_with_a_memory_follow_only_what_holds():
    """Penalties and rules see the tokens of the text, and none that was guessed wrong."""
    prompts = [[1, 2, 1, 2], [3, 4, 3, 4]]
    rule = constrained(
        make_sampler(repeat_penalty=1.5, last_n=6), first=0, allowed=turns_of, advance=next_turn
    )
    memory, logits = jaxkv.prefill(forward, None, SMALL.make(), make_batch(prompts))
    state, _ = loops.begin(rule, memory, logits, prompts=prompts)
    _, ended, wanted = jaxkv.decode(forward, rule, None, memory, state, steps=2)
    draft = loops.lookup(prompts, ngram=1)
    _, now, _, made = loops.speculate(forward, draft, rule, None, memory, state, steps=2)
    assert texts(made) == texts(wanted)
    jax.tree.map(np.testing.assert_array_equal, now.adjusting, ended.adjusting)


def turns_of(state):
    return jnp.arange(SIZE) % 2 == state


def next_turn(state, token):
    return 1 - token % 2


SIZE = WEIGHTS["embedding"].shape[0]

# ---- draws


CHANCES = np.random.default_rng(1).dirichlet(np.ones(4), size=(2, 4)).astype(np.float32)


def by_table(weights, memory, ubatch):
    """Says what a table says comes after a token."""
    x = jnp.zeros((*ubatch.valid.shape, 1, 1))
    memory, _ = jaxkv.attend(memory, 0, ubatch, x, x, x)
    return memory, jnp.log(weights)[ubatch.tokens.reshape(-1)[ubatch.outputs]]


def table_memory(texts):
    memory = jaxkv.make_kv_cache(
        layers=1, cells=16, kv_heads=1, head_dim=1, sequences=texts, streams=texts
    )
    return jaxkv.prefill(by_table, CHANCES[0], memory, make_batch([[0]] * texts))[0]


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("model", 1.0),
        *(pytest.param(*way, marks=pytest.mark.core) for way in (("lookup", 1.0), ("model", 0.6))),
    ],
)
def test_draws_have_the_distribution_of_the_model(kind, temperature):
    """Chi-square over all texts of three tokens; 4,096 texts, so that what is likely shows."""
    count, rounds = 256, 16
    sampler = make_sampler(temperature=temperature)
    memory = table_memory(count)
    found = np.zeros((4, 4, 4))
    for seed in range(rounds):
        state = loops.start(memory, [0] * count, seed=seed, limit=3)
        if kind == "lookup":
            draft = loops.lookup([[0, 1, 2, 0, 1, 3]] * count, ngram=1, tries=2, recent=8)
        else:
            draft = loops.draft_model(by_table, CHANCES[1], memory, texts=count, tries=2)
        _, _, _, made = loops.speculate(
            by_table, draft, sampler, CHANCES[0], memory, state, steps=3
        )
        np.add.at(found, tuple(np.asarray(made.tokens).T), 1)
        assert 0 < made.accepted.sum() < made.tried.sum()
    chances = CHANCES[0] ** (1 / temperature)
    chances = chances / chances.sum(axis=1, keepdims=True)
    wanted = count * rounds * chances[0][:, None, None] * chances[:, :, None] * chances[None]
    statistic = ((found - wanted) ** 2 / wanted).sum()
    assert statistic < 106  # the 99.95 % point of 63 degrees of freedom is 106.4


@pytest.mark.core
def test_draws_without_guesses_are_those_of_a_plain_loop():
    sampler, memory = make_sampler(temperature=1.0), table_memory(8)
    state = loops.start(memory, [0] * 8, seed=4, limit=5)
    _, _, wanted = jaxkv.decode(by_table, sampler, CHANCES[0], memory, state, steps=5)
    draft = loops.lookup([[]] * 8, ngram=7, recent=8)
    _, _, _, made = loops.speculate(by_table, draft, sampler, CHANCES[0], memory, state, steps=5)
    assert texts(made) == texts(wanted) and not made.tried.any()


# ---- what is counted, and what a draft holds


@pytest.mark.core
def test_a_guess_that_ends_a_text_is_accepted():
    """Of one step that feeds three right guesses, the second a stop token."""
    memory = filled(3)
    state = loops.start(memory, [1])
    _, _, free = jaxkv.decode(forward, BEST, None, memory, state, steps=3)
    told = Told(jnp.pad(free.tokens, [(0, 0), (0, 3)]), jnp.zeros(1, jnp.int32))
    run = partial(loops.speculate, forward, told, BEST, None, memory, state)
    for i in range(3):
        made = run([int(free.tokens[0, i])], steps=4)[3]
        first = free.tokens[0].tolist().index(int(free.tokens[0, i]))
        assert made.turns.tolist() == [1] and made.tried.tolist() == [3]
        assert made.accepted.tolist() == [first + 1] == [len(texts(made)[0])]
    assert run([], steps=4)[3].accepted.tolist() == [3]


@pytest.mark.core
@pytest.mark.parametrize("held", [(), (1,), (2, 4)], ids=["empty", "short", "in another sequence"])
def test_a_draft_that_holds_another_text_guesses_nothing(held):
    """The texts are the same, each token a step of its own."""
    memory = filled(4)
    state = loops.start(memory, [1])
    wanted = jaxkv.decode(forward, BEST, None, memory, state, steps=4)[2]
    own = filled(*held) if held else SMALL.make()
    draft = loops.draft_model(forward, None, own)
    made = loops.speculate(forward, draft, BEST, None, memory, state, steps=4)[3]
    assert texts(made) == texts(wanted)
    assert made.tried.tolist() == [0] and made.turns.tolist() == [4]


def half_right(weights, memory, ubatch):
    """Guesses right in sequence 0 and wrong in all others."""
    memory, logits = forward(weights, memory, ubatch)
    sequences = ubatch.sequences.reshape(-1)[ubatch.outputs]
    return memory, jnp.where(sequences[:, None] == 0, logits, -logits)


@pytest.mark.core
def test_a_draft_goes_on_where_a_text_pauses():
    """A text that has its steps earlier than another one waits for it, and loses no token."""
    memory = filled(2, 3, kind=Kind("roomy", cells=48, sequences=2))
    draft = loops.draft_model(half_right, None, memory, texts=2, tries=3)
    state = loops.start(memory, [1, 5])
    plain = jaxkv.decode(forward, BEST, None, memory, state, steps=16)[2]
    pieces, turns = [], 0
    for _ in range(4):
        memory, state, draft, made = loops.speculate(
            forward, draft, BEST, None, memory, state, steps=4
        )
        pieces.append(made.tokens)
        turns += made.turns
        ends, own = (jaxkv.seq_pos_max(one, [0, 1]) for one in (memory, draft.memory))
        assert own.tolist() == (ends - (draft.unfed >= 0)).tolist()
    assert np.concatenate(pieces, axis=1).tolist() == plain.tokens.tolist()
    assert turns.tolist() == [4, 16]


# ---- how it may be called


@pytest.mark.core
def test_texts_stand_in_any_sequences():
    """Some of them, in any order; one that has ended stays as it is."""
    memory = filled(2, 2, 2)
    state = loops.start(memory, [1, 5, 3], [2, 0, 1], limit=[4, 0, 4])
    wanted = jaxkv.decode(forward, BEST, None, memory, state, steps=4)
    own = loops.draft_model(forward, None, memory, texts=3, tries=2)
    found = loops.speculate(forward, own, BEST, None, memory, state, steps=4)
    assert texts(found[3]) == texts(wanted[2]) and texts(found[3])[1] == []
    assert found[3].turns.tolist()[1] == 0
    ends = [jaxkv.seq_pos_max(one, [0, 1, 2]).tolist() for one in (found[0], wanted[0])]
    assert ends[0] == ends[1]


@pytest.mark.core
def test_it_is_a_part_of_ones_own_program():
    memory, state = filled(4), loops.start(filled(4), [1], limit=6)
    draft = loops.lookup([[1, 2, 1, 2]])
    run = partial(loops.speculate, forward, steps=6)
    wanted = run(draft, BEST, None, memory, state)[3]
    found = jax.jit(run)(draft, BEST, None, memory, state)[3]
    assert texts(found) == texts(wanted)


@pytest.mark.core
def test_it_is_a_part_of_a_scan():
    memory, state = filled(4), loops.start(filled(4), [1])
    draft = loops.lookup([[1, 2, 1, 2]])

    def turn(carry, _):
        memory, state, draft = carry
        *carry, made = loops.speculate(forward, draft, BEST, None, memory, state, steps=3)
        return tuple(carry), made.tokens[0]

    (after, _, _), tokens = jax.lax.scan(turn, (memory, state, draft), length=2)
    wanted = jaxkv.decode(forward, BEST, None, memory, state, steps=6)
    assert tokens.reshape(-1).tolist() == wanted[2].tokens[0].tolist()
    assert jaxkv.seq_pos_max(after, 0) == jaxkv.seq_pos_max(wanted[0], 0)


@pytest.mark.core
def test_the_memory_that_is_passed_in_stays_unless_it_is_donated():
    memory, state = jax.tree.map(jnp.copy, filled(4)), loops.start(filled(4), [1], limit=3)
    before = jax.tree.map(np.array, memory)
    run = partial(loops.speculate, forward, loops.lookup([[1]]), BEST, None, memory, state, steps=3)
    run()
    jax.tree.map(np.testing.assert_array_equal, memory, before)
    run(donate=True)
    with pytest.raises(ValueError, match="whose buffers were donated"):
        run()


@pytest.mark.parametrize("name", ["mamba2", "granite_hybrid"])
def test_a_memory_that_cannot_take_back_is_named(name):
    model = load(name)
    memory = model.make_memory(cells=16, rollback=2)
    state = loops.start(memory, [1])
    wanted = "to keep 3 earlier states or more, .* with rollback=2: make it with rollback=3"
    with pytest.raises(ValueError, match=f"wanted the memory {wanted}"):
        loops.speculate(
            model.forward, loops.lookup([[1]]), BEST, model.weights, memory, state, steps=1
        )
    with pytest.raises(ValueError, match=f"wanted the draft's memory {wanted}"):
        loops.draft_model(model.forward, model.weights, memory)


POOL_OF_TWO = Kind("two", cells=8, sequences=2)


def given_up(memory):
    """A memory whose buffers are gone."""
    memory = jax.tree.map(jnp.copy, memory)
    jaxkv.prefill(forward, None, memory, make_batch([1]), donate=True)
    return memory


def speculated(draft):
    memory = filled(2)
    return loops.speculate(forward, draft, BEST, None, memory, loops.start(memory, [1]), steps=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loops.lookup([[1]], ngram=0), "wanted ngram of at least 1, got 0"),
        (lambda: loops.lookup([5, 9]), r"wanted a list of tokens for each text, got \[5, 9\]"),
        (lambda: loops.lookup([[1]], tries=0), "wanted tries of at least 1, got 0"),
        (lambda: loops.lookup([[1]], ngram=4, recent=4), "recent of more than ngram = 4 .* got 4"),
        (lambda: loops.draft_model(forward, None, filled(2), texts=0), "texts of at least 1"),
        (
            lambda: loops.speculate(
                forward, forward, BEST, None, filled(2), loops.start(filled(2), [1]), steps=1
            ),
            "wanted a draft, such as loops.lookup",
        ),
        (
            lambda: loops.speculate(
                forward,
                loops.lookup([[1], [2]]),
                BEST,
                None,
                filled(2),
                loops.start(filled(2), [1]),
                steps=1,
            ),
            "wanted a draft of 1 texts, got one of 2",
        ),
        (lambda: loops.draft_model(3, None, filled(2)), "wanted a function, got <class 'int'>"),
        (
            lambda: loops.draft_model(forward, None, given_up(filled(2))),
            "wanted the draft's memory with its buffers, got one whose buffers were donated",
        ),
        (
            lambda: speculated(
                replace(loops.draft_model(forward, None, filled(2)), memory=given_up(filled(2)))
            ),
            "wanted the draft's memory with its buffers, got one whose buffers were donated",
        ),
        (
            lambda: speculated(loops.draft_model(forward, None, POOL_OF_TWO.make())),
            "whose memory has the 3 sequences of the model's, got one of 2",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
