"""Prompts and generation: one contract for every loop, whatever kind of function a model is."""

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
from jaxkv.loops.sampling import make_sampler
from tests.memories import SMALL, SPLIT, VOCABULARY, assert_identical, filled, think

DATA = Path(__file__).parent.parent / "data"
MODELS = ("llama_tied", "mamba2", "granite_hybrid", "recurrent_gemma")
FIRST = [MODELS[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in MODELS[1:])]
CLOSE = dict(rtol=0, atol=2e-4)
TOKENS = np.array([7, 3, 11, 5, 2, 9, 13, 4, 6, 1, 8], np.int32)

load = cache(lambda name: models.load(DATA / name))


def forward(weights, memory, ubatch):
    """A tiny transformer; it applies the ubatch once more."""
    del weights
    return think(memory, ubatch)


BEST = make_sampler()


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


@pytest.mark.nightly
@pytest.mark.parametrize("name", FIRST)
def test_a_prompt_in_parts_gives_the_logits_of_the_whole(name):
    model = load(name)
    batch = make_batch(TOKENS, outputs=np.ones(len(TOKENS), bool))
    memory = model.make_memory(cells=32)
    after, logits = jaxkv.prefill(model.forward, model.weights, memory, batch, ubatch_size=4)
    np.testing.assert_allclose(logits, whole(name), **CLOSE)
    assert jaxkv.seq_pos_max(after, 0) == len(TOKENS) - 1
    assert jaxkv.seq_pos_max(memory, 0) == -1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
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


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_generation_feeds_what_was_picked(name):
    """The tokens of a loop, fed once more as a prompt, are each the best one of their logits."""
    model = load(name)
    memory = model.make_memory(cells=32)
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, make_batch(TOKENS[:4]))
    first = np.asarray(logits).argmax(-1)
    memory, state, picked = jaxkv.decode(
        model.forward, BEST, model.weights, memory, loops.start(memory, first), steps=5
    )
    text = np.concatenate([TOKENS[:4], first, picked.tokens[0]])
    batch = make_batch(text, outputs=np.ones(len(text), bool))
    _, logits = jaxkv.prefill(model.forward, model.weights, model.make_memory(cells=32), batch)
    assert np.asarray(logits)[3:-1].argmax(-1).tolist() == text[4:].tolist()
    assert jaxkv.seq_pos_max(memory, 0) == len(text) - 2 and state.token[0] == text[-1]


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclass(frozen=True, eq=False)
class Counting(loops.sampling.Sampler):
    """Picks 0, 1, 2 and so on: how often it was told of a token."""

    def start(self, prompts):
        return np.zeros(len(prompts), np.int32)

    def adjust(self, logits, state):
        return jnp.where(jnp.arange(logits.shape[1])[None] == state[:, None], 0, -jnp.inf)

    def follow(self, state, tokens):
        return state + 1


@pytest.mark.core
def test_the_token_that_a_text_starts_with_counts():
    """So that `begin` and `start` go on alike."""
    memory = filled(2, 1)
    rising = dict(allowed=lambda n: jnp.arange(VOCABULARY) > n, advance=lambda n, token: token)
    for sampler in (
        loops.sampling.constrained(BEST, first=-1, **rising),
        loops.sampling.make_sampler(presence_penalty=9.0, frequency_penalty=2.0),
    ):
        memory, logits = jaxkv.prefill(forward, None, filled(2, 1), make_batch([[3], [4]]))
        state, first = loops.begin(sampler, memory, logits, prompts=[[3], [4]])
        again = loops.start(memory, first.tokens[:, 0], sampler=sampler, prompts=[[3], [4]])
        wanted, got = (
            jaxkv.decode(forward, sampler, None, memory, one, steps=5)[2].tokens
            for one in (state, again)
        )
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.core
def test_a_text_begins_where_its_prompt_is():
    """An empty prompt has no logits, and those of the next one are not its own."""
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=4, sequences=3)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([[1, 2]], sequences=[1])))
    logits = jnp.zeros((1, VOCABULARY))
    with pytest.raises(ValueError, match="nothing in sequence 0: pass sequences="):
        loops.begin(BEST, memory, logits)
    state, _ = loops.begin(BEST, memory, logits, sequences=[1])
    assert state.active.all()
    state, _ = loops.begin(BEST, memory, jnp.zeros((2, 5)), sequences=[0, 1], limit=[0, 1])
    assert not state.active.any()  # nothing is asked of the empty one
    with pytest.raises(ValueError, match=r"at most 3 texts, .* got 8 rows: .* logits\[:T\]"):
        loops.begin(BEST, memory, jnp.zeros((8, 5)))


