"""Texts longer than a memory: `slide` and `extend` do what verbs do by hand, all or nothing."""

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
    HEADS,
    LAYERS,
    ROPE,
    SIZE,
    SPLIT,
    TWO,
    Kind,
    assert_identical,
    drawing,
    filled,
    run,
    think,
)

DATA = Path(__file__).parent.parent / "data"
BEST = make_sampler()
POOL = Kind("pool", cells=24, sequences=3)
CLOSE = dict(rtol=0, atol=2e-4)
core = pytest.mark.core

load = cache(lambda name: models.load(DATA / name))


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


def noisy(memory):
    """The same table beside random keys and values."""
    table, buffers = jaxkv.split(memory)
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype)  # noqa: E731
    return jaxkv.join(table, jax.tree.map(draw, buffers))


@cache
def told(*counts, kind=POOL):
    """A memory whose sequences were told so many tokens, beside random keys and values."""
    memory = noisy(kind.make())
    for seq, count in enumerate(counts):
        for _ in range(0, count, 4):
            valid = np.arange(4) < count
            batch = make_batch([1] * 4, sequences=seq, valid=valid)
            memory = jaxkv.apply(memory, jaxkv.init_batch(memory, batch, ubatch_size=4).check())
            count -= 4
    return memory


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


# ---- slide


@pytest.mark.parametrize(
    "kind", [POOL, *(pytest.param(kind, marks=core) for kind in (TWO, SPLIT))], ids=lambda k: k.name
)
def test_slide_equals_the_verbs_by_hand(kind):
    """The last one leaves nothing to move."""
    memory = told(3, 8, kind=kind)
    for keep, drop in ((1, 3), (0, 2), (2, 5), (7, 1)):
        after, ok = loops.slide(memory, 1, keep=keep, drop=drop)
        assert ok
        assert_identical(after, slid_by_hand(memory, 1, keep, drop))
        assert jaxkv.seq_pos_max(after, [0, 1]).tolist() == [2, 7 - drop]
        assert not sum(jaxkv.check_invariants(after).values())
        batch = make_batch([1] * 4, sequences=1, valid=np.arange(4) < 1)
        assert jaxkv.init_batch(after, batch, ubatch_size=4).ok


@core
def test_slide_puts_keys_where_they_would_have_been_written():
    """Those of the first layer, which nothing but token and position make."""
    after, ok = loops.slide(filled(8, kind=POOL), 0, keep=2, drop=4)
    fresh, _ = run(POOL.make(), make_batch([1, 2, 7, 8]))
    moved, wanted = (np.asarray(jaxkv.split(each)[1].k[0]) for each in (after, fresh))
    assert ok and drawing(after) == "0{0} 1{0} . . . . 2{0} 3{0}"
    np.testing.assert_allclose(moved[:, :, [0, 1, 6, 7]], wanted[:, :, :4], atol=1e-5)


@pytest.mark.parametrize(("keep", "drop"), [(1, 8), (8, 1), (0, 9), (0, 2**31 - 1)])
def test_slide_short_sequence_changes_nothing(keep, drop):
    """Keys that were moved before stay unrotated, too."""
    memory = jaxkv.seq_add(told(3, 8), 0, 0, -1, 2)
    after, ok = loops.slide(memory, 1, keep=keep, drop=drop)
    assert not ok
    assert_identical(after, memory)


@pytest.mark.parametrize(
    ("first", "last", "ok"), [(0, 2, True), (0, 5, True), (0, 6, False), (6, 8, False)]
)
def test_slide_cells_that_another_sequence_shares_are_not_moved(first, last, ok):
    shared = jaxkv.seq_cp(told(8), 0, 2, first, last)
    after, found = loops.slide(shared, 0, keep=2, drop=3)
    assert found == ok
    assert_identical(after, slid_by_hand(shared, 0, 2, 3) if ok else shared)
    other = [jaxkv.seq_keep(each, 2) for each in (shared, after)]
    assert drawing(other[0]) == drawing(other[1])


@core
def test_slide_does_not_show_what_a_window_let_go_of():
    kind = Kind("window", cells=8, sequences=2, windows=(jaxkv.window.sliding(5),))
    memory = told(16, kind=kind)
    for keep, drop, wanted in ((2, 12, False), (0, 16, True), (2, 4, True)):
        after, ok = loops.slide(memory, 0, keep=keep, drop=drop)
        assert ok.item() is wanted
        if not ok:
            assert_identical(after, memory)
        batch = make_batch([1] * 4, valid=np.arange(4) < 1)
        assert jaxkv.init_batch(after, batch, ubatch_size=4).ok


