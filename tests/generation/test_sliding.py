"""Texts longer than a memory: sliding and grouping are the verbs by hand, all or nothing."""

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
from tests.memories import (
    ROPE,
    SPLIT,
    TWO,
    Kind,
    assert_identical,
    drawing,
    filled,
    think,
)

DATA = Path(__file__).parent.parent / "data"
BEST = make_sampler()
POOL = Kind("pool", cells=24, sequences=3)
CLOSE = dict(rtol=0, atol=2e-4)

load = cache(lambda name: models.load(DATA / name))


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


def updated(memory):
    return jaxkv.apply(memory, jaxkv.init_update(memory))


def slid_by_hand(memory, seq, keep, drop):
    memory, ok = jaxkv.seq_rm(memory, seq, keep, keep + drop)
    assert ok
    return updated(jaxkv.seq_add(memory, seq, keep + drop, -1, -drop))


def extended_by_hand(memory, seq, done, group, width):
    """The loop of llama.cpp's program."""
    there = jaxkv.seq_pos_max(memory, seq).item() + 1
    while there >= done + width:
        ib = group * done // width
        bd = width // group * (group - 1)
        dd = width // group - ib * bd - width
        memory = jaxkv.seq_add(memory, seq, done, there, ib * bd)
        memory = jaxkv.seq_div(memory, seq, done + ib * bd, done + ib * bd + width, group)
        memory = jaxkv.seq_add(memory, seq, done + ib * bd + width, there + ib * bd, dd)
        there, done = there - bd, done + width // group
    return updated(memory), done


# ---- sliding