def test_stop_tokens_may_be_a_set():
    memory = filled(1)
    state, first = loops.begin(BEST, memory, jnp.eye(5)[3:4], stop=frozenset([2, 3]))
    assert first.tokens.tolist() == [[3]] and not state.active.any()


@pytest.mark.core
def test_each_text_ends_by_itself():
    """By its limit, by its own stop token, or not at all."""
    memory = filled(1, 1, 1)
    state = loops.start(memory, [9, 8, 7], [2, 0, 1], limit=[2, 9, 9], sampler=Counting())
    stop = [[-1, -1], [4, 2], [-1, 4]]
    for wanted in ([[1], [1], [1]], [[2, -1, -1], [2, -1, -1], [2, 3, 4]], [[-1]] * 3):
        memory, state, picked = jaxkv.decode(
            forward, Counting(), None, memory, state, stop, steps=len(wanted[0])
        )
        assert picked.tokens.tolist() == wanted
    assert jaxkv.seq_pos_max(memory, [2, 0, 1]).tolist() == [2, 2, 4]
    assert not state.active.any() and not state.reason.any()
    assert state.left.tolist() == [0, 7, 5]


@pytest.mark.core
def test_a_text_without_an_answer_ends_and_shows_it():
    """NaN is no token: the text ends, its log-probability is NaN, and the others go on."""

    def broken(weights, memory, ubatch):
        memory, logits = forward(weights, memory, ubatch)
        return memory, logits.at[1].set(jnp.nan)

    memory = filled(1, 1)
    state = loops.start(memory, [1, 2], sampler=BEST)
    _, state, picked = jaxkv.decode(broken, BEST, None, memory, state, [], steps=3)
    assert picked.tokens[1].tolist() == [-1, -1, -1] and (picked.tokens[0] >= 0).all()
    np.testing.assert_array_equal(np.isnan(picked.logprobs), [[False] * 3, [True, False, False]])
    assert state.active.tolist() == [True, False]


@pytest.mark.core
@pytest.mark.parametrize("kind", [SMALL, SPLIT], ids=["pool", "streams"])
def test_a_text_without_room_ends_alone(kind):
    """The others go on, each as it would alone; where there is one pool, the first ones do."""
    cells = kind.cells
    counts = (2, cells - 2, 1) if kind is SPLIT else (1, cells - 6, 1)
    memory = filled(*counts, kind=kind)
    state = loops.start(memory, [1, 2, 3], limit=6)
    after, state, picked = jaxkv.decode(forward, BEST, None, memory, state, steps=6)
    made = (picked.tokens >= 0).sum(axis=1).tolist()
    assert made == ([6, 2, 6] if kind is SPLIT else [2, 1, 1])
    reasons = [0, 1, 0] if kind is SPLIT else [1, 1, 1]
    assert state.reason.tolist() == [jaxkv.Reason(reason) for reason in reasons]
    assert not state.active.any() and not sum(jaxkv.check_invariants(after).values())
    for seq in range(3):
        alone = loops.start(memory, [seq + 1], [seq], limit=made[seq])
        _, _, text = jaxkv.decode(forward, BEST, None, memory, alone, steps=6)
        assert text.tokens[0].tolist() == picked.tokens[seq].tolist()
        np.testing.assert_allclose(text.logprobs[0], picked.logprobs[seq], atol=1e-5)


@pytest.mark.core
def test_a_refused_text_is_told_why():
    memory = jaxkv.seq_add(filled(3, 3), 1, 0, -1, 2)
    state = loops.start(memory, [1, 2], limit=2)
    memory, state, picked = jaxkv.decode(forward, BEST, None, memory, state, steps=2)
    assert state.reason.tolist() == [jaxkv.Reason.FITS, jaxkv.Reason.UPDATE_PENDING]
    assert (picked.tokens[0] >= 0).all() and (picked.tokens[1] == -1).all()
    assert jaxkv.seq_pos_max(memory, 1) == 4 and state.token[1] == 2