def test_slide_wrong_traced_numbers_change_nothing():
    slide = jax.jit(lambda memory, *args: loops.slide(memory, args[0], keep=args[1], drop=args[2]))
    memory = told(3, 8)
    for args in ((1, -1, 3), (1, 2, 0), (1, 2, -2), (9, 0, 1), (2, 0, 1), (1, 2**31 - 1, 2)):
        after, ok = slide(memory, *args)
        assert not ok, args
        assert_identical(after, memory)
    assert_identical(slide(memory, 1, 2, 3), loops.slide(memory, 1, keep=2, drop=3))


def test_slide_donated_is_the_same_and_deletes():
    memory = jax.tree.map(jnp.copy, told(8))
    same, ok = loops.slide(memory, 0, keep=8, drop=1, donate=True)
    assert not ok and not memory.buffers.k[0].is_deleted()
    after, ok = loops.slide(memory, 0, keep=2, drop=3, donate=True)
    assert ok and memory.buffers.k[0].is_deleted()
    assert_identical(after, loops.slide(told(8), 0, keep=2, drop=3)[0])


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


def begun(forward):
    """A memory with a prompt of four tokens, and its logits."""
    kind = Kind("endless", cells=24, sequences=1)
    return jaxkv.prefill(forward, None, kind.make(), make_batch([1, 2, 3, 4]))


@pytest.mark.nightly
def test_slide_and_decode_in_a_scan_match_a_python_loop():
    memory, logits = begun(forward)
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
    tidy = lambda memory: loops.slide(memory, 0, **options)[0]  # noqa: E731
    wanted, tokens, used = generated(forward, None, memory, logits, turns=8, steps=4, tidy=tidy)
    assert ok.all() and text.tolist() == tokens.tolist() and (text >= 0).all()
    assert_identical(jaxkv.split(after)[0], jaxkv.split(wanted)[0])
    assert max(used) == 8 and len(text) == 33


def flat(weights, memory, ubatch):
    """All tokens are as good, whatever came before."""
    memory, x = jaxkv.apply(memory, ubatch), jnp.zeros((*ubatch.valid.shape, HEADS, SIZE))
    for layer in range(LAYERS):
        memory = jaxkv.write(memory, layer, ubatch, x, x)
    return memory, jnp.zeros((*ubatch.outputs.shape, 16))


@core
@pytest.mark.parametrize("tidy", ["slide", "extend"])
@pytest.mark.parametrize("drafted", [False, True], ids=["decode", "speculate"])
def test_draws_do_not_repeat_where_positions_come_again(tidy, drafted):
    """A text that is tidied up between its turns is that of a memory that is not."""
    sampler = make_sampler(temperature=1.0)
    memory, logits = begun(flat)
    begin, _ = loops.begin(sampler, memory, logits, seed=3)
    draft = loops.lookup([[]], ngram=7, recent=8)  # it guesses nothing

    def text(drafted, tidied, memory=memory, state=begin, draft=draft):
        pieces, done = [], jnp.int32(0)
        for _ in range(4):
            if drafted:
                memory, state, draft, picked = loops.speculate(
                    flat, draft, sampler, None, memory, state, steps=4
                )
            else:
                memory, state, picked = jaxkv.decode(flat, sampler, None, memory, state, steps=4)
            pieces.append(picked.tokens)
            if tidied and tidy == "slide":
                memory, ok = loops.slide(memory, 0, keep=2, drop=4)
                assert ok
            elif tidied:
                memory, done, ok = loops.extend(memory, 0, done, group=2, width=4)
                assert ok
        return np.concatenate(pieces, axis=1).tolist()

    assert text(drafted, True) == text(False, False)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "streams"), [("llama_tied", 1), ("gemma3", 2)])
def test_slide_of_a_model_matches_the_verbs_by_hand(name, streams):
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


# ---- extend


@pytest.mark.parametrize(("group", "width"), [(2, 4), (4, 4), (3, 6), (1, 2)])
def test_extend_equals_the_verbs_by_hand(group, width):
    memory = told(3, 16)
    after, done, ok = loops.extend(memory, 1, 0, group=group, width=width)
    wanted, expected = extended_by_hand(memory, 1, 0, group, width)
    assert ok and done == expected
    assert_identical(after, wanted)
    assert jaxkv.used(after) == 19 and not sum(jaxkv.check_invariants(after).values())
    again, same, ok = loops.extend(after, 1, done, group=group, width=width)
    assert ok and same == done
    assert_identical(again, after)
    batch = make_batch([1] * 4, sequences=1, valid=np.arange(4) < 1)
    assert jaxkv.init_batch(again, batch, ubatch_size=4).ok


