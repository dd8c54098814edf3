"""Bad arguments of loops, samplers, engines and stores: each raises, and nothing changes."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch, prefix
from jaxkv.loops.batching import Engine, Request, Rule
from jaxkv.loops.sampling import constrained, make_sampler
from tests.generation.tiny import BEST, forward, load, other, parity
from tests.memories import SMALL, SPLIT, VOCABULARY, Kind, filled

LOGITS, NONE = np.zeros((2, 8), np.float32), np.zeros((2, 0), np.int32)
POOL = Kind("pool", cells=24, sequences=4)
PAIR = Kind("pair", cells=8, sequences=2)


def donated(memory):
    memory = jax.tree.map(jnp.copy, memory)
    loops.warm_up(forward, None, memory, ubatch_size=1, donate=True)
    return memory


def started(m, tokens=(1, 2), **changes):
    return replace(loops.start(m, tokens), **changes)


def decode(m, state=None, sampler=BEST, steps=2):
    state = started(m) if state is None else state
    return jaxkv.decode(forward, sampler, None, m, state, steps=steps, donate=True)


def beam(m, logits=LOGITS[:1], width=2, steps=2, **options):
    return loops.beam(forward, None, m, logits, width=width, steps=steps, donate=True, **options)


def speculate(m, draft, tokens=(1,), model=forward, weights=None):
    state = loops.start(m, tokens)
    return loops.speculate(model, draft, BEST, weights, m, state, steps=1, donate=True)


def prefill(m, model):
    return jaxkv.prefill(model, None, m, make_batch([1]), donate=True)[:2]


def slide(m, seq=0, **options):
    return loops.slide(m, seq, **dict(keep=0, drop=1, donate=True) | options)


def extend(m, done=0, **options):
    return loops.extend(m, 0, done, **dict(group=2, width=4, donate=True) | options)


def states():
    return jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)


def draft(m, **options):
    return loops.draft_model(forward, None, m, **options)


def branches(m, texts):
    return speculate(m, loops.lookup([[1]] * texts, branches=2), [1] * texts)


def answering(change):
    """A model of which the memory before, that after and the logits are changed."""
    return lambda weights, memory, ubatch: change(memory, *forward(weights, memory, ubatch))


class Bare:
    __slots__ = ()

    def __call__(self, weights, memory, ubatch):
        return forward(weights, memory, ubatch)


DONATED = "whose buffers were donated: go on with"
THREE = make_sampler(temperature=[1, 1, 1])
PENALTY = make_sampler(presence_penalty=1)
LOOPS = [
    # what a state is started with
    (lambda m: loops.start(m, 3), ValueError, r"tokens \[T\], got the shape \(\)"),
    (lambda m: loops.start(m, [1.5]), TypeError, "integers for tokens, got float64"),
    (lambda m: loops.start(m, [-1]), ValueError, "tokens from 0 to .*, got -1"),
    (lambda m: loops.start(m, [1, 2], [1, 1]), ValueError, r"at most once, got \[1, 1\]"),
    (lambda m: loops.start(m, [1, 2], [1, 5]), ValueError, "ids from 0 to 2, got 5"),
    (lambda m: loops.start(m, [1], [0, 1]), ValueError, r"sequences \[1\], .* got \(2,\)"),
    (lambda m: loops.start(m, [1, 2], limit=[1]), ValueError, r"limit \[\] or \[2\], got \(1,\)"),
    (lambda m: loops.start(m, [1], seed=-1), ValueError, "from 0 to 4294967295, got -1"),
    (lambda m: loops.start(m, [1], prompts=[]), ValueError, "prompts of 1 texts, got 0"),
    (lambda m: loops.start(m, [1], sampler=jnp.argmax), TypeError, "wanted a sampler, such as"),
    (lambda m: loops.begin(jnp.argmax, m, LOGITS[:1]), TypeError, "wanted a sampler, such as"),
    (lambda m: loops.begin(BEST, m, [[1, 2]]), ValueError, r"\[T, V\] of floats, got int"),
    (
        lambda m: loops.begin(BEST, m, LOGITS, [[[1]]], [0, 1]),
        ValueError,
        r"stop tokens \[n\] or \[2, n\]",
    ),  # fmt: skip
    (lambda m: loops.begin(BEST, m, LOGITS.T), ValueError, r"at most 3 texts, .* got 8 rows: "),
    (lambda m: loops.begin(BEST, m, LOGITS, sequences=[0, 2]), ValueError, "nothing in sequence 2"),
    (lambda m: loops.begin(BEST, m, LOGITS), ValueError, "of each of 2 rows of logits, got none"),
    # what a state is changed to
    (lambda m: decode(m, started(m, sequence=[1, 1])), ValueError, r"at most once, got \[1, 1\]"),
    (lambda m: decode(m, started(m, active=[True])), ValueError, r"\(2,\), \(2,\), \(1,\)"),
    (lambda m: decode(m, started(m, adjusting=np.zeros((3, 2)))), ValueError, r"\(3, 2\)"),
    # what loops are given
    (lambda m: decode(m, [1]), TypeError, "wanted a state, .* got <class 'list'>"),
    (lambda m: decode(m, steps=0), ValueError, "steps of at least 1, got 0"),
    (lambda m: decode(m, sampler=jnp.argmax), TypeError, "a sampler, such as .*make_sampler"),
    (lambda m: decode(m, sampler=THREE), ValueError, r"one for each text, got \(3,\)"),
    (lambda m: decode(m, sampler=PENALTY), ValueError, r"\(\(2, 64\), .*, got .* \(\): pass"),
    (lambda m: loops.warm_up(forward, None, donated(m), ubatch_size=1), ValueError, DONATED),
    (lambda m: loops.warm_up(forward, None, m, sequences=()), ValueError, "at least one sequence"),
    (lambda m: prefill(m, answering(lambda m, _, x: (m, x))), ValueError, "nothing written"),
    (lambda m: prefill(m, answering(lambda _, m, x: (m, x[None]))), ValueError, r"\[O, V\] from"),
    (lambda m: prefill(m, answering(lambda _, m, x: m)), ValueError, "a pair from forward"),
    (lambda m: prefill(m, 3), TypeError, "wanted a function, got <class 'int'>"),
    (lambda m: prefill(m, Bare()), TypeError, "referenced weakly, got .*Bare.*wrap it"),
    (lambda m: beam(m, LOGITS), ValueError, r"logits \[V\] or \[1, V\].*\[2, 8\]"),
    (lambda m: beam(m, np.zeros(8, np.int32)), ValueError, "logits of floats, got int32"),
    (lambda m: beam(m, penalty=np.nan), ValueError, "finite number for penalty, got nan"),
    (lambda m: beam(m, width=0), ValueError, "width of at least 1, got 0"),
    (lambda m: beam(m, width=4), ValueError, "width of at most 3, a sequence for each .* got 4"),
    (lambda m: beam(m, sequences=[0]), ValueError, r"sequences \[2\], one for each .* got \(1,\)"),
    (lambda m: beam(m, stop=[[1]]), ValueError, r"stop tokens \[n\], got the shape \(1, 1\)"),
    (lambda m: beam(m, sequences=[2, 0]), ValueError, "nothing in sequence 2"),
    # texts longer than a memory
    (lambda m: slide(states()), ValueError, "alone, got kind 'recurrent': a state cannot forget"),
    (
        lambda m: extend(jaxkv.make_hybrid_cache((PAIR.make(), [0, 1]), (states(), [2]))),
        ValueError,
        r"got kind 'hybrid' \(attention, recurrent\): a state does not know",
    ),
    (lambda m: slide(m, keep=-1), ValueError, "wanted keep from 0 .*got -1"),
    (lambda m: slide(m, drop=0), ValueError, "wanted drop from 1 .*got 0"),
    (lambda m: slide(m, keep=[0, 0]), ValueError, r"one integer for keep, got the shape \(2,\)"),
    (lambda m: slide(m, 7), ValueError, "sequence ids from 0 to 2, got 7"),
    (lambda m: slide(donated(m)), ValueError, DONATED),
    (lambda m: extend(donated(m)), ValueError, DONATED),
    (lambda m: extend(m, [0, 0]), ValueError, r"one integer for done, got the shape \(2,\)"),
    (lambda m: extend(m, group=0), ValueError, "group of at least 1, got 0"),
    (lambda m: extend(m, width=5), ValueError, "multiple of group=2, got 5"),
    # drafts
    (lambda m: loops.lookup([[1]], ngram=0), ValueError, "ngram of at least 1, got 0"),
    (lambda m: loops.lookup([[1]], branches=0), ValueError, "branches of at least 1, got 0"),
    (lambda m: loops.lookup([5, 9]), ValueError, r"tokens for each text, got \[5, 9\]"),
    (lambda m: loops.lookup([[1]], ngram=4, recent=4), ValueError, "more than ngram = 4 .* got 4"),
    (lambda m: draft(m, texts=0), ValueError, "texts of at least 1"),
    (lambda m: draft(donated(m)), ValueError, f"the draft's memory .* {DONATED}"),
    (lambda m: speculate(m, draft(PAIR.make())), ValueError, "the 3 sequences .* got one of 2"),
    (lambda m: speculate(m, forward), TypeError, "wanted a draft, such as loops.lookup"),
    (lambda m: speculate(m, loops.lookup([[1], [2]])), ValueError, "of 1 texts, got one of 2"),
    (lambda m: branches(m, 2), ValueError, "2 branches of 2 texts, .* got 3 sequences"),
    (lambda m: branches(filled(2, kind=SPLIT), 1), ValueError, "got 3 sequences in 3 streams"),
    (lambda m: loops.draft_tree(forward, None, m, texts=2), ValueError, "the draft's memory with"),
]


@pytest.fixture(scope="module")
def memory():
    return jax.tree.map(jnp.copy, filled(2, 3))


@pytest.mark.parametrize(("call", "error", "message"), LOOPS, ids=[one[2] for one in LOOPS])
def test_loop_bad_argument_raises(call, error, message, memory):
    with pytest.raises(error, match=message):
        call(memory)
    assert not any(x.is_deleted() for x in jax.tree.leaves(memory))


def test_speculate_too_few_states_raises():
    memory = load("granite_hybrid").make_memory(cells=16, sequences=2, rollback=2)
    wanted = "to keep 3 earlier states or more, .* with rollback=2: make it with rollback=3"
    with pytest.raises(ValueError, match=f"wanted the memory {wanted}"):
        speculate(memory, loops.lookup([[1]]))
    with pytest.raises(ValueError, match=f"wanted the draft's memory {wanted}"):
        loops.draft_model(forward, None, memory)
    with pytest.raises(ValueError, match="attention alone for branches=2, since a state belongs"):
        speculate(memory, loops.lookup([[1]], tries=2, branches=2))


NUMBERS = {
    "temperature": [-1.0, float("inf"), [1.0, -1.0]],
    "top_p": [0.0, 2.0, float("nan"), 1e-46],  # less than float32 holds
    "min_p": [1.5],
    "repeat_penalty": [0.0, 1e39],  # more than float32 holds
    "presence_penalty": [float("inf")],
}


def test_make_sampler_number_out_of_range_raises():
    for name, values in NUMBERS.items():
        for value in values:
            with pytest.raises(ValueError, match=f"^{name} must be .*{re.escape(str(value))}$"):
                make_sampler(**{name: value})


ruled = partial(constrained, make_sampler(), first=1, allowed=parity, advance=other)
traced = jax.jit(lambda **numbers: make_sampler(**numbers))
EACH = re.escape("temperature [] or [2], one for each text, got (3,)") + "$"
SAMPLERS = [
    (lambda: make_sampler(top_k=2**32 + 1), ValueError, "from 0 to 2147483647, got 4294967297"),
    (lambda: make_sampler(top_k=1.5), TypeError, "wanted integers for top_k, got float64"),
    (lambda: make_sampler(min_p="0.1"), TypeError, "wanted numbers for min_p, got '0.1'"),
    (lambda: traced(top_k=2.0), TypeError, "wanted integers for top_k, got float32"),
    (lambda: traced(temperature=np.ones((2, 2))), ValueError, "and finite, one number"),
    (lambda: make_sampler(temperature=np.ones(3)).start(NONE), ValueError, EACH),
    (lambda: traced(temperature=np.ones(3)).start(NONE), ValueError, EACH),
    (lambda: ruled(allowed=lambda s: jnp.ones(3)), ValueError, r"\[V\] bool .*'float32\[3\]'"),
    (lambda: ruled(allowed=None), TypeError, "wanted a function allowed, got .*None"),
    (lambda: ruled(first=()), ValueError, "at least one array in first"),
    (lambda: ruled().adjust(LOGITS, ruled().start(NONE)), ValueError, r"\(8,\) .*, got \(5,\)"),
]


RULE = Rule(first=0, allowed=lambda s: jnp.arange(VOCABULARY) > s, advance=lambda s, token: token)
REQUESTS = [
    (dict(prompt=[]), ValueError, r"a prompt \[n\] of at least one token, got the shape \(0,\)"),
    (dict(prompt=[-1]), ValueError, "the tokens of a prompt from 0 to"),
    (dict(limit=0), ValueError, "limit of at least 1, got 0"),
    (dict(limit=1.5), TypeError, "an integer for limit, got 1.5"),
    (dict(seed=2**32), ValueError, "seed of at most 4294967295, got 4294967296"),
    (dict(stop=[1] * 5), ValueError, r"at most 4 stop tokens .* got 5: .*most_stops="),
    (dict(stop=3), ValueError, r"wanted a list of stop tokens \[n\], got 3"),
    (dict(sampling=None), TypeError, "wanted sampling options by name, got None"),
    (dict(sampling=dict(heat=1.0)), ValueError, "options of min_p.*, got 'heat': .* allow="),
    (dict(sampling=dict(top_k=[1, 2])), ValueError, r"one number for top_k, got the shape \(2,\)"),
    (dict(sampling=dict(top_p=0.0)), ValueError, "top_p must be above 0"),
    (dict(limit=99), ValueError, "cells for 99 tokens, of a prompt of 1 and a limit of 99 less"),
    (dict(rule_state=[0, 1]), ValueError, "first, 'int32.*got .*'int32"),
]


def test_submit_bad_request_raises():
    engine = Engine(forward, None, POOL.make(), chunk=8, rule=RULE)
    for request, error, message in REQUESTS:
        with pytest.raises(error, match=message):
            engine.submit(Request(**(dict(prompt=[1], limit=1) | request)))
        assert not engine.busy, message


def engine(memory=None, **options):
    return Engine(forward, None, POOL.make() if memory is None else memory, **options)


def store(memory=None, holders=(2, 3), **options):
    memory = POOL.make() if memory is None else memory
    return prefix.make_store(memory, holders=holders, **options)


LONG, RULED = Request(prompt=[1] * 25, limit=1), Request(prompt=[1], limit=1, rule_state=0)
ENGINES = [
    (lambda: Engine(3, None, POOL.make()), TypeError, "a function forward, see prefill, got .*int"),
    (lambda: engine(filled(2)), ValueError, "an empty memory, got one with 2 cells in use"),
    (lambda: engine(chunk=0), ValueError, "chunk of at least 1, got 0"),
    (lambda: engine(allow=["heat"]), ValueError, "to allow of temperature, .* got 'heat'"),
    (lambda: engine().submit([1]), TypeError, "wanted a Request, got <class 'list'>"),
    (lambda: engine().cancel(0), ValueError, "an id that submit returned, got 0"),
    (lambda: engine().tokens_of(99), ValueError, "an id that submit returned, got 99"),
    (lambda: engine(reserve=False).submit(LONG), ValueError, "cells for 25 tokens, of a prompt of"),
    (lambda: engine(rule=3), TypeError, "wanted a Rule, got <class 'int'>"),
    (lambda: engine(rule=replace(RULE, first=())), ValueError, "one array in first, got none"),
    (lambda: engine().submit(RULED), ValueError, "no rule_state without a rule"),
    (lambda: engine(store=3), TypeError, "wanted a store, make_store makes it, got <class 'int'>"),
    (lambda: engine(store=store(SMALL.make(), [0])), ValueError, "that the store was made for"),
    (lambda: engine(store=store(holders=range(4))), ValueError, "with all 4 as holders"),
    (lambda: store(filled(2), [0]), ValueError, "hold nothing, got .0."),
    (lambda: store(holders=[]), ValueError, "one sequence or more"),
    (lambda: store(cells=0), ValueError, "cells"),
    (lambda: prefix.reuse(POOL.make(), store(), [1], 2), ValueError, "no holder .*, got 2"),
    (lambda: prefix.reuse(POOL.make(), store(), [], 0), ValueError, "tokens"),
    (lambda: prefix.reuse(SMALL.make(), store(), [1], 0), ValueError, "that the store was made"),
    (lambda: prefix.remember(POOL.make(), store(), [1], 1), ValueError, "goes on at 0"),
    (lambda: prefix.evict(POOL.make(), store(), cells=-1), ValueError, "cells"),
    (lambda: jax.jit(prefix.make_store)(POOL.make(), holders=[2]), ValueError, "outside of jit"),
]


OTHERS = SAMPLERS + ENGINES


@pytest.mark.parametrize(("call", "error", "message"), OTHERS, ids=[one[2] for one in OTHERS])
def test_sampler_engine_or_store_bad_argument_raises(call, error, message):
    with pytest.raises(error, match=message):
        call()
