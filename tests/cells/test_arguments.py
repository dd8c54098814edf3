"""Arguments are checked before they are cast: a list of mistakes and their exceptions."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import CacheSpec, make_batch, make_cache
from jaxkv.cache import merge
from jaxkv.hybrid import compose_hybrid_cache
from tests.helpers.caches import GROUPS, attention_cache, delete_copy, parse_cache
from tests.helpers.mistakes import assert_raises, mistakes

NEAR = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2, window=jaxkv.Window.sliding(4))
STATE = {"x": ((), jnp.float32)}


@functools.cache
def small():
    return parse_cache("0{0} 1{0} 0{1}")


@functools.cache
def states():
    return make_cache(CacheSpec.recurrent(layers=1, states=STATE), sequences=3)


@functools.cache
def make_deleted():
    return delete_copy(small())


@functools.cache
def start_step():
    """A step in a cache of one layer with two heads of 4 numbers."""
    cache = make_cache(CacheSpec.attention(layers=1, kv_heads=2, head_dim=4), cells=4)
    return jaxkv.apply(cache, jaxkv.init_batch(cache, make_batch([1])))


def beam_of(sequences):
    options = dict(num_beams=2, num_tokens=3, sequences=sequences)
    return jaxkv.generation.beam(None, None, GROUPS.make(), jnp.zeros((1, 16)), **options)


def insert_donated_twice():
    cache = GROUPS.make()
    return jaxkv.insert(jaxkv.seq_rm(cache, 0).cache, cache, 0, 1, donate=True)


def in_host_memory():
    return jaxkv.sharding.move(small(), jax.devices()[0], memory_kind="pinned_host")


@functools.cache
def stack_twice(make):
    return jax.tree.map(lambda x: jnp.stack([x, x]), make())


class OneKey(jaxkv.Placement):
    def sort_keys(self, stream):
        return stream.free.sum()


SHARED = partial(make_batch, [[1], [2]], sequences=[[0, 3], 1])
APART = partial(make_batch, [1, 2], sequences=[0, 2])
ROPE = jaxkv.Rope.make(4)
HEADS, PLACES = np.ones((1, 3, 2, 4), np.float32), np.zeros((1, 3), np.int32)


def kv(layers=2, cells=8, kv_heads=1, head_dim=4, sequences=3, **options):
    sizes = dict(layers=layers, cells=cells, kv_heads=kv_heads, head_dim=head_dim)
    return attention_cache(**sizes, sequences=sequences, **options)


def recurrent(states=STATE, layers=1, **options):
    return make_cache(CacheSpec.recurrent(layers, states), **options)


def beside(**options):
    """A hybrid cache; both parts share forks in a stream and copy them between streams."""
    return compose_hybrid_cache((kv(), (0, 1)), (recurrent(**options), (2,)))


def attend(layer=0, q=None, k=None, v=None, **options):
    q, k, v = (X if x is None else x for x in (q, k, v))
    return jaxkv.attend(start_step(), layer, q, k, v, **options)


def attend_twice():
    return jaxkv.attend(attend()[0], 0, X, X, X)


def read_states_late():
    step = jaxkv.write_states(start_states_step(), 0, {"x": np.ones(1, np.float32)})
    return jaxkv.read_states(step, 0)


@functools.cache
def start_states_step():
    return jaxkv.apply(states(), jaxkv.init_batch(states(), make_batch([1])))


@functools.cache
def start_step_apart():
    """A step in a cache whose parts serve layers 0 and 2."""
    cache = compose_hybrid_cache((kv(layers=1), (0,)), (kv(layers=1), (2,)))
    return jaxkv.apply(cache, jaxkv.init_batch(cache, make_batch([1])))


def read_deleted_states():
    step = start_states_step()
    return jaxkv.read_states(replace(step, buffers=delete_copy(step.buffers)), 0)


def merge_unlike(make):
    """A table with the buffers of a cache that has more sequences and streams."""
    return merge(make().table, make(sequences=2, streams=2).buffers)


X, SEES = np.ones((1, 1, 2, 4), np.float32), np.ones((1, 1, 3), bool)
KEYS = np.ones((1, 2, 3, 4), np.float32)
IDS = "3", "-2", "2**70", "[[0]]", "np.uint32(2**32-1)", "np.int64(2**32)", "jnp.uint32(2**32-1)"
NO_INTEGERS = "1.9", "-0.9", "'1'", "None", "True", "jnp.float32('nan')", "np.float64(1)"
TAKE_INTEGERS = "seq_rm(small(), 0, {}) | seq_cp(small(), 0, {})"
TAKE_INTEGERS += " | seq_add(small(), 0, 0, -1, delta={}) | seq_div(small(), 0, 0, -1, divisor={})"
TAKE_INTEGERS += " | make_batch([{}]) | make_batch([1], sequences=[{}])"
USES = "{}.num_used_cells() | {}.check() | clear({}) | init_update({}) | defrag_plan({})"
USES += " | show({}) | {}.seq_pos_max(0) | seq_rm({}, 0) | seq_cp({}, 0, 1).cache"
USES += " | init_batch({}, make_batch([1])) | plan_step({}, [5])"
USES += " | insert({0}, {0}, 0, 1) | extract({}, 0, cells=4)"
MOVES = "seq_add({}, 0, 0, -1, delta=1) | jax.jit(seq_div)({}, 0, 0, -1, divisor=2)"
MOVES += " | {}.can_seq_add(0, 0, -1, delta=1)"
MOVES += " | generation.context_shift({}, 0, num_keep=0, num_discard=1)"
MOVES += " | generation.self_extend({}, 0, 0, group=2, width=4)"
NO_ROPES = (
    "kv()",
    "snapshot.load(snapshot.save(kv()))",
    "compose((kv(rope=None), (0, 1)), (kv(), (2, 3)))",
)
WRONG_ID = "ValueError: expected (sequence ids from|one sequence id|seq, p0)"
INSERTED_ID = "ValueError: expected (sequence ids from|src and dst of|one sequence id or)"
WRONG_TYPE = "TypeError: expected (integers|an integer) for"
PRODUCTS = [
    ("seq_rm(small(), {}) | seq_keep(small(), {})", IDS, WRONG_ID),
    ("seq_rm(small(), {})", [x for x in NO_INTEGERS if x != "None"], WRONG_TYPE),
    ("insert(small(), small(), {}, 0) | insert(small(), small(), 0, {})", IDS, INSERTED_ID),
    ("extract(small(), {}, cells=4)", IDS, INSERTED_ID),
    ("insert(small(), small(), 0, {}) | extract(small(), 0, cells={})", NO_INTEGERS, WRONG_TYPE),
    (TAKE_INTEGERS, NO_INTEGERS, WRONG_TYPE),
    (MOVES, NO_ROPES, "ValueError: ^expected a cache made with rope= to move keys"),
    (USES, ["make_deleted()"], "ValueError: got one whose buffers were donated; use"),
    (
        USES,
        ["stack_twice(small)", "stack_twice(states)"],
        "ValueError: got a batch of them; .*take one",
    ),
]
CASES = [
    (call.format(x), outcome)
    for calls, values, outcome in PRODUCTS
    for call in calls.split(" | ")
    for x in values
]


@pytest.mark.parametrize(("call", "outcome"), CASES + mistakes("arguments"))
def test_bad_argument_raises(call, outcome):
    assert_raises(call, outcome, globals())