@core
@pytest.mark.parametrize("kind", [POOL, TWO], ids=lambda kind: kind.name)
def test_extend_while_a_text_grows_equals_the_verbs_by_hand(kind):
    """Two tokens at a time; a position is what llama.cpp's would be."""
    ends = []
    for by_hand in (False, True):
        memory, done, places = noisy(kind.make()), jnp.int32(0), []
        for _ in range(6):
            memory = jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1, 2])).check())
            if by_hand:
                memory, done = extended_by_hand(memory, 0, int(done), 2, 4)
            else:
                memory, done, ok = loops.extend(memory, 0, done, group=2, width=4)
                assert ok
            places.append(jaxkv.seq_pos_max(memory, 0).item())
        assert places == [1, 1, 3, 3, 5, 5] and done == 6
        ends.append(memory)
    assert_identical(*ends)
    if kind is POOL:
        assert drawing(memory) == " ".join(f"{i // 2}{{0}}" for i in range(12))


def test_extend_that_cannot_be_changes_nothing():
    extend = partial(loops.extend, group=2, width=4)
    memory = told(3, 8)
    pending = jaxkv.seq_add(memory, 0, 0, -1, 2)
    shared = jaxkv.seq_cp(memory, 1, 2, 7, 8)
    far = jaxkv.seq_add(memory, 1, 0, -1, 2**30)
    cases = [(pending, 1, 3), (pending, 1, -2), (pending, 1, 10), (shared, 1, 0), (shared, 2, 0)]
    for memory, seq, done in [*cases, (far, 1, 0), (far, 1, 2**30)]:
        after, now, ok = extend(memory, seq, done)
        assert not ok and now == done, (seq, done)
        assert_identical(after, memory)
    prefix = jaxkv.seq_cp(told(3, 8), 1, 2, 0, 2)
    assert extend(prefix, 1, 2)[2] and not extend(prefix, 1, 0)[2]
    short = jaxkv.seq_cp(told(3), 0, 2)
    after, now, ok = extend(short, 0, 0)
    assert ok and now == 0  # there is nothing to group yet, so sharing is no hindrance
    assert_identical(after, short)


# ---- errors


def states():
    return jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=2)


def given_up():
    memory = jax.tree.map(jnp.copy, told(8))
    loops.slide(memory, 0, keep=0, drop=1, donate=True)
    return memory


def mixed():
    kv = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=4, sequences=2, rope=ROPE)
    return jaxkv.make_hybrid_cache((kv, (0,)), (states(), (1,)))


CUT, GROUP = dict(keep=0, drop=1), dict(done=0, group=2, width=4)


@pytest.mark.parametrize(
    ("make", "seq", "options", "message"),
    [
        (states, 0, CUT, "wanted .* attention alone, got kind 'recurrent': a state cannot forget"),
        (mixed, 0, CUT, r"got kind 'hybrid' \(attention, recurrent\): a state cannot forget"),
        (mixed, 0, GROUP, r"got kind 'hybrid' \(attention, recurrent\): a state does not know"),
        (POOL.make, 0, CUT | {"keep": -1}, "wanted keep from 0 .*got -1"),
        (POOL.make, 0, CUT | {"drop": 0}, "wanted drop from 1 .*got 0"),
        (POOL.make, 0, CUT | {"keep": 0.5}, "wanted integers for keep"),
        (POOL.make, 0, CUT | {"keep": [0, 0]}, r"one integer for keep, got the shape \(2,\)"),
        (POOL.make, 0, CUT | {"drop": [1]}, r"one integer for drop, got the shape \(1,\)"),
        (POOL.make, 0, GROUP | {"done": [0, 0]}, r"one integer for done, got the shape \(2,\)"),
        (given_up, 0, CUT, "whose buffers were donated"),
        (given_up, 0, GROUP, "whose buffers were donated"),
        (POOL.make, 7, CUT, "sequence ids from 0 to 2, got 7"),
        (lambda: (1, 2), 0, CUT, "wanted a memory, got a tuple"),
        (POOL.make, 0, GROUP | {"group": 0}, "group of at least 1, got 0"),
        (POOL.make, 0, GROUP | {"width": 5}, "multiple of group=2, got 5"),
        (POOL.make, 0, GROUP | {"done": 0.5}, "wanted integers for done"),
    ],
)
def test_slide_and_extend_wrong_arguments_raise(make, seq, options, message):
    verb = loops.slide if "keep" in options else loops.extend
    with pytest.raises((TypeError, ValueError), match=message):
        verb(make(), seq, **options)


def test_slide_traced_memory_with_states_raises():
    with pytest.raises(ValueError, match="a state cannot forget"):
        jax.eval_shape(partial(loops.slide, keep=0, drop=1), mixed(), 0)