@pytest.mark.core
def test_traced_sequences_that_cannot_be_end():
    """Outside of `jit` they raise."""

    @jax.jit
    def loop(memory, sequences):
        state = loops.start(memory, jnp.array([1, 2]), sequences, limit=2)
        return jaxkv.decode(forward, BEST, None, memory, state, steps=2)

    for sequences, reason in (([1, 1], "DUPLICATE"), ([0, 9], "UNKNOWN_SEQUENCE")):
        memory, state, picked = loop(filled(2, 3), jnp.array(sequences))
        assert (picked.tokens == -1).all() and not state.active.any()
        assert {jaxkv.Reason(int(x)).name for x in state.reason} == {reason}
        assert_identical(memory, filled(2, 3))


@pytest.mark.core
def test_log_probabilities_are_those_of_the_model():
    """Whatever a sampler makes of the logits; and a loop in pieces is one in one piece."""
    sampler = make_sampler(temperature=3.0, top_k=5, repeat_penalty=1.3, last_n=4)
    memory, logits = jaxkv.prefill(forward, None, filled(), make_batch([1, 2, 3]))
    options = dict(seed=3, prompts=[[1, 2, 3]], limit=7)
    state, first = loops.begin(sampler, memory, logits, **options)
    pieces, now, rest = [first], memory, state
    for _ in range(3):
        now, rest, picked = jaxkv.decode(forward, sampler, None, now, rest, steps=2)
        pieces.append(picked)
    _, _, whole = jaxkv.decode(forward, sampler, None, memory, state, steps=6)
    text, logprobs = (np.concatenate(one, axis=1)[0] for one in zip(*pieces, strict=True))
    np.testing.assert_array_equal(text[1:], whole.tokens[0])
    batch = make_batch([1, 2, 3, *text.tolist()], outputs=np.ones(len(text) + 3, bool))
    _, logits = jaxkv.prefill(forward, None, filled(), batch)
    wanted = jax.nn.log_softmax(logits)[np.arange(2, len(text) + 2), text]
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def down(state, token):
    """A matcher that counts down, and knows no token that is none."""
    assert 0 <= token < VOCABULARY
    return state - np.int32(token == state - 1)


@pytest.mark.core
def test_a_rule_on_the_host_goes_through_a_loop():
    """Two texts that end at different steps; where nothing is allowed they end."""

    def allowed(state):
        mask = jax.ShapeDtypeStruct((VOCABULARY,), bool)
        ask = partial(jax.pure_callback, lambda state: np.arange(VOCABULARY) == state - 1)
        return ask(mask, state, vmap_method="sequential")

    def advance(state, token):
        after = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(down, after, state, token, vmap_method="sequential")

    rule = loops.sampling.constrained(BEST, first=jnp.int32(3), allowed=allowed, advance=advance)
    memory = filled(2, 3)
    state = loops.start(memory, [1, 1], sampler=rule, limit=[2, 9])
    _, state, picked = jaxkv.decode(forward, rule, None, memory, state, steps=5)
    assert picked.tokens.tolist() == [[2, 1, -1, -1, -1], [2, 1, 0, -1, -1]]
    assert state.adjusting[0].tolist() == [1, 0] and not state.active.any()


def test_a_loop_asks_nothing_of_the_host():
    memory, state = filled(4), loops.start(filled(4), [1])
    run = partial(jaxkv.decode, forward, make_sampler(temperature=1.0, top_p=0.9), steps=4)
    text = jax.jit(run).lower(None, memory, state).as_text()
    assert "while" in text and "callback" not in text and "infeed" not in text


# ---- what is taken and what is left


@pytest.mark.core
@pytest.mark.parametrize(
    "kind",
    [pytest.param(SMALL, id="pool"), pytest.param(SPLIT, id="streams")],
)
def test_the_memory_that_is_passed_in_stays_unless_it_is_donated(kind):
    def run(memory, donate):
        memory, logits = jaxkv.prefill(
            forward, None, memory, make_batch([1] * 6), ubatch_size=4, donate=donate
        )
        state = loops.start(memory, [3])
        memory, state, picked = jaxkv.decode(
            forward, BEST, None, memory, state, steps=2, donate=donate
        )
        return memory, logits, (state.token, state.left, picked)

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


