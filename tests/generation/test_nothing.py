"""Calls with nothing in them return nothing, or raise one sentence; none fails on the device."""

import inspect
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch, prefix, snapshot
from jaxkv.loops.batching import Engine, Request, serve
from jaxkv.loops.sampling import make_sampler
from jaxkv.ops.attention import attention
from models.generate import generate_texts
from models.run import Options
from models.search import Search
from models.serving import Serving
from tests.generation.tiny import BEST, by_table

NONE, FLAGS, EMPTY = np.zeros(0, np.int32), np.zeros(0, bool), make_batch([])
NOTHING = "nothing to plan: the batch has no valid token"
ONE_ID, SOME = r"wanted one sequence id, got the shape \(0,\)", "wanted a token at least"
SIZES = dict(layers=1, kv_heads=1, head_dim=1, sequences=2)
MODEL = by_table, jnp.eye(16)


def make(streams=1):
    return jaxkv.make_kv_cache(cells=16, streams=streams, rope=None, **SIZES)


@cache
def prompted():
    """Sequence 0 of three tokens, and 1 of none."""
    return jaxkv.prefill(*MODEL, make(), make_batch([1, 2, 3])).cache


def with_source():
    return jaxkv.make_hybrid_cache(
        (make(), (0,)), (jaxkv.make_source_cache(cells=8, **SIZES), (1,))
    )


def store():
    return prefix.make_store(prompted(), holders=[1])


def attended(rows, cells=3):
    keys = jnp.zeros((rows, 1, cells, 2))
    return attention(jnp.zeros((rows, 1, 1, 2)), keys, keys, jnp.ones((rows, 1, cells), bool))


def decode(m, texts=NONE, stop=()):
    return jaxkv.decode(*MODEL[:1], BEST, MODEL[1], m, loops.start(m, texts), stop, steps=2)[2]


def speculate(m):
    draft, state = loops.lookup([]), loops.start(m, NONE)
    return loops.speculate(by_table, draft, BEST, MODEL[1], m, state, steps=2)[3]


def beam(m, logits, width=1):
    return loops.beam(*MODEL, m, logits, width=width, steps=1)


