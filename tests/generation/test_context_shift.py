"""Texts longer than a cache: the same as edits in a loop, completely or not at all."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.generation.filters import make_sampler
from models.compiling import counting
from tests.generation.tiny import assert_sound, init_state
from tests.helpers import caches
from tests.helpers.caches import (
    SPLIT,
    TWO,
    Kind,
    apply_update,
    assert_identical,
    assert_same_content,
    drawing,
)
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens, apply_batch
from tests.snapshot.saved import randomize

POOL = Kind("pool", cells=24, sequences=3)
core = pytest.mark.core
one_more = partial(make_batch, [1] * 4, valid=np.arange(4) < 1)
WAYS = [("slide", False), ("extend", True), ("slide", True), ("extend", False)]


@functools.cache
def fill_cache(*counts, kind=POOL):
    cache = randomize(kind.make())
    for seq, count in enumerate(counts):
        cache = add_tokens(cache, [1] * count, seq)
    return cache


def shift_by_hand(cache, seq, keep, drop):
    cache, ok = jaxkv.seq_rm(cache, seq, keep, keep + drop)
    assert ok
    return apply_update(jaxkv.seq_add(cache, seq, keep + drop, -1, delta=-drop).cache)


def extend_by_hand(cache, seq, done, group, width):
    """The loop of llama.cpp's program."""
    there = cache.seq_pos_max(seq).item() + 1
    while there >= done + width:
        ib = group * done // width
        bd = width // group * (group - 1)
        dd = width // group - ib * bd - width
        cache = jaxkv.seq_add(cache, seq, done, there, delta=ib * bd).cache
        first, last = done + ib * bd, done + ib * bd + width
        cache = jaxkv.seq_div(cache, seq, first, last, divisor=group).cache
        cache = jaxkv.seq_add(cache, seq, last, there + ib * bd, delta=dd).cache
        there, done = there - bd, done + width // group
    return apply_update(cache), done


@pytest.mark.parametrize("kind", mark_cases([POOL, TWO, SPLIT], [POOL], [SPLIT]), ids=str)
def test_context_shift_equals_edits_by_hand(kind):
    cache = fill_cache(3, 8, kind=kind)
    for keep, drop in ((1, 3), (0, 2), (2, 5), (7, 1)):
        after, ok = generation.context_shift(cache, 1, num_keep=keep, num_discard=drop)
        assert ok
        assert_same_content(after, shift_by_hand(cache, 1, keep, drop))
        assert after.seq_pos_max([0, 1]).tolist() == [2, 7 - drop]
        assert_sound(after)
        assert jaxkv.init_batch(after, one_more(sequences=1), ubatch_size=4).ok


def test_context_shift_short_sequence_changes_nothing():
    cache = jax.tree.map(jnp.copy, jaxkv.seq_add(fill_cache(3, 8), 0, 0, -1, delta=2).cache)
    for keep, drop in ((1, 8), (8, 1), (0, 9), (0, 2**31 - 1)):
        for donate in (False, True):
            options = dict(num_keep=keep, num_discard=drop, donate=donate)
            after, ok = generation.context_shift(cache, 1, **options)
            assert not ok, options
            assert_identical(after, cache)  # not donated


def test_context_shift_cells_that_another_sequence_shares_are_not_moved():
    for first, last, ok in ((0, 2, True), (0, 5, True), (0, 6, False), (6, 8, False)):
        shared = jaxkv.seq_cp(fill_cache(8), 0, 2, first, last).cache
        after, found = generation.context_shift(shared, 0, num_keep=2, num_discard=3)
        assert found == ok, (first, last)
        assert_same_content(after, shift_by_hand(shared, 0, 2, 3) if ok else shared)
        assert drawing(jaxkv.seq_keep(after, 2).cache) == drawing(jaxkv.seq_keep(shared, 2).cache)


@core
def test_context_shift_does_not_show_what_a_window_let_go_of():
    kind = Kind("window", cells=8, sequences=2, windows=(jaxkv.Window.sliding(5),))
    cache = fill_cache(16, kind=kind)
    for keep, drop, wanted in ((2, 12, False), (0, 16, True), (2, 4, True)):
        after, ok = generation.context_shift(cache, 0, num_keep=keep, num_discard=drop)
        assert ok.item() is wanted
        if not ok:
            assert_identical(after, cache)
        assert jaxkv.init_batch(after, one_more(), ubatch_size=4).ok


def test_context_shift_wrong_traced_numbers_change_nothing():
    def slid(cache, seq, keep, drop):
        return generation.context_shift(cache, seq, num_keep=keep, num_discard=drop)

    slide, cache = jax.jit(slid), fill_cache(3, 8)
    for args in ((1, -1, 3), (1, 2, 0), (1, 2, -2), (9, 0, 1), (2, 0, 1), (1, 2**31 - 1, 2)):
        after, ok = slide(cache, *args)
        assert not ok, args
        assert_identical(after, cache)
    assert_identical(slide(cache, 1, 2, 3), slid(cache, 1, 2, 3))


LISTS = [
    ([1, 0, 2, 1], 1, [3, 2, 2, 1], [True, True, False, True]),  # sequence 2 is too short
    ([0, 1], [0, 2], 2, [True, True]),
    ([2, 2], 0, 3, [False, False]),
]