@pytest.mark.core
@pytest.mark.parametrize("kind", [POOL, TWO, SPLIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("keep", "drop"), [(1, 3), (0, 2), (2, 5), (7, 1)])
def test_sliding_is_the_verbs_by_hand(kind, keep, drop):
    """The last one leaves nothing to move."""
    memory = filled(3, 8, kind=kind)
    after, ok = loops.slide(memory, 1, keep=keep, drop=drop)
    wanted = slid_by_hand(memory, 1, keep, drop)
    assert ok
    assert_identical(after, wanted)
    assert jaxkv.seq_pos_max(after, [0, 1]).tolist() == [2, 7 - drop]
    assert not sum(jaxkv.check_invariants(after).values())
    assert jaxkv.init_batch(after, make_batch([1], sequences=1)).ok


@pytest.mark.core
def test_keys_stand_where_they_would_have_been_written():
    """Those of the first layer, which nothing but token and position make."""
    after, ok = loops.slide(filled(10, kind=POOL), 0, keep=2, drop=5)
    fresh, _ = jaxkv.prefill(forward, None, POOL.make(), make_batch([1, 2, 8, 9, 10]))
    moved, wanted = (np.asarray(jaxkv.split(each)[1].k[0]) for each in (after, fresh))
    assert ok and drawing(after) == "0{0} 1{0} . . . . . 2{0} 3{0} 4{0}"
    np.testing.assert_allclose(moved[:, :, [0, 1, 7, 8, 9]], wanted[:, :, :5], atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(("keep", "drop"), [(1, 8), (8, 1), (0, 9), (0, 2**31 - 1)])
def test_a_short_sequence_is_left_alone(keep, drop):
    """Keys that were moved before stay unrotated, too."""
    memory = jaxkv.seq_add(filled(3, 8, kind=POOL), 0, 0, -1, 2)
    after, ok = loops.slide(memory, 1, keep=keep, drop=drop)
    assert not ok
    assert_identical(after, memory)


def test_what_another_sequence_shares_is_not_moved():
    memory = filled(8, kind=POOL)
    for first, last, ok in [(0, 2, True), (0, 5, True), (0, 6, False), (6, 8, False)]:
        shared = jaxkv.seq_cp(memory, 0, 2, first, last)
        after, found = loops.slide(shared, 0, keep=2, drop=3)
        assert found == ok, (first, last)
        assert_identical(after, slid_by_hand(shared, 0, 2, 3) if ok else shared)
        other = [jaxkv.seq_keep(each, 2) for each in (shared, after)]
        assert drawing(other[0]) == drawing(other[1])


@pytest.mark.core
def test_what_a_window_let_go_of_is_not_seen_again():
    kind = Kind("window", cells=8, sequences=2, streams=2, windows=(jaxkv.window.sliding(5),))
    memory = filled(16, kind=kind)
    for keep, drop, wanted in ((2, 12, False), (0, 16, True), (2, 4, True)):
        after, ok = loops.slide(memory, 0, keep=keep, drop=drop)
        assert ok.item() is wanted
        if not ok:
            assert_identical(after, memory)
        assert jaxkv.init_batch(after, make_batch([1])).ok


def test_traced_numbers_that_cannot_be_change_nothing():
    slide = jax.jit(lambda memory, *args: loops.slide(memory, args[0], keep=args[1], drop=args[2]))
    memory = filled(3, 8, kind=POOL)
    for args in ((1, -1, 3), (1, 2, 0), (1, 2, -2), (9, 0, 1), (2, 0, 1), (1, 2**31 - 1, 2)):
        after, ok = slide(memory, *args)
        assert not ok, args
        assert_identical(after, memory)
    assert_identical(slide(memory, 1, 2, 3), loops.slide(memory, 1, keep=2, drop=3))


def test_a_donated_memory_is_slid_in_place():
    memory = jax.tree.map(jnp.copy, filled(8, kind=POOL))
    same, ok = loops.slide(memory, 0, keep=8, drop=1, donate=True)
    assert not ok and not memory.buffers.k[0].is_deleted()
    after, ok = loops.slide(memory, 0, keep=2, drop=3, donate=True)
    assert ok and memory.buffers.k[0].is_deleted()
    assert_identical(after, loops.slide(filled(8, kind=POOL), 0, keep=2, drop=3)[0])


# ---- endless texts


def generated(forward, weights, memory, logits, *, turns, steps, tidy):
    """Decode some tokens and tidy up, again and again, in Python: tokens, and cells in use."""
    state, first = loops.begin(BEST, memory, logits)
    texts, used = [first.tokens], []
    for _ in range(turns):
        memory, state, picked = jaxkv.decode(forward, BEST, weights, memory, state, steps=steps)
        texts.append(picked.tokens)
        used.append(jaxkv.used(memory).item())
        memory = tidy(memory)
    return memory, np.concatenate(texts, axis=1)[0], used


@pytest.mark.core
def test_an_endless_text_in_one_program_is_that_of_a_loop_in_python():
    kind = Kind("endless", cells=12, sequences=1)
    memory, logits = jaxkv.prefill(forward, None, kind.make(), make_batch([1, 2, 3, 4]))
    options = dict(keep=2, drop=4)

    @jax.jit
    def endless(memory, logits):
        def turn(carry, _):
            memory, state, picked = jaxkv.decode(forward, BEST, None, *carry, steps=4)
            memory, ok = loops.slide(memory, 0, **options)
            return (memory, state), (picked.tokens[0], ok)

        state, first = loops.begin(BEST, memory, logits)
        (memory, _), (tokens, ok) = jax.lax.scan(turn, (memory, state), length=8)
        return memory, jnp.concatenate([first.tokens[0], tokens.reshape(-1)]), ok

    after, text, ok = endless(memory, logits)
    run = partial(generated, forward, None, memory, logits, turns=8, steps=4)
    wanted, tokens, used = run(tidy=lambda memory: loops.slide(memory, 0, **options)[0])
    assert ok.all() and text.tolist() == tokens.tolist() and (text >= 0).all()
    assert_identical(jaxkv.split(after)[0], jaxkv.split(wanted)[0])
    assert max(used) == 8 and len(text) == 33
    by_hand, tokens, _ = run(tidy=lambda memory: slid_by_hand(memory, 0, **options))
    assert text.tolist() == tokens.tolist()
    assert_identical(wanted, by_hand)


def flat(weights, memory, ubatch):
    """All tokens are as good, whatever came before."""
    memory, logits = think(memory, ubatch)
    return memory, jnp.zeros_like(logits)


@pytest.mark.core
@pytest.mark.parametrize("tidy", ["slide", "extend"])
@pytest.mark.parametrize("drafted", [False, True], ids=["decode", "speculate"])
def test_positions_that_come_again_do_not_repeat_draws(tidy, drafted):
    """A text that is tidied up between its turns is that of one call in a large memory."""
    sampler = make_sampler(temperature=1.0)
    memory, logits = jaxkv.prefill(
        flat, None, Kind("", cells=40, sequences=1).make(), make_batch([1, 2, 3, 4])
    )
    state, _ = loops.begin(sampler, memory, logits, seed=3)
    _, _, whole = jaxkv.decode(flat, sampler, None, memory, state, steps=16)
    draft = loops.lookup([[]], ngram=7, recent=8)  # it guesses nothing
    pieces, done = [], jnp.int32(0)
    for _ in range(4):
        if drafted:
            memory, state, draft, picked = loops.speculate(
                flat, draft, sampler, None, memory, state, steps=4
            )
        else:
            memory, state, picked = jaxkv.decode(flat, sampler, None, memory, state, steps=4)
        pieces.append(picked.tokens)
        if tidy == "slide":
            memory, ok = loops.slide(memory, 0, keep=2, drop=4)
        else:
            memory, done, ok = loops.extend(memory, 0, done, group=2, width=4)
        assert ok
    assert np.concatenate(pieces, axis=1).tolist() == whole.tokens.tolist()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
@pytest.mark.parametrize("streams", [1, 2])
def test_a_model_goes_on_without_end(name, streams):
    """The logits at the end are those of the verbs by hand, and no more cells are used."""
    model = load(name)
    run = model.forward, model.weights
    memory = model.make_memory(cells=24, sequences=2, streams=streams, ubatch_size=8, rollback=0)
    prompt = make_batch([7, 3, 11, 5, 2, 9, 13, 4], sequences=0)
    memory, logits = jaxkv.prefill(*run, memory, prompt, ubatch_size=8)
    options = dict(turns=6, steps=8)
    after, text, used = generated(
        *run,
        memory,
        logits,
        tidy=lambda memory: loops.slide(memory, 0, keep=3, drop=8)[0],
        **options,
    )
    by_hand, wanted, _ = generated(
        *run, memory, logits, tidy=lambda memory: slid_by_hand(memory, 0, 3, 8), **options
    )
    assert text.tolist() == wanted.tolist() and (text >= 0).all() and len(text) == 49
    assert len(set(used)) == 1 and jaxkv.seq_pos_max(after, 0) == 7
    assert_identical(after, by_hand)
    found, wanted = (
        jaxkv.prefill(*run, each, make_batch([text[-1]]))[1] for each in (after, by_hand)
    )
    np.testing.assert_allclose(found, wanted, **CLOSE)


# ---- grouping


@pytest.mark.core
@pytest.mark.parametrize(("group", "width"), [(2, 4), (4, 4), (3, 6), (1, 2)])
def test_grouping_is_the_verbs_by_hand(group, width):
    memory = filled(3, 16, kind=POOL)
    after, done, ok = loops.extend(memory, 1, 0, group=group, width=width)
    wanted, expected = extended_by_hand(memory, 1, 0, group, width)
    assert ok and done == expected
    assert_identical(after, wanted)
    assert jaxkv.used(after) == 19 and not sum(jaxkv.check_invariants(after).values())
    again, same, ok = loops.extend(after, 1, done, group=group, width=width)
    assert ok and same == done
    assert_identical(again, after)
    assert jaxkv.init_batch(again, make_batch([1], sequences=1)).ok


@pytest.mark.core
@pytest.mark.parametrize("kind", [POOL, TWO], ids=lambda kind: kind.name)
def test_grouping_while_a_text_is_made(kind):
    """Two tokens at a time; a position is what llama.cpp's would be."""
    tables = []
    for tidy in (partial(loops.extend, seq=0, group=2, width=4), None):
        memory, done, places = kind.make(), jnp.int32(0), []
        for start in range(0, 12, 2):
            batch = make_batch([start + 1, start + 2])
            memory, logits = jaxkv.prefill(forward, None, memory, batch)
            if tidy:
                memory, done, ok = tidy(memory, done=done)
                assert ok
            else:
                memory, done = extended_by_hand(memory, 0, int(done), 2, 4)
            places.append(jaxkv.seq_pos_max(memory, 0).item())
        assert places == [1, 1, 3, 3, 5, 5] and done == 6
        tables.append((memory, logits))
    assert_identical(*tables)
    if kind is POOL:
        assert drawing(memory) == " ".join(f"{i // 2}{{0}}" for i in range(12))


def test_grouping_that_cannot_be_changes_nothing():
    extend = jax.jit(partial(loops.extend, group=2, width=4))
    pending = jaxkv.seq_add(filled(3, 8, kind=POOL), 0, 0, -1, 2)
    shared = jaxkv.seq_cp(filled(3, 8, kind=POOL), 1, 2, 7, 8)
    cases = [(pending, 1, 3), (pending, 1, -2), (pending, 1, 10), (shared, 1, 0), (shared, 2, 0)]
    far = jaxkv.seq_add(filled(3, 8, kind=POOL), 1, 0, -1, 2**30)
    for memory, seq, done in [*cases, (far, 1, 0), (far, 1, 2**30)]:
        after, now, ok = extend(memory, seq, done)
        assert not ok and now == done, (seq, done)
        assert_identical(after, memory)
    prefix = jaxkv.seq_cp(filled(3, 8, kind=POOL), 1, 2, 0, 2)
    assert extend(prefix, 1, 2)[2] and not extend(prefix, 1, 0)[2]
    short = jaxkv.seq_cp(filled(3, kind=POOL), 0, 2)
    after, now, ok = extend(short, 0, 0)
    assert ok and now == 0  # there is nothing to group yet, so sharing is no hindrance
    assert_identical(after, short)


# ---- mistakes


def states():
    return jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)


def given_up():
    memory = jax.tree.map(jnp.copy, filled(2))
    jaxkv.prefill(forward, None, memory, make_batch([1]), donate=True)
    return memory


def mixed():
    kv = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=4, sequences=2, rope=ROPE)
    return jaxkv.make_hybrid_cache((kv, (0,)), (states(), (1,)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: loops.slide(states(), 0, keep=0, drop=1),
            "wanted a memory of attention alone, got kind 'recurrent': a state cannot forget",
        ),
        (
            lambda: jax.jit(partial(loops.slide, keep=0, drop=1))(mixed(), 0),
            r"got kind 'hybrid' \(attention, recurrent\): a state cannot forget",
        ),
        (
            lambda: loops.extend(mixed(), 0, 0, group=2, width=4),
            r"got kind 'hybrid' \(attention, recurrent\): a state does not know where",
        ),
        (lambda: loops.slide(filled(2), 0, keep=-1, drop=1), "wanted keep from 0 .*got -1"),
        (lambda: loops.slide(filled(2), 0, keep=0, drop=0), "wanted drop from 1 .*got 0"),
        (lambda: loops.slide(filled(2), 0, keep=0.5, drop=1), "wanted integers for keep"),
        (
            lambda: loops.slide(filled(2), 0, keep=[0, 0], drop=1),
            r"wanted one integer for keep, got the shape \(2,\)",
        ),
        (
            lambda: loops.slide(filled(2), 0, keep=0, drop=[1]),
            r"wanted one integer for drop, got the shape \(1,\)",
        ),
        (
            lambda: loops.extend(filled(2), 0, [0, 0], group=2, width=4),
            r"wanted one integer for done, got the shape \(2,\)",
        ),
        (lambda: loops.slide(given_up(), 0, keep=0, drop=1), "whose buffers were donated"),
        (lambda: loops.extend(given_up(), 0, 0, group=2, width=4), "whose buffers were donated"),
        (lambda: loops.slide(filled(2), 7, keep=0, drop=1), "sequence ids from 0 to 2, got 7"),
        (lambda: loops.slide((1, 2), 0, keep=0, drop=1), "wanted a memory, got a tuple"),
        (lambda: loops.extend(filled(2), 0, 0, group=0, width=4), "group of at least 1, got 0"),
        (lambda: loops.extend(filled(2), 0, 0, group=2, width=5), "multiple of group=2, got 5"),
        (lambda: loops.extend(filled(2), 0, 0.5, group=2, width=4), "wanted integers for done"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
