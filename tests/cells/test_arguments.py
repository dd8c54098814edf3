"""What callers pass is checked before it is cast: no integer turns into another in silence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from jaxkv.kv import slots
from jaxkv.stamp import content
from tests.memories import SMALL, SPLIT, WINDOW, assert_identical, filled

BIG = 2**31 - 1
ONE = dict(layers=1, kv_heads=1, head_dim=4)


@pytest.mark.parametrize(
    "wrong", [2**70, np.uint32(2**32 - 1), np.int64(2**32), jnp.uint32(2**32 - 1), 3, -2, [[0]]]
)
def test_a_sequence_that_is_none_is_refused(wrong):
    memory = filled(2, 1)
    for verb in (jaxkv.seq_rm, jaxkv.seq_keep, jaxkv.can_seq_rm):
        with pytest.raises(ValueError, match="wanted (sequence ids from|one sequence id|seq, p0)"):
            verb(memory, wrong)


@pytest.mark.parametrize("wrong", [1.9, -0.9, "1", None, True, jnp.float32("nan"), np.float64(1)])
def test_what_is_no_integer_is_refused(wrong):
    memory = filled(2, 1)
    for use in (
        lambda: jaxkv.seq_rm(memory, wrong),
        lambda: jaxkv.seq_rm(memory, 0, wrong),
        lambda: jaxkv.seq_add(memory, 0, 0, -1, wrong),
        lambda: jaxkv.seq_div(memory, 0, 0, -1, wrong),
        lambda: jaxkv.seq_cp(memory, 0, wrong),
        lambda: make_batch([wrong]),
        lambda: make_batch([1], sequences=[wrong]),
    ):
        with pytest.raises(TypeError, match="wanted (integers|an integer) for"):
            use()


def test_bounds_are_not_counted_from_the_end():
    memory = filled(2, 1)
    for use in (
        lambda at: jaxkv.seq_rm(memory, 0, at),
        lambda at: jaxkv.seq_rm(memory, [0, 1], [0, at]),
        lambda at: jaxkv.seq_rm(memory, 0, 0, at),
        lambda at: jaxkv.can_seq_rm(memory, 0, at),
        lambda at: jaxkv.seq_cp(memory, 0, 1, at),
        lambda at: jaxkv.seq_add(memory, 0, at, -1, 1),
        lambda at: jaxkv.seq_div(memory, 0, 0, at, 2),
    ):
        with pytest.raises(ValueError, match=r"wanted p[01] from -1 to .*, got -2: .*beginning"):
            use(-2)
    traced = jax.jit(lambda at: jaxkv.seq_rm(memory, 0, at)[0])
    assert_identical(traced(-2), traced(-1))


def test_batches_of_other_integers():
    assert make_batch(np.array([1, 2], np.uint8), sequences=np.int64(1)).sequences.dtype == np.int32
    with pytest.raises(ValueError, match="wanted sequences from .* got 4294967296"):
        make_batch([1], sequences=np.array([2**32]))
    with pytest.raises(TypeError, match="wanted integers for positions, got float64"):
        make_batch([1, 2], positions=[0.6, 1.2])
    with pytest.raises(TypeError, match="wanted bool for valid, got float64"):
        make_batch([1, 2], valid=[0.0, 1.0])
    with pytest.raises(ValueError, match="wanted embeddings .* of floats, got int"):
        make_batch(embeddings=np.ones((2, 4), int))


@pytest.mark.parametrize("seq", [2**32 - 1, 2**31, 3])
def test_a_traced_unsigned_id_that_is_none_changes_nothing(seq):
    memory = filled(2, 1)
    after, ok = jax.jit(lambda seq: jaxkv.seq_rm(memory, seq))(jnp.uint32(seq))
    assert ok
    assert_identical(after, memory)


def test_no_position_reaches_the_end():
    """2**31 - 1 is one past the last position: nothing is moved there, nor past it."""
    memory = SMALL.make()
    plan = jaxkv.init_batch(memory, make_batch([1], positions=[BIG - 1])).check()
    memory = jaxkv.apply(memory, plan)
    for delta in (1, 2, BIG):
        assert not jaxkv.can_seq_add(memory, 0, 0, -1, delta)
        assert_identical(jaxkv.seq_add(memory, 0, 0, -1, delta), memory)
    assert jaxkv.can_seq_add(memory, 0, 0, -1, -1)
    assert jaxkv.seq_pos_max(jaxkv.seq_add(memory, 0, 0, -1, -1), 0) == BIG - 2
    assert not jaxkv.init_batch(memory, make_batch([2])).ok
    assert not jaxkv.init_batch(SMALL.make(), make_batch([1], positions=[BIG])).ok


def test_a_state_does_not_reach_the_end_either():
    memory = jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1], positions=[BIG - 1])))
    assert not jaxkv.can_seq_add(memory, 0, 0, -1, 1)
    assert_identical(jaxkv.seq_add(memory, 0, 0, -1, 1), memory)
    assert jaxkv.seq_pos_max(jaxkv.seq_add(memory, 0, 0, -1, -5), 0) == BIG - 6


def test_what_a_dead_sequence_held_does_not_reach_the_end_either():
    """Its states are gone; up to where it was dead moves as they would."""
    memory = jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1] * 8)))
    memory = jaxkv.seq_cp(memory, 0, 1, 0, 5)  # no state stands after position 4
    assert memory.table.dead_until.tolist() == [0, 5]
    assert jaxkv.can_seq_add(memory, 1, 0, -1, BIG - 5)
    assert not jaxkv.can_seq_add(memory, 1, 0, -1, BIG - 4)
    moved = jaxkv.seq_add(memory, 1, 0, -1, 3)
    assert moved.table.dead_until.tolist() == [0, 8]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"placement": "contigous"}, "wanted a placement of .*'contiguous'.*, got 'contigous'"),
        ({"placement": "striped"}, "wanted shards for striped cells, got none: pass shards="),
        ({"placement": "striped", "shards": 0}, "wanted shards of at least 1, got 0"),
        ({"placement": "striped", "shards": 3}, "cells that 3 shards divide, got 8: take 9"),
        ({"shards": 1}, "shards only with placement='striped', got 1 and 'scattered'"),
        ({"dtype": jnp.int16}, "wanted a floating dtype .* or int8 .*, got int16: .* take int8"),
        ({"dtype": "uint8"}, "wanted a floating dtype .* or int8 .*, got uint8"),
        (
            {"dtype": jnp.float8_e8m0fnu},
            "wanted a floating dtype with signs and NaN .*, got float8",
        ),
        ({"value_dim": 0}, "wanted value_dim of at least 1, got 0"),
        ({"ubatch_size": 8}, "pass cells alone, or leave it out"),
        ({"rollback": 8}, "pass cells alone, or leave it out"),
        ({"kv_heads": (1, 2, 3)}, "wanted kv_heads for all layers or 2, one each, got 3"),
        ({"streams": 2}, "wanted streams that deal out 3 sequences evenly"),
        ({"cells": 2**30}, "wanted cells of a stream of at most 1073741823, got 1073741824"),
        ({"cells": None, "window": jaxkv.window.sliding(2**30)}, "cells of a stream of at most"),
        ({"sequences": 2**31}, "wanted sequences of at most 2147483647, got 2147483648"),
        ({"kv_heads": 2**31 - 1, "head_dim": 2**31 - 1}, "fewer than 2..60 numbers of keys"),
    ],
)
def test_a_memory_that_cannot_be_is_refused(wrong, message):
    sizes = {"layers": 2, "cells": 8, "kv_heads": 1, "head_dim": 4, "sequences": 3}
    with pytest.raises(ValueError, match=message):
        jaxkv.make_kv_cache(**{**sizes, **wrong})
    with pytest.raises(TypeError, match="wanted an integer for layers, got 2.5"):
        jaxkv.make_kv_cache(**{**sizes, "layers": 2.5})


def test_windows_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="wanted a window's rule of .*, got 'std'"):
        jaxkv.window.Window(4, "std")
    with pytest.raises(TypeError, match="wanted an integer for the width of a window"):
        jaxkv.window.sliding(2.5)


def test_numbers_that_no_int32_holds_are_refused_by_name():
    memory = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=2)
    state = {"x": ((2,), jnp.float32)}
    for size, call in (
        ("group", lambda n: jaxkv.loops.extend(memory, 0, 0, group=n, width=n)),
        ("width", lambda n: jaxkv.loops.extend(memory, 0, 0, group=1, width=n)),
        ("max_moves", lambda n: jaxkv.defrag_plan(memory, max_moves=n)),
        ("the width of a window", jaxkv.window.chunked),
        ("rollback", lambda n: jaxkv.make_recurrent_cache(layers=1, states=state, rollback=n)),
    ):
        for n in (2**31, 2**70):
            with pytest.raises(ValueError, match=f"wanted {size}.* of at most 2147483647, got {n}"):
                call(n)
    with pytest.raises(ValueError, match="wanted states of a stream of at most 1073741823"):
        jaxkv.make_recurrent_cache(layers=1, states=state, rollback=2**30)
    with pytest.raises(ValueError, match=f"wanted sequence ids from 0 to 1, got {2**70}"):
        jaxkv.seq_pos_max(memory, [0, 2**70])
    with pytest.raises(ValueError, match=r"one of \[1, 2147483647\], got 2"):
        jaxkv.make_kv_cache(
            layers=1, cells=4, kv_heads=1, head_dim=2, sequences=2**31 - 1, streams=2
        )


def test_layers_of_a_hybrid_that_cannot_be_are_refused():
    part = jaxkv.make_kv_cache(layers=2, cells=4, kv_heads=1, head_dim=2)
    with pytest.raises(ValueError, match="wanted a layer of at least 0, got -1"):
        jaxkv.make_hybrid_cache((part, (-1, 0)))
    with pytest.raises(TypeError, match="wanted an integer for a layer, got 0.5"):
        jaxkv.make_hybrid_cache((part, (0.5, 1)))
    for layers in ((0, 0), (0,), (0, 1, 2)):
        with pytest.raises(ValueError, match="wanted the numbers of a part's 2 layers, each once"):
            jaxkv.make_hybrid_cache((part, layers))
    with pytest.raises(TypeError, match="wanted pairs of a memory and its layers"):
        jaxkv.make_hybrid_cache(part)


def test_of_the_parts_of_a_hybrid_the_smaller_limits_hold():
    window, states = jaxkv.window.sliding(4), {"x": ((), jnp.float32)}
    parts = [
        *(jaxkv.make_kv_cache(**ONE, window=window, ubatch_size=size) for size in (8, 4)),
        *(jaxkv.make_recurrent_cache(layers=1, states=states, rollback=most) for most in (3, 5)),
    ]
    memory = jaxkv.make_hybrid_cache(*((part, (layer,)) for layer, part in enumerate(parts)))
    facts = jaxkv.split(memory)[0].facts
    assert (facts.ubatch_size, facts.rollback) == (4, 3)


def test_sizes_may_differ_from_layer_to_layer():
    memory = jaxkv.make_kv_cache(
        layers=2, cells=4, kv_heads=(1, 2), head_dim=(4, 6), value_dim=(2, 3)
    )
    assert [k.shape for k in memory.buffers.k] == [(1, 1, 4, 4), (1, 2, 4, 6)]
    assert [v.shape for v in memory.buffers.v] == [(1, 1, 4, 2), (1, 2, 4, 3)]


def test_a_traced_foreign_id_fits_nowhere():
    """`batch.only(plan.fits)` then leaves nothing, instead of the same batch once more."""
    memory = SMALL.make()
    plan = jax.jit(lambda ids: jaxkv.init_batch(memory, make_batch([1, 2], sequences=ids)))(
        jnp.array([0, 7])
    )
    assert not plan.ok and not plan.fits.any()
    with pytest.raises(jaxkv.RefusedError, match="names a sequence that the memory does not have"):
        plan.check()


def test_a_step_names_each_sequence_once():
    memory = filled(2, 1)
    with pytest.raises(ValueError, match="wanted each sequence at most once"):
        jaxkv.plan_step(memory, jnp.array([1, 2]), jnp.array([0, 0]), jnp.array([True, True]))
    step = jax.jit(lambda ids: jaxkv.plan_step(memory, ids, ids, jnp.ones(3, bool)))
    ubatch, ok = step(jnp.array([0, 0, 1]))
    assert not ok
    assert_identical(jaxkv.apply(memory, ubatch), memory)
    with pytest.raises(ValueError, match="of one shape"):
        jaxkv.plan_step(memory, jnp.array([1, 2]), jnp.array([0]), jnp.array([True]))
    with pytest.raises(ValueError, match="nothing to plan: .* where no sequence fits"):
        jaxkv.init_batch(memory, make_batch([1]).only(np.zeros(3, bool)))


def test_flags_that_could_be_indices_are_bools():
    with pytest.raises(
        TypeError, match="wanted bool for outputs, got int64: one for each, and not ind"
    ):
        make_batch([5, 6], outputs=[0, 1])
    batch = make_batch([1, 2], sequences=[0, 2])
    with pytest.raises(
        TypeError, match="wanted bool for sequences that stay, got int64: one for each"
    ):
        batch.only([0, 2])
    with pytest.raises(ValueError, match="a bool for each sequence, .* got 2 for .* sequence 2"):
        batch.only([True, False])
    assert batch.only([True, False, False]).valid.tolist() == [True, False]
    shared = make_batch([[1], [2]], sequences=[[0, 3], 1])
    with pytest.raises(ValueError, match="got 3 for a batch with sequence 3"):
        shared.only([True] * 3)


def test_flags_of_a_step_may_be_integers():
    memory = filled(1, 2)
    steps = [jaxkv.plan_step(memory, [5, 6], [0, 1], valid) for valid in ([1, 0], [True, False])]
    assert_identical(*steps)
    with pytest.raises(TypeError, match="wanted bool for valid, got float32"):
        jaxkv.plan_step(memory, [5], [0], np.ones(1, np.float32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxkv.init_batch(SMALL.make(), [1, 2]), "wanted a batch, got <class 'list'>"),
        (lambda: jaxkv.make_kv_cache(cells=4, window=128, **ONE), r"wanted a window, .*got 128"),
        (lambda: jaxkv.make_kv_cache(cells=4, rope=1e4, **ONE), r"wanted a rope, .*got 10000.0"),
        (lambda: jaxkv.make_recurrent_cache(layers=1, states=["x"]), r"wanted states as a mapping"),
        (
            lambda: jaxkv.make_recurrent_cache(layers=1, states={"x": (3,)}),
            r"wanted \(shape, dtype\) for the state x, got \(3,\)",
        ),
        (
            lambda: jaxkv.make_recurrent_cache(layers=1, states={"x": (3, jnp.float32)}),
            r"wanted \(shape, dtype\) for the state x, got \(3, ",
        ),
        (lambda: jaxkv.make_kv_cache(cells=4, dtype="float31", **ONE), "a dtype .*, got 'float31'"),
        (
            lambda: jaxkv.make_kv_cache(cells=True, **ONE),
            "wanted an integer for cells .*, got True",
        ),
    ],
)
def test_what_is_of_another_type_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_a_batch_of_memories_is_gone_over_by_vmap():
    one = filled(2, 1)
    two = jax.tree.map(lambda x: jnp.stack([x, x]), one)
    hybrid = jaxkv.make_hybrid_cache((one, (0, 1)), (one, (2, 3)))
    two_hybrid = jax.tree.map(lambda x: jnp.stack([x, x]), hybrid)
    states = jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=3)
    two_states = jax.tree.map(lambda x: jnp.stack([x, x]), states)
    step = [5], [0], [True]
    for memory in (two, two_hybrid, two_states):
        for verb in (
            jaxkv.used,
            jaxkv.defrag_plan,
            lambda memory: jaxkv.seq_pos_max(memory, 0),
            lambda memory: jaxkv.seq_rm(memory, 0),
            lambda memory: jaxkv.init_batch(memory, make_batch([1])),
            lambda memory: jaxkv.plan_step(memory, *step),
        ):
            with pytest.raises(ValueError, match="wanted one memory, got a batch .* jax.vmap"):
                verb(memory)
    assert jax.vmap(jaxkv.used)(two).tolist() == [3, 3]


KEY = jnp.ones((1, 1, 2, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (0, KEY[..., :3], KEY, KEY),
            r"wanted q .* \(1, 1, 'H', 4\), H a multiple of 2, got .* 3\)",
        ),
        ((0, KEY[:, :, :1], KEY, KEY), "H a multiple of 2"),
        ((0, KEY[0], KEY, KEY), r"wanted q .*, got \(1, 2, 4\)"),
        ((0, [1.0], KEY, KEY), "wanted an array for q, got <class 'list'>"),
        ((1.0, KEY, KEY, KEY), "wanted a layer as an integer .*, got 1.0: each layer has arrays"),
        ((1, KEY, KEY, KEY), "wanted a layer from 0 to 0, got 1"),
    ],
)
def test_what_attend_wants_is_named(arguments, message):
    memory = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=2, head_dim=4)
    layer, q, k, v = arguments
    plan = jaxkv.init_batch(memory, make_batch([1]))
    with pytest.raises((TypeError, ValueError), match=message):
        jaxkv.attend(jaxkv.apply(memory, plan), layer, plan.ubatches[0], q, k, v)


def test_a_layer_is_known_while_tracing():
    memory = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=2, head_dim=4)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1])).ubatches
    with pytest.raises(TypeError, match="known while tracing, got .*go over the layers in Python"):
        jax.lax.fori_loop(
            0, 1, lambda i, memory: jaxkv.attend(memory, i, ubatch, KEY, KEY, KEY)[0], memory
        )


def test_states_come_by_name():
    memory = jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)})
    plan = jaxkv.init_batch(memory, make_batch([1]))
    with pytest.raises(TypeError, match=r"wanted states by name, a dict of \['x'\], got"):
        jaxkv.write_states(jaxkv.apply(memory, plan), 0, plan.ubatches[0], jnp.ones(1))
    with pytest.raises(TypeError, match="wanted a ubatch, such as plan.ubatches"):
        jaxkv.steps_to_keep(plan, 1)


def test_what_a_loop_wants_is_named():
    memory = SMALL.make()
    with pytest.raises(TypeError, match="wanted a function, got <class 'dict'>"):
        jaxkv.prefill({}, jnp.eye(4), memory, make_batch([1]))
    for given, got in (
        (lambda weights, *_: weights, "an array of shape"),
        (lambda weights, memory, _: (weights, memory), r"\(\w+, Memory\)"),
        (lambda weights, memory, _: (memory, weights, 1), r"\(Memory, \w+, int\)"),
    ):
        with pytest.raises(ValueError, match="wanted a pair from forward, .*, got " + got):
            jaxkv.prefill(given, jnp.eye(4), memory, make_batch([1]))
    with pytest.raises(ValueError, match="wanted tokens as a list or as a list of lists, got both"):
        make_batch([[1, 2], 3])
    with pytest.raises(ValueError, match="wanted either tokens or embeddings, got neither"):
        make_batch()
    for tokens in ("hello", {1, 2}, {1: 2}, iter([1])):
        with pytest.raises(TypeError, match="wanted tokens as integers in a list or an array, got"):
            make_batch(tokens)
    with pytest.raises(TypeError, match="wanted integers for seed, got a key of jax.random"):
        sampler = loops.sampling.make_sampler(temperature=1.0)
        loops.begin(sampler, filled(2), jnp.ones((1, 4)), sequences=[0], seed=jax.random.key(0))


@pytest.mark.core
def test_rows_of_a_ubatch_are_those_that_there_may_be():
    """Padded to a power of two, but never past the sequences; a token each where they are many."""
    sizes = dict(cells=8, sequences=3, streams=3, **ONE)
    memory = jaxkv.make_kv_cache(**sizes)
    for prompts, rows in (([[1]], 1), ([[1], [2]], 2), ([[1], [2], [3]], 3)):
        (ubatch,) = jaxkv.init_batch(memory, make_batch(prompts)).ubatches
        assert ubatch.tokens.shape == (rows, 1)
    assert jaxkv.init_full(memory, ubatch_size=2).ubatches[0].tokens.shape == (3, 1)
    assert jaxkv.init_full(memory, ubatch_size=7).ubatches[0].tokens.shape == (3, 2)


def test_an_owner_beyond_the_first_word_is_written():
    memory = jaxkv.make_kv_cache(cells=4, sequences=40, **ONE)
    batch = make_batch([[1], [2, 3]], sequences=[33, 1])
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, batch).check())
    assert jaxkv.seq_pos_max(memory, [0, 1, 32, 33]).tolist() == [-1, 1, -1, 0]


@pytest.mark.parametrize("pair", [(), (1,), (1, (0,), 2), (1, (0,))])
def test_what_is_no_pair_of_a_hybrid_is_named(pair):
    with pytest.raises(TypeError, match="wanted pairs of a memory and its layers, got <class 'tup"):
        jaxkv.make_hybrid_cache(pair)
    part = jaxkv.make_kv_cache(cells=4, **ONE)
    for other in ([part, (0,)], (part,), (part, (0,), 1)):
        with pytest.raises(TypeError, match="wanted pairs of a memory and its layers"):
            jaxkv.make_hybrid_cache(other)


@pytest.mark.parametrize(
    ("kind", "lengths", "at_once", "wanted"),
    [
        (SMALL, [12, 0, 0], 1, [True]),
        (SMALL, [6, 4, 2], 4, [True]),
        (SMALL, [6, 4, 3], 4, [False]),
        (SPLIT, [8, 9, 0], 1, [True, False, True]),
        (WINDOW, [99, 99, 99], 6, [True]),  # of each, the two tokens that the next one sees
        (WINDOW, [99, 99, 99], 7, [False]),
        (WINDOW, [99, 99, 1], 7, [True]),
        (WINDOW, [5, 5, 2], 99, [True]),  # never more than the texts are long
        (WINDOW, [5, 5, 3], 99, [False]),
    ],
)
def test_what_a_memory_can_hold_at_most(kind, lengths, at_once, wanted):
    table, _ = jaxkv.split(filled(kind=kind))
    assert table.can_hold(np.array(lengths), at_once, table.spared()).tolist() == wanted


@pytest.mark.core
@pytest.mark.parametrize("size", [1, 5, 12, 99])
def test_last_positions_are_looked_for_block_by_block(size, monkeypatch):
    """The last block may overlap the one before."""
    monkeypatch.setattr(slots, "BLOCK", size)
    memory, _ = jaxkv.seq_rm(filled(7, 3, 1), 0, 5)  # positions 0 to 4, in the first cells
    table, _ = jaxkv.split(memory)
    assert table.inspect(jnp.ones(3, bool)).last.tolist() == [4, 2, 0]


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_of_an_embedding_counts(bit):
    """In each of its numbers, and in which of them it stands."""
    plain = np.array([[[1.5, -2.0]]], np.float32)
    seen = {int(content(None, jnp.asarray(plain))[0, 0])}
    for i in range(2):
        words = plain.view(np.uint32).copy()
        words[0, 0, i] ^= np.uint32(1 << bit)
        seen.add(int(content(None, jnp.asarray(words).view(jnp.float32))[0, 0]))
    seen.add(int(content(None, jnp.asarray(plain[..., ::-1]))[0, 0]))
    assert len(seen) == 4


def test_what_a_model_is_told_beside_tokens_is_never_another_number():
    """Without 64 bits JAX would cut their upper half off."""
    memory = jaxkv.make_kv_cache(**ONE, cells=4)
    told = {"small": np.array([2**31 - 1, -(2**31)]), "none": np.zeros((2, 0))}
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1, 2], extra=told)).ubatches
    assert ubatch.extra["small"][0].tolist() == [2**31 - 1, -(2**31)]
    assert ubatch.extra["none"].shape == (1, 2, 0)
    for wrong in (np.array([1, 2**40 + 7]), np.array([2**32, 0], np.uint64)):
        with pytest.raises(ValueError, match=r"for extra\['place'\], got"):
            make_batch([1, 2], extra={"place": wrong})


def test_options_of_attention_that_would_pass_for_others():
    memory = jaxkv.make_kv_cache(**ONE, cells=4)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1, 2])).ubatches
    x = jnp.ones((1, 2, 1, 4))
    for error, wanted, new, options in (
        (ValueError, "softcap above 0", (x, x, x), {"softcap": 0.0}),
        (ValueError, "softcap above 0", (x, x, x), {"softcap": np.inf}),
        (TypeError, "floats for q, got int", (x.astype(int), x, x), {}),
        (TypeError, "floats for k, got complex", (x, x + 0j, x), {}),
        (TypeError, "causal as True or False", (x, x, x), {"causal": None}),
        (TypeError, "an array for sinks", (x, x, x), {"sinks": [0.0]}),
    ):
        with pytest.raises(error, match="wanted.* " + wanted):
            jaxkv.attend(memory, 0, ubatch, *new, **options)
    with pytest.raises(TypeError, match="wanted q of floats"):
        jaxkv.ops.attention.attention(
            x.astype(int), x[:, :, 0][:, None], x[:, :, 0][:, None], jnp.ones((1, 2, 2), bool)
        )


def test_no_sequence_goes_on_from_another():
    for memory in (filled(2, 1), filled(2, 1, kind=SPLIT)):
        assert_identical(jaxkv.seq_select(memory, [], []), memory)


def test_ropes_that_turn_nothing_or_are_not_finite():
    rope = jaxkv.rope
    plain = rope.make_rope(4)
    for use in (
        lambda: rope.make_rope(-2),
        lambda: rope.make_rope(4, base=0.0),
        lambda: rope.make_rope(4, base=float("nan")),
        lambda: rope.linear(plain, factor=0.0),
        lambda: rope.linear(plain, factor=float("nan")),
    ):
        with pytest.raises(ValueError, match="wanted"):
            use()


def test_steps_and_searches_that_have_nothing_to_begin_with():
    memory = jaxkv.make_kv_cache(**ONE, cells=4)
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1, 2])).ubatches
    with pytest.raises(ValueError, match="wanted count of at least 1, got 0"):
        jaxkv.steps_to_keep(ubatch, 0)
    none = np.zeros((1, 0), int)
    with pytest.raises(ValueError, match="wanted a token at least"):
        jaxkv.plan_tokens(memory, none, [0], none.astype(bool))
    with pytest.raises(ValueError, match="got nothing in sequence 0: pass sequences="):
        jaxkv.loops.beam(None, None, memory, np.zeros(4, np.float32), width=1, steps=1)
