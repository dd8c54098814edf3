"""What callers pass is checked before it is cast: a row for each mistake, with what it raises.

Mistakes with sources stand in `test_sources.py`, those with files in `tests/snapshot`, and more of
those with loops in `tests/generation/test_loop_arguments.py`.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import (
    loops,
    make_batch,
    make_hybrid_cache,
    make_kv_cache,
    make_recurrent_cache,
    plan_step,
    plan_tokens,
    seq_rm,
    seq_select,
)
from jaxkv.ops.attention import attention
from jaxkv.rope import divide, linear, make_rope, rotate
from tests.memories import drawn

BIG = 2**31 - 1
STATE = {"x": ((), jnp.float32)}


@cache
def small():
    """Sequence 0 of two tokens and 1 of one; sequence 2 is empty."""
    return drawn("0{0} 1{0} 0{1}")


@cache
def states():
    return make_recurrent_cache(layers=1, states=STATE, sequences=3)


def lost(tree):
    copy = jax.tree.map(jnp.copy, tree)
    for x in jax.tree.leaves(copy):
        x.delete()
    return copy


@cache
def donated():
    return lost(small())


@cache
def applied():
    """A memory of one layer with two heads of 4 numbers, and the ubatch of its first token."""
    memory = make_kv_cache(layers=1, cells=4, kv_heads=2, head_dim=4)
    plan = jaxkv.init_batch(memory, make_batch([1]))
    return jaxkv.apply(memory, plan), plan.ubatches[0]


def twice(make):
    return jax.tree.map(lambda x: jnp.stack([x, x]), make())


BATCHED = [cache(partial(twice, make)) for make in (small, states)]


def bad(match, call, *args, error=ValueError, **options):
    """A row of the table; an argument that is one of the functions above is called by the test."""

    def run():
        call(*(arg() if hasattr(arg, "cache_info") else arg for arg in args), **options)

    run.__name__ = getattr(call, "__name__", "call")  # for the id of the case
    return run, error, match


mistyped = partial(bad, error=TypeError)


# ---- integers

WRONG_IDS = [2**70, np.uint32(2**32 - 1), np.int64(2**32), jnp.uint32(2**32 - 1), 3, -2, [[0]]]
NO_INTEGERS = [1.9, -0.9, "1", None, True, jnp.float32("nan"), np.float64(1)]
INTEGERS = [
    *(
        bad("wanted (sequence ids from|one sequence id|seq, p0)", verb, small, wrong)
        for verb in (jaxkv.seq_rm, jaxkv.seq_keep)
        for wrong in WRONG_IDS
    ),
    bad(f"wanted sequence ids from 0 to 2, got {2**70}", jaxkv.seq_pos_max, small, [0, 2**70]),
    *(
        mistyped("wanted (integers|an integer) for", call, *args, wrong)
        for wrong in NO_INTEGERS
        for call, *args in (
            (jaxkv.seq_rm, small),
            (jaxkv.seq_rm, small, 0),
            (jaxkv.seq_add, small, 0, 0, -1),
            (jaxkv.seq_div, small, 0, 0, -1),
            (jaxkv.seq_cp, small, 0),
            (lambda wrong: make_batch([wrong]),),
            (lambda wrong: make_batch([1], sequences=[wrong]),),
        )
    ),
    *(  # bounds are not counted from the end
        bad(r"wanted p[01] from -1 to .*, got -2: .*beginning", verb, small, *args)
        for verb, *args in (
            (jaxkv.seq_rm, 0, -2),
            (jaxkv.seq_rm, [0, 1], [0, -2]),
            (jaxkv.seq_rm, 0, 0, -2),
            (jaxkv.seq_cp, 0, 1, -2),
            (jaxkv.seq_add, 0, -2, -1, 1),
            (jaxkv.seq_div, 0, 0, -2, 2),
        )
    ),
    *(
        bad(f"wanted {name}.* of at most 2147483647, got {n}", call, n)
        for n in (2**31, 2**70)
        for name, call in (
            ("group", lambda n: loops.extend(small(), 0, 0, group=n, width=n)),
            ("width", lambda n: loops.extend(small(), 0, 0, group=1, width=n)),
            ("max_moves", lambda n: jaxkv.defrag_plan(small(), max_moves=n)),
            ("the width of a window", jaxkv.window.chunked),
            ("rollback", lambda n: make_recurrent_cache(layers=1, states=STATE, rollback=n)),
        )
    ),
]

# ---- memories that were donated, and batches of memories

USES = [
    *(jaxkv.used, jaxkv.check_invariants, jaxkv.clear, jaxkv.init_update, jaxkv.defrag_plan),
    *(lambda memory: jaxkv.seq_pos_max(memory, 0), lambda memory: jaxkv.seq_rm(memory, 0)),
    lambda memory: jaxkv.seq_cp(memory, 0, 1).cache,
    lambda memory: jaxkv.init_batch(memory, make_batch([1])),
    lambda memory: jaxkv.plan_step(memory, [5], [0], [True]),
    jaxkv.show,
]
NO_SINGLE_MEMORY = [
    *(bad("got one whose buffers were donated: go on with", use, donated) for use in USES),
    *(bad("got a batch of them: .*take each", *pair) for pair in product(USES, BATCHED)),
]

# ---- batches

SHARED = partial(make_batch, [[1], [2]], sequences=[[0, 3], 1])
APART = partial(make_batch, [1, 2], sequences=[0, 2])
BATCHES = [
    bad("either tokens or embeddings, got neither", make_batch),
    bad("either tokens or embeddings, got both", make_batch, [1], embeddings=np.ones((1, 2))),
    bad("tokens as a list or as a list of lists, got both", make_batch, [[1, 2], 3]),
    *(
        mistyped("wanted tokens as integers in a list or an array", make_batch, tokens)
        for tokens in ("hello", {1, 2}, {1: 2}, iter([1]))
    ),
    bad("wanted tokens of at least 0, got a negative one", make_batch, [1, -1]),
    bad(r"sequences .* wanted \(2,\), got \(1,\)", make_batch, [1, 2], sequences=[0]),
    bad(r"positions .* wanted \(2,\), got \(3,\)", make_batch, [1, 2], positions=[0, 1, 2]),
    bad(r"outputs .* wanted \(2,\), got \(1,\)", make_batch, [1, 2], outputs=[True]),
    bad(r"valid .* wanted \(2,\), got \(1, 2\)", make_batch, [1, 2], valid=[[True, True]]),
    bad("one id, or list of ids, for each of 2", make_batch, [[1, 2], [3]], sequences=[0]),
    bad("one id, or list of ids, for each of 2", make_batch, [[1, 2], [3]], sequences=3),
    # Rows of logits would be taken for those of others.
    bad(r"got none for sequences \[4\]: leave those", make_batch, [[1, 2], []], sequences=[7, 4]),
    bad("sequences from .* got 4294967296", make_batch, [1], sequences=np.array([2**32])),
    mistyped("integers for positions, got float64", make_batch, [1], positions=[0.6]),
    mistyped("wanted bool for valid, got float64", make_batch, [1], valid=[0.0]),
    bad("wanted embeddings .* of floats, got int", make_batch, embeddings=np.ones((2, 4), int)),
    # Flags that could be indices.
    mistyped("bool for outputs, got int64: one for", make_batch, [5, 6], outputs=[0, 1]),
    mistyped("sequences that stay, got int64: one", lambda: APART().only([0, 2])),
    bad("got 2 for a batch with sequence 2", lambda: APART().only([True, False])),
    bad("got 3 for a batch with sequence 3", lambda: SHARED().only([True] * 3)),
    # Without 64 bits JAX would cut the upper half of these integers off.
    bad(r"for extra\['a'\], got", make_batch, [1], extra={"a": np.array([2**40 + 7])}),
    bad(r"for extra\['a'\], got", make_batch, [1], extra={"a": np.array([2**32], np.uint64)}),
    bad(r"extra\['a'\] must have one entry a token", make_batch, [1, 2, 3], extra={"a": [1, 2]}),
    mistyped("wanted integers, floats or bools", make_batch, [1], extra={"a": ["x"]}),
    mistyped("wanted extra as arrays by name", make_batch, [1], extra={1: [1]}),
    mistyped("wanted extra as arrays by name", make_batch, [1], extra=[1]),
    mistyped("wanted a batch, got <class 'list'>", jaxkv.init_batch, small, [1, 2]),
    bad("nothing to plan", lambda: jaxkv.init_batch(small(), APART().only(np.zeros(3, bool)))),
]

# ---- making memories


def kv(layers=2, cells=8, kv_heads=1, head_dim=4, sequences=3, **options):
    sizes = dict(layers=layers, cells=cells, kv_heads=kv_heads, head_dim=head_dim)
    return make_kv_cache(**sizes, sequences=sequences, **options)


def recurrent(states=STATE, layers=1, **options):
    return make_recurrent_cache(layers=layers, states=states, **options)


def beside(**options):
    """A fork shares cells in one stream and copies them between several: in both parts alike."""
    return make_hybrid_cache((kv(), (0, 1)), (recurrent(**options), (2,)))


MEMORIES = [
    bad("a placement of .*'contiguous'.*, got 'contigous'", kv, placement="contigous"),
    bad("shards for striped cells, got none: pass shards=", kv, placement="striped"),
    bad("wanted shards of at least 1, got 0", kv, placement="striped", shards=0),
    bad("cells that 3 shards divide, got 8: take 9", kv, placement="striped", shards=3),
    bad("shards only with placement='striped', got 1 and 'scattered'", kv, shards=1),
    bad("a floating dtype .* or int8 .*, got int16: .* take int8", kv, dtype=jnp.int16),
    bad("floating dtype with signs and NaN .*, got float8", kv, dtype=jnp.float8_e8m0fnu),
    mistyped("a dtype .*, got 'float31'", kv, dtype="float31"),
    bad("wanted value_dim of at least 1, got 0", kv, value_dim=0),
    bad("pass cells alone, or leave it out", kv, ubatch_size=8),
    bad("pass cells alone, or leave it out", kv, rollback=8),
    bad("wanted kv_heads for all layers or 2, one each, got 3", kv, kv_heads=(1, 2, 3)),
    mistyped("wanted an integer for layers, got 2.5", kv, layers=2.5),
    mistyped("wanted a window, .*got 128", kv, window=128),
    mistyped("wanted a rope, .*got 10000.0", kv, rope=1e4),
    bad("wanted streams that deal out 3 sequences evenly", kv, streams=2),
    bad(r"one of \[1, 2147483647\], got 2", kv, sequences=BIG, streams=2),
    bad("cells of a stream of at most 1073741823, got 1073741824", kv, cells=2**30),
    bad("wanted sequences of at most 2147483647, got 2147483648", kv, sequences=2**31),
    bad("fewer than 2..60 numbers of keys", kv, kv_heads=BIG, head_dim=BIG),
    bad("wanted a window's rule of .*, got 'std'", jaxkv.window.Window, 4, "std"),
    mistyped("integer for the width of a window", jaxkv.window.sliding, 2.5),
    bad("positions, of at least 1, got 0", jaxkv.window.sliding, 0),
    bad("needs to be told its cells", kv, cells=None),
    mistyped("wanted states as a mapping", recurrent, ["x"]),
    mistyped(r"\(shape, dtype\) for the state x, got \(3,", recurrent, {"x": (3,)}),
    mistyped(r"\(shape, dtype\) for the state x, got \(3,", recurrent, {"x": (3, jnp.float32)}),
    bad("states of a stream of at most 1073741823", recurrent, rollback=2**30),
    bad("layers of at least 1, got 0", recurrent, layers=0),
    bad("sequences of at least 1, got 0", recurrent, sequences=0),
    bad("rollback of at least 0, got -1", recurrent, rollback=-1),
    bad("at least one state", recurrent, {}),
    bad(r"deal out 3 .*, one of \[1, 3\], got 2", recurrent, sequences=3, streams=2),
    bad("at least one part", make_hybrid_cache),
    bad("same number of streams, got", beside, sequences=3, streams=3),
    bad(r"same number of sequences, got \[3, 1\]", beside),
    bad("a layer of at least 0, got -1", lambda: make_hybrid_cache((small(), (-1, 0)))),
    bad("a part's 2 layers, each once", lambda: make_hybrid_cache((small(), (0, 0)))),
    bad("a part's 2 layers, each once", lambda: make_hybrid_cache((small(), (0, 1, 2)))),
    *(
        mistyped("wanted pairs of a memory and its layers, got", make_hybrid_cache, one)
        for one in (small, (1,), (1, (0,)))
    ),
]

# ---- steps, cuts and selections

NONE = np.zeros((1, 0), int)
STEPS = [
    bad(r"of one shape \[T, n\], and sequences", plan_tokens, small, [[1]], [0], [[True], [True]]),
    bad(r"got \(2,\), \(2,\) and \(2,\)", plan_tokens, small, [1, 2], [0, 1], [True, True]),
    bad(r"at most once, got \[1, 1\]", plan_tokens, small, [[1], [2]], [1, 1], [[True], [True]]),
    bad("ids from 0 to 2, got 3; a memory is made", plan_tokens, small, [[1]], [3], [[True]]),
    mistyped("wanted integers for tokens", plan_tokens, small, [[1.5]], [0], [[True]]),
    mistyped("wanted bool for valid", plan_tokens, small, [[1]], [0], [[2]]),
    bad("wanted a token at least", plan_tokens, small, NONE, [0], NONE.astype(bool)),
    bad("wanted each sequence at most once", plan_step, small, [1, 2], [0, 0], [True, True]),
    bad("of one shape", plan_step, small, [1, 2], [0], [True]),
    mistyped("bool for valid, got float", plan_step, small, [5], [0], np.ones(1)),
    bad("count of at least 1, got 0", lambda: jaxkv.steps_to_keep(applied()[1], 0)),
    mistyped("a ubatch, such as plan.ubatches", jaxkv.steps_to_keep, applied, 1),
    bad(r"p0 and p1 of one shape \[n\], or \[\]", seq_rm, small, [0, 1], [1, 2, 3]),
    bad(r"p0 and p1 of one shape \[n\], or \[\]", seq_rm, small, [[0]]),
    bad(r"of one shape \[n\], got \(2,\) and \(1,\)", seq_select, small, [0, 1], [1]),
    bad(r"each sequence at most once, got \[2, 2\]", seq_select, small, [0, 1], [2, 2]),
    bad("wanted sequence ids from 0 to 2, got 3", seq_select, small, [3], [0]),
]

# ---- layers


def attend(layer=0, q=None, k=None, v=None, **options):
    memory, ubatch = applied()
    q, k, v = (X if x is None else x for x in (q, k, v))
    return jaxkv.attend(memory, layer, ubatch, q, k, v, **options)


@cache
def states_applied():
    plan = jaxkv.init_batch(states(), make_batch([1]))
    return jaxkv.apply(states(), plan), plan.ubatches[0]


@cache
def apart():
    """A memory whose parts serve layers 0 and 2, and a ubatch."""
    memory = make_hybrid_cache((kv(layers=1), (0,)), (kv(layers=1), (2,)))
    return memory, *jaxkv.init_batch(memory, make_batch([1])).ubatches


def on_lost_buffers():
    memory, ubatch = states_applied()
    table, buffers = jaxkv.split(memory)
    return jaxkv.read_states(jaxkv.join(table, lost(buffers)), 0, ubatch)


def joined(make):
    """A table with the buffers of a memory for more sequences, each with a stream."""
    return jaxkv.join(make().table, make(sequences=2, streams=2).buffers)


X = np.ones((1, 1, 2, 4), np.float32)
LAYERS = [
    bad(r"q .* \(1, 1, 'H', 4\), H a multiple of 2, got .* 3\)", attend, q=X[..., :3]),
    bad(r"wanted q .*, got \(1, 2, 4\)", attend, q=X[0]),
    mistyped("wanted an array for q, got <class 'list'>", attend, q=[1.0]),
    bad("expected buffers of 1 streams with .* as the table has", joined, kv),
    bad("expected buffers of 1 streams with .* as the table has", joined, recurrent),
    mistyped("wanted floats for q, got int", attend, q=X.astype(int)),
    mistyped("wanted floats for k, got complex", attend, k=X + 0j),
    mistyped("a layer as an integer .*, got 1.0: each layer has arrays", attend, 1.0),
    bad("wanted a layer from 0 to 0, got 1", attend, 1),
    mistyped(
        "known while tracing, got .*go over the layers in Python",
        lambda: jax.lax.fori_loop(0, 1, lambda i, _: attend(i)[1], X),
    ),
    bad(r"of \[0, 2\], got 1", lambda one: jaxkv.attend(one[0], 1, one[1], X, X, X), apart),
    *(bad("wanted.* softcap above 0", attend, softcap=cap) for cap in (0.0, np.inf)),
    bad(r"wanted sinks \(2,\)", attend, sinks=np.zeros(3, np.float32)),
    mistyped("wanted causal as True or False", attend, causal=None),
    mistyped("wanted an array for sinks", attend, sinks=[0.0]),
    mistyped(
        "q of floats", lambda x: attention(X.astype(int), x, x, X[:, 0] > 0), X[:, 0, :, None]
    ),
    mistyped(
        r"states by name, a dict of \['x'\], got",
        *(lambda both: jaxkv.write_states(both[0], 0, both[1], X), states_applied),
    ),
    bad("buffers were donated", on_lost_buffers),
]

# ---- loops

LOOPS = [
    mistyped("got a key of jax.random", loops.start, small, [1], seed=jax.random.key(0)),
    *(
        bad("wanted a pair from forward", jaxkv.prefill, forward, None, small, make_batch([1]))
        for forward in (lambda _, memory, ubatch: (0, memory), lambda _, m, ubatch: (m, 0, 1))
    ),
]

# ---- rotations

HEADS, PLACES = np.ones((1, 3, 2, 4), np.float32), np.zeros((1, 3), np.int32)
ROPE = make_rope(4)
ROPES = [
    bad("wanted an even size, got 3", make_rope, 3),
    *(bad("wanted", make_rope, 4, base=base) for base in (0.0, np.nan)),
    *(bad("wanted", linear, ROPE, factor=factor) for factor in (0.0, np.nan)),
    bad("wanted 2 factors, one a pair, got 3", divide, ROPE, [1.0, 2.0, 3.0]),
    bad("needs heads of 16, got 4", rotate, HEADS, PLACES, make_rope(16)),
    mistyped("of floats, got int", rotate, HEADS.astype(int), PLACES, ROPE),
    mistyped("positions of int32, got float", rotate, HEADS, PLACES + 0.5, ROPE),
    bad(r"\(1, 3\) .* got \(3,\)", rotate, HEADS, PLACES[0], ROPE),
    bad("the other is None", rotate, HEADS[None], PLACES, ROPE),
]


ROWS = [*INTEGERS, *NO_SINGLE_MEMORY, *BATCHES, *MEMORIES, *STEPS, *LAYERS, *LOOPS, *ROPES]


@pytest.mark.parametrize(("call", "exception", "match"), ROWS)
def test_bad_argument_raises(call, exception, match):
    with pytest.raises(exception, match=match):
        call()