@pytest.mark.core
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


@pytest.mark.core
def test_a_whole_loop_inside_of_a_program_is_that_outside():
    def whole(memory, tokens):
        memory, logits, *ok = jaxkv.prefill(forward, None, memory, make_batch(tokens))
        first = jnp.argmax(logits[:1], axis=-1)
        state = loops.start(memory, first, limit=2)
        return jaxkv.decode(forward, BEST, None, memory, state, steps=3), ok

    tokens = jnp.array([1, 2, 3])
    (_, _, wanted), none = whole(filled(4), tokens)
    (_, _, found), (ok,) = jax.jit(whole)(filled(4), tokens)
    assert found.tokens.tolist() == wanted.tokens.tolist() and ok and none == []
    assert (found.tokens[0, :2] >= 0).all() and found.tokens[0, 2] == -1


@pytest.mark.nightly
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


@pytest.mark.core
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
        (dict(sequence=[1, 1]), r"wanted each sequence at most once, got \[1, 1\]"),
        (dict(sequence=[0, 9]), "ids from 0 to"),
        (dict(token=[1, 2, 3]), r"of one length \[T\], got \(3,\), \(2,\)"),
        (dict(active=[True]), r"of one length \[T\], got \(2,\), \(2,\), \(1,\)"),
        (dict(draw=np.zeros(3, int)), r"of one length \[T\], got .*\(3,\)"),
        (dict(reason=0), r"got \(2,\), \(2,\), \(2,\), \(2,\), \(\)"),
        (dict(adjusting=np.zeros((3, 2))), r"\(3, 2\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_state_that_cannot_be_is_refused(change, message, donate):
    memory = jax.tree.map(jnp.copy, filled(2, 3))
    state = replace(loops.start(memory, [1, 2]), **change)
    with pytest.raises(ValueError, match=message):
        jaxkv.decode(forward, BEST, None, memory, state, steps=2, donate=donate)
    assert_identical(memory, filled(2, 3))


LOGITS = np.zeros((2, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: loops.start(m, 3), r"wanted tokens \[T\], got the shape \(\)"),
        (lambda m: loops.start(m, [1.5]), "wanted integers for tokens, got float64"),
        (
            lambda m: loops.start(m, [1, 2], [1, 1]),
            r"wanted each sequence at most once, got \[1, 1\]",
        ),
        (lambda m: loops.start(m, [1, 2], [1, 5]), "wanted sequence ids from 0 to 2, got 5"),
        (lambda m: loops.start(m, [1, 2], limit=[1]), r"wanted limit \[\] or \[2\], got \(1,\)"),
        (lambda m: loops.start(m, [1, 2], seed=[1]), r"wanted a seed \[\] or \[2\], got \(1,\)"),
        (lambda m: loops.start(m, [-1]), "wanted tokens from 0 to .*, got -1"),
        (lambda m: loops.start(m, [1], limit=-1), "wanted limit from 0 to .*, got -1"),
        (lambda m: loops.start(m, [1], [0, 1]), r"wanted sequences \[1\], .* got \(2,\)"),
        (lambda m: loops.start(m, [1], sampler=jnp.argmax), "wanted a sampler, such as"),
        (lambda m: loops.begin(jnp.argmax, m, LOGITS), "wanted a sampler, such as"),
        (lambda m: loops.begin(BEST, m, [[1, 2]]), r"wanted logits \[T, V\] of floats, got int"),
        (
            lambda m: loops.begin(make_sampler(temperature=[1, 1, 1]), m, LOGITS),
            r"wanted temperature \[\] or \[2\], one for each text, got \(3,\)",
        ),
        (
            lambda m: jaxkv.decode(
                forward,
                make_sampler(top_k=[1, 2, 3], temperature=1),
                None,
                m,
                loops.start(m, [1]),
                steps=1,
            ),
            r"wanted top_k \[\] or \[1\], one for each text, got \(3,\)",
        ),
        (lambda m: loops.start(m, [1], seed=-1), "seed must be from 0 to 4294967295, got -1"),
        (lambda m: loops.start(m, [1], seed=0.5), "wanted integers for seed, got float64"),
        (lambda m: loops.start(m, [1], prompts=[]), "wanted the prompts of 1 texts, got 0"),
        (
            lambda m: loops.begin(BEST, m, LOGITS[0]),
            r"wanted logits \[T, V\] of floats, got .*\[8\]",
        ),
        (lambda m: loops.begin(BEST, m, LOGITS, [[[1]]]), r"wanted stop tokens \[n\] or \[2, n\]"),
        (
            lambda m: jaxkv.decode(forward, jnp.argmax, None, m, loops.start(m, [1]), steps=1),
            "wanted a sampler, such as .*make_sampler",
        ),
        (
            lambda m: jaxkv.decode(
                forward, make_sampler(presence_penalty=1), None, m, loops.start(m, [1]), steps=1
            ),
            r"with this sampler, which remembers \(\(1, 64\), .*, got .* \(\): pass sampler=",
        ),
        (
            lambda m: jaxkv.decode(forward, BEST, None, m, [1], steps=1),
            "wanted a state, jaxkv.loops.start makes it, got <class 'list'>",
        ),
        (
            lambda m: jaxkv.decode(forward, BEST, None, m, loops.start(m, [1]), steps=0),
            "wanted steps of at least 1, got 0",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(filled(2, 3))


@pytest.mark.core
def test_logits_may_be_lists():
    memory = filled(2)
    _, first = loops.begin(BEST, memory, [[0.0, 2.0, 1.0]])
    assert first.tokens.tolist() == [[1]]


@pytest.mark.core
def test_draws_are_numbered_by_position_and_count_on():
    """So a text is the same where it is started again."""
    sampler = make_sampler(temperature=1.0)
    memory = filled(3, 2)
    state = loops.start(memory, [1, 2], seed=[7, 8], limit=[4, 1])
    assert state.draw.tolist() == [4, 3]
    after, state, picked = jaxkv.decode(forward, sampler, None, memory, state, steps=3)
    assert state.draw.tolist() == [7, 4]
    again = loops.start(after, state.token, seed=[7, 8], limit=[1, 0])
    assert again.draw.tolist() == [7, 4]
    _, _, rest = jaxkv.decode(forward, sampler, None, after, state, steps=1)
    _, _, same = jaxkv.decode(forward, sampler, None, after, again, steps=1)
    assert rest.tokens.tolist() == same.tokens.tolist() and (rest.tokens[0] >= 0).all()


def test_a_donated_memory_is_named():
    memory = jax.tree.map(jnp.copy, filled(2))
    state = loops.start(memory, [1])
    jaxkv.decode(forward, BEST, None, memory, state, steps=1, donate=True)
    for again in (
        lambda: jaxkv.decode(forward, BEST, None, memory, state, steps=1),
        lambda: jaxkv.prefill(forward, None, memory, make_batch([1])),
        lambda: loops.warm_up(forward, None, memory, ubatch_size=1),
    ):
        with pytest.raises(ValueError, match="got one whose buffers were donated: go on with"):
            again()


@pytest.mark.core
def test_a_plan_is_not_made_twice():
    """What admission has planned is carried out; a stale plan is not."""
    memory, batch = filled(2), make_batch([1, 2, 3, 4, 5], sequences=1)
    plan = jaxkv.init_batch(memory, batch, ubatch_size=4)
    wanted = jaxkv.prefill(forward, None, memory, batch, ubatch_size=4)
    after, logits = jaxkv.prefill(forward, None, memory, batch, plan=plan)
    assert_identical((after, logits), wanted)
    with pytest.raises(ValueError, match="got a stale one: plan again"):
        jaxkv.prefill(forward, None, after, batch, plan=plan)
    for wrong in (make_batch([1, 2]), make_batch([[1], [2] * 5], sequences=[0, 1])):
        with pytest.raises(ValueError, match="wanted a plan of the batch's . tokens, got one of 5"):
            jaxkv.prefill(forward, None, memory, wrong, plan=plan)
    with pytest.raises(TypeError, match="wanted a batch, make_batch makes it, got .*NoneType"):
        jaxkv.prefill(forward, None, memory, None, plan=plan)
    with pytest.raises(TypeError, match="wanted a plan, init_batch makes it, got .*str"):
        jaxkv.prefill(forward, None, memory, batch, plan="x")
    with pytest.raises(ValueError, match="got both"):
        jaxkv.prefill(forward, None, memory, batch, plan=plan, ubatch_size=4)


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