# What is called of a memory, and the sentence that it raises, or the shapes of what it returns.
CALLS = [
    ("make_batch", lambda m: make_batch([]), [(0,)] * 3),
    ("make_batch", lambda m: make_batch([[]]), r"none for sequences \[0\]: leave those lists out"),
    ("make_batch", lambda m: make_batch(embeddings=jnp.zeros((0, 8))), [(0, 8), (0,), (0,)]),
    ("init_batch", lambda m: jaxkv.init_batch(m, EMPTY), NOTHING),
    ("init_batch", lambda m: jaxkv.init_batch(m, make_batch([1], valid=[False])), NOTHING),
    ("init_batch", lambda m: jax.jit(jaxkv.init_batch)(m, EMPTY), NOTHING),
    ("init_source", lambda m: jaxkv.init_source(with_source(), EMPTY), NOTHING),
    ("make_room", lambda m: jaxkv.make_room(m, EMPTY), NOTHING),
    ("plan_step", lambda m: jaxkv.plan_step(m, NONE, NONE, FLAGS), SOME),
    ("plan_tokens", lambda m: jaxkv.plan_tokens(m, NONE[None], [0], FLAGS[None]), SOME),
    ("prefill", lambda m: jaxkv.prefill(*MODEL, m, EMPTY), NOTHING),
    ("encode", lambda m: jaxkv.encode(*MODEL, with_source(), EMPTY), NOTHING),
    ("begin", lambda m: loops.begin(BEST, m, jnp.zeros((0, 16)))[1], [(0, 1)] * 2),
    ("begin", lambda m: loops.begin(BEST, m, jnp.zeros((1, 0))), r"wanted logits \[T, V\]"),
    ("start", lambda m: loops.start(m, NONE).token, [(0,)]),
    ("decode", decode, [(0, 2)] * 2),
    ("decode", jax.jit(decode), [(0, 2)] * 2),
    ("decode", lambda m: decode(m, [1], [[]]), [(1, 2)] * 2),
    ("speculate", speculate, [(0, 2)] * 2 + [(0,)] * 3),
    ("lookup", lambda m: loops.lookup([[]]).recent, [(1, 512)]),
    ("draft_model", lambda m: loops.draft_model(*MODEL, m, texts=0), "texts of at least 1, got 0"),
    ("draft_tree", lambda m: loops.draft_tree(*MODEL, m, texts=0), "texts of at least 1, got 0"),
    ("beam", lambda m: beam(m, jnp.zeros((0, 16))), r"wanted logits \[V\] or \[1, V\]"),
    ("beam", lambda m: beam(m, jnp.zeros((1, 0))), r"wanted logits \[V\] or \[1, V\]"),
    ("beam", lambda m: beam(m, jnp.zeros((1, 16)), width=0), "width of at least 1, got 0"),
    ("slide", lambda m: loops.slide(m, NONE, keep=0, drop=1), ONE_ID),
    ("slide", lambda m: loops.slide(m, 1, keep=0, drop=1)[1], [()]),
    ("extend", lambda m: loops.extend(m, 1, 0, group=2, width=2)[1:], [(), ()]),
    ("seq_rm", lambda m: jaxkv.seq_rm(m, []).ok, [(0,)]),
    ("seq_cp", lambda m: jaxkv.seq_cp(m, 0, []).ok, [()]),
    ("seq_cp", lambda m: jaxkv.seq_cp(make(2), 0, []).ok, [()]),
    ("seq_select", lambda m: jaxkv.seq_select(m, [], []).ok, [()]),
    ("seq_keep", lambda m: jaxkv.seq_keep(m, []), ONE_ID),
    ("seq_add", lambda m: jaxkv.seq_add(m, [], 0, -1, 1), ONE_ID),
    ("seq_div", lambda m: jaxkv.seq_div(m, [], 0, -1, 1), ONE_ID),
    ("can_seq_add", lambda m: jaxkv.can_seq_add(m, [], 0, -1, 1), ONE_ID),
    ("can_resume", lambda m: jaxkv.can_resume(m, [], 0), ONE_ID),
    ("seq_pos_max", lambda m: jaxkv.seq_pos_max(m, []), [(0,)]),
    ("seq_pos_min", lambda m: jaxkv.seq_pos_min(m, []), [(0,)]),
    ("apply", lambda m: jaxkv.used(jaxkv.apply(m, jaxkv.init_update(m))), [()]),
    ("defrag_plan", lambda m: jaxkv.used(jaxkv.apply(m, jaxkv.defrag_plan(m))), [()]),
    ("rotate", lambda m: jaxkv.rotate(jnp.zeros((0, 1, 2)), NONE, jaxkv.make_rope(2)), [(0, 1, 2)]),
    ("attention", lambda m: attended(0), [(0, 1, 1, 2)]),
    ("attention", lambda m: attended(1, cells=0), [(1, 1, 1, 2)]),
    ("make_kv_cache", lambda m: jaxkv.make_kv_cache(cells=0, **SIZES), "of at least 1, got 0"),
    (
        "make_recurrent_cache",
        lambda m: jaxkv.make_recurrent_cache(layers=1, states={}),
        "one state",
    ),
    ("make_hybrid_cache", lambda m: jaxkv.make_hybrid_cache(), "at least one part"),
    ("make_sampler", lambda m: make_sampler(last_n=0), "last_n of at least 1, got 0"),
    (
        "to_bytes",
        lambda m: snapshot.load(snapshot.to_bytes(m, sequences=[])).buffers.v,
        [(1, 1, 16, 1)],
    ),
    ("load", lambda m: snapshot.load(b""), "wanted a snapshot, got what cannot be read"),
    ("inspect", lambda m: snapshot.inspect(b""), "wanted a snapshot, got what cannot be read"),
    ("load_into", lambda m: snapshot.load_into(snapshot.to_bytes(m), m, sequences=[]), r"got \[\]"),
    ("make_store", lambda m: prefix.make_store(m, holders=[]), r"one sequence or more, got \[\]"),
    ("remember", lambda m: prefix.remember(m, store(), [], 0), "prompt of at least one token"),
    ("reuse", lambda m: prefix.reuse(m, store(), [], 0), "prompt of at least one token"),
    ("evict", lambda m: prefix.evict(m, store(), cells=0)[1].texts, []),
    ("serve", lambda m: list(serve(*MODEL, make(), [])), []),
    ("submit", lambda m: list(serve(*MODEL, make(), [Request(prompt=[], limit=1)])), "one token"),
    ("generate_texts", lambda m: generate_texts(None, [], Options()), "got no prompts"),
    (
        "Search",
        lambda m: Search(None, [[1], []], width=2),
        "got none in prompt 2",
    ),
    ("Serving", lambda m: Serving(None, []), "prompts of at least one token each, got no prompts"),
    ("step", lambda m: Engine(*MODEL, make()).step(), []),
]
OTHERS = """attend check_invariants clear go_back held init_full init_update is_current join
make_rope make_source_cache nbytes read_states rollback_of save show split step_of steps_to_keep
used view warm_up write write_states"""  # are given no lists, or what a call above has made


@pytest.mark.parametrize(("name", "call", "wanted"), CALLS)
def test_calls_of_nothing_give_nothing_or_one_sentence(name, call, wanted):
    if isinstance(wanted, str):
        with pytest.raises((TypeError, ValueError), match=wanted) as raised:
            call(prompted())
        assert "\n" not in str(raised.value).split("\n---")[0]
    else:
        assert [np.shape(x) for x in jax.tree.leaves(call(prompted()))] == wanted


def test_calls_of_nothing_are_all_that_are_public():
    modules = jaxkv, loops, prefix, snapshot
    public = {
        (name, getattr(one, name)) for one in modules for name in one.__all__ if name[0].islower()
    }
    names = {name for name, one in public if inspect.isfunction(one)}
    assert names - {name for name, *_ in CALLS} == {*OTHERS.split()}