@pytest.mark.parametrize(("ids", "keep", "drop", "granted"), LISTS)
def test_context_shift_of_a_list_equals_the_loop(ids, keep, drop, granted):
    pending, ok = jaxkv.seq_add(fill_cache(6, 8, 2), 1, 0, -1, delta=2)
    for cache in (fill_cache(6, 8, 2), pending):
        after = cache
        for seq, num_keep, num_discard in np.broadcast(ids, keep, drop):
            options = dict(num_keep=num_keep, num_discard=num_discard)
            after, ok = generation.context_shift(after, int(seq), **options)
        options = dict(num_keep=keep, num_discard=drop)
        lists, flags = result = generation.context_shift(cache, ids, **options)
        assert flags.tolist() == granted and ok == granted[-1]
        reasons = [jaxkv.Reason.OK if one else jaxkv.Reason.TOO_FEW_TOKENS for one in granted]
        assert result.reason.tolist() == reasons
        assert drawing(lists) == drawing(after)  # positions, owners and pending shifts
        used = np.asarray(after.table.position[0]) >= 0
        for keys, wanted in zip(lists.buffers.k, after.buffers.k, strict=True):
            np.testing.assert_allclose(keys[0, :, used], wanted[0, :, used], atol=1e-5)
        if len({*ids}) == len(ids) and cache is not pending:  # no key is rotated twice by the loop
            assert_same_content(lists, after)
        if not any(granted):
            assert_identical(lists, cache)


@core
def test_context_shift_of_8_sequences_runs_one_program_on_the_table():
    cache = randomize(Kind("eight", cells=7, sequences=8, streams=8).make())
    cache = apply_batch(cache, np.ones((8, 5), int))
    with counting() as compiled:
        _, ok = generation.context_shift(cache, [*range(8)], num_keep=1, num_discard=2)
    assert ok.tolist() == [True] * 8 and compiled() <= 4  # also counts and rotates keys


def write_zero_keys(params, step):
    x = jnp.zeros((*step.valid.shape, 2, caches.SIZE))
    for layer in range(caches.LAYERS):
        step = jaxkv.write_kv(step, layer, x, x)
    return step, jnp.zeros((*step.outputs.shape, 16))


@core
@pytest.mark.parametrize(("tidy", "drafted"), mark_cases(WAYS, fast=WAYS[:1]))
def test_draws_do_not_repeat_where_positions_come_again(tidy, drafted):
    sampler = make_sampler(temperature=1.0)
    kind, batch = Kind("endless", cells=24, sequences=1), make_batch([1, 2, 3, 4])
    cache, logits, *_ = jaxkv.prefill(write_zero_keys, None, kind.make(), batch)
    begin = init_state(cache, logits=logits, sampler=sampler, seed=3)
    draft = generation.prompt_lookup([[]], ngram=7, recent=8)  # its drafts are empty

    def text(drafted, tidied, cache=cache, state=begin, draft=draft):
        pieces, done, options = [], jnp.int32(0), dict(num_tokens=4, sampler=sampler)
        for _ in range(4):
            if drafted:
                picked = generation.speculate(
                    write_zero_keys, None, cache, state, drafter=draft, **options
                )
                draft = picked.drafter
            else:
                picked = jaxkv.decode(write_zero_keys, None, cache, state, **options)
            cache, state = picked.cache, picked.state
            pieces.append(picked.tokens)
            if tidied and tidy == "slide":
                cache, ok = generation.context_shift(cache, 0, num_keep=2, num_discard=4)
                assert ok
            elif tidied:
                cache, ok, done = generation.self_extend(cache, 0, done, group=2, width=4)
                assert ok
        return np.concatenate(pieces, axis=1).tolist()

    assert text(drafted, True) == text(False, False)


@pytest.mark.parametrize(("group", "width"), [(2, 4), (4, 4), (3, 6), (1, 2)])
def test_self_extend_equals_edits_by_hand(group, width):
    cache = fill_cache(3, 16)
    after, ok, done = generation.self_extend(cache, 1, 0, group=group, width=width)
    wanted, expected = extend_by_hand(cache, 1, 0, group, width)
    assert ok and done == expected
    assert_same_content(after, wanted)
    assert after.num_used_cells() == 19
    assert_sound(after)
    twice, ok, same = generation.self_extend(after, 1, 0, group=group, width=width)
    assert ok == (group == 1)  # groups of one token are unchanged
    assert same == (done if ok else 0)
    assert_identical(twice, after)
    again, ok, same = generation.self_extend(after, 1, done, group=group, width=width)
    assert ok and same == done
    assert_identical(again, after)
    assert jaxkv.init_batch(again, one_more(sequences=1), ubatch_size=4).ok


def test_extend_that_cannot_be_changes_nothing():
    extend = partial(generation.self_extend, group=2, width=4)
    cache = fill_cache(3, 8)
    pending = jaxkv.seq_add(cache, 0, 0, -1, delta=2).cache
    shared = jaxkv.seq_cp(cache, 1, 2, 7, 8).cache
    far = jaxkv.seq_add(cache, 1, 0, -1, delta=2**30).cache
    cases = [(pending, 1, 3), (pending, 1, -2), (pending, 1, 10), (cache, 0, 4)]
    cases += [(shared, 1, 0), (shared, 2, 0)]
    for cache, seq, done in [*cases, (far, 1, 0), (far, 1, 2**30)]:
        after, ok, now = extend(cache, seq, done)
        assert not ok and now == done, (seq, done)
        assert_identical(after, cache)
    prefix = jaxkv.seq_cp(fill_cache(3, 8), 1, 2, 0, 2).cache
    assert extend(prefix, 1, 2).ok and not extend(prefix, 1, 0).ok
    short = jaxkv.seq_cp(fill_cache(3), 0, 2).cache
    after, ok, now = extend(short, 0, 0)
    assert ok and now == 0  # nothing to group yet, so shared cells do not matter
    assert_identical(after, short)
