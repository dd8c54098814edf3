"""`Plan.fits` in tiny caches against brute force: plans of every subset of the sequences."""

import functools
import itertools
import random

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import CacheSpec, Reason, Window, init_batch, make_batch, make_cache, plan_step
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan

pytestmark = pytest.mark.core

SIZES = dict(layers=1, kv_heads=1, head_dim=2)
FULL = CacheSpec.attention(**SIZES)
NEAR, LAST = (CacheSpec.attention(**SIZES, window=Window.sliding(n)) for n in (3, 2))
CHUNKS = CacheSpec.attention(**SIZES, window=Window.chunked(3))
STATES = CacheSpec.recurrent(layers=1, states={"x": ((2,), "float32")})


def make_hybrid_spec(*specs):
    return CacheSpec.hybrid(*((spec, [layer]) for layer, spec in enumerate(specs)))


CACHES = {
    "window": (NEAR, dict(cells=5)),
    "window of two": (LAST, dict(cells=5)),
    "chunks": (CHUNKS, dict(cells=5)),
    "window in streams": (NEAR, dict(cells=5, sequences=4, streams=2)),
    "full": (FULL, dict(cells=7)),
    "full and window": (make_hybrid_spec(FULL, NEAR), dict(cells=7)),
    "two windows": (make_hybrid_spec(LAST, NEAR), dict(cells=5)),
    "states and window": (make_hybrid_spec(STATES, NEAR), dict(cells=5)),
    "states and window in streams": (
        make_hybrid_spec(STATES, NEAR),
        dict(cells=5, sequences=4, streams=2),
    ),
}
UBATCHES = [4, 4, 4, 3]
FEW = ["window"]


@functools.cache
def make_empty(name):
    spec, sizes = CACHES[name]
    return make_cache(spec, **(dict(sequences=3) | sizes))


def make_used(name, rng):
    """A cache in which some sequences have a few tokens, and some were shortened or forked."""
    cache = make_empty(name)
    for _ in range(rng.choice([0, 3, 9])):
        plan = plan_step(cache, [1], sequences=[rng.randrange(cache.table.spec.sequences)])
        cache = apply_plan(cache, plan)  # no effect if it is refused
    if rng.random() < 0.3:
        cache, _ = jaxkv.seq_rm(cache, rng.randrange(cache.table.spec.sequences))
    if rng.random() < 0.2:
        cache, _ = jaxkv.seq_cp(cache, 0, 1)
    return cache


def drawn_batch(cache, rng):
    """New tokens of some sequences, in order or mixed, and options of `init_batch`."""
    spec = cache.table.spec
    counts = [rng.choice([0, 1, 2, 3, 4, 6, 9]) for _ in range(spec.sequences)]
    counts[0] += not any(counts)
    ids = [seq for seq, count in enumerate(counts) for _ in range(count)]
    if rng.random() < 0.3:
        rng.shuffle(ids)
    ways = [None, "equal", "sequence"] + ["simple"] * (not spec.single_sequence_rows)
    # Padding to one length limits compilation.
    ids, valid = np.pad(ids, (0, 36 - len(ids))), np.arange(36) < len(ids)
    batch = make_batch(np.ones(36, np.int32), sequences=ids, valid=valid)
    return counts, batch, dict(ubatch_size=rng.choice(UBATCHES), split_by=rng.choice(ways))


def plan_kept(cache, batch, options, kept):
    return init_batch(cache, batch.keep_sequences(kept), **options)


def plan_kept_step(cache, tokens, active, kept):
    return plan_step(cache, tokens, active=active & np.array(kept)[:, None])


def subsets_that_fit(counts, plan_of):
    """The non-empty sets of sequences with new tokens whose plan is not refused."""
    present = np.flatnonzero(counts).tolist()
    sets = [{*some} for n in range(len(present)) for some in itertools.combinations(present, n + 1)]
    return [kept for kept in sets if plan_of([seq in kept for seq in range(len(counts))]).ok]


def assert_fits(plan, counts, subsets):
    """`fits` has the sequences that remain if they are added one by one, the smallest first."""
    wanted = set()
    for seq in sorted(np.flatnonzero(counts), key=lambda seq: counts[seq]):
        wanted |= {seq} if wanted | {seq} in subsets else set()
    if plan.ok:
        wanted = {*np.flatnonzero(counts)}
    assert plan.fits.tolist() == [not n or seq in wanted for seq, n in enumerate(counts)]
    assert [reason == Reason.OK for reason in plan.reason] == plan.fits.tolist()
    assert bool(plan.ok) == ({*np.flatnonzero(counts)} in subsets)
    lacks = np.asarray(plan.reason == Reason.OUT_OF_CELLS)
    assert np.all(np.asarray(plan.expected > plan.actual)[lacks])


@pytest.mark.parametrize(
    ("name", "runs"),
    mark_cases(
        [(name, runs) for name in CACHES for runs in (12, 200)], core=[(name, 12) for name in FEW]
    ),
)
def test_fits_of_init_batch_is_that_of_brute_force(name, runs):
    """The sequences that fit have a plan together; if one fits alone, some fit."""
    rng, refused = random.Random(name), 0
    for _ in range(runs):
        cache = make_used(name, rng)
        counts, batch, options = drawn_batch(cache, rng)
        plan = init_batch(cache, batch, **options)
        refused += not plan.ok
        subsets = subsets_that_fit(counts, functools.partial(plan_kept, cache, batch, options))
        assert_fits(plan, counts, subsets)
    assert refused > runs // 4


@pytest.mark.parametrize(
    ("name", "runs"),
    mark_cases(
        [(name, runs) for name in CACHES for runs in (15, 200)],
        core=[(name, 15) for name in ["window", "window in streams"]],
    ),
)
def test_fits_of_plan_step_is_that_of_brute_force(name, runs):
    """A sequence of one token that is refused next to drafts is refused without them."""
    rng, refused = random.Random(name), 0
    for _ in range(runs):
        cache = make_used(name, rng)
        counts = [rng.choice([0, 1, 1, 2, 4]) for _ in range(cache.table.spec.sequences)]
        counts[0] += not any(counts)
        active = np.arange(4) < np.array(counts)[:, None]
        tokens = np.ones(active.shape, np.int32)
        plan = plan_step(cache, tokens, active=active)
        refused += not plan.ok

        subsets = subsets_that_fit(counts, functools.partial(plan_kept_step, cache, tokens, active))
        assert_fits(plan, counts, subsets)
        short = plan_step(cache, tokens, active=active & (np.arange(4) < 1))
        ended = ~np.asarray(plan.fits) & (np.array(counts) == 1)
        assert not np.any(ended & np.asarray(short.fits))
    assert refused > runs // 6


@pytest.mark.parametrize(
    ("name", "runs"),
    mark_cases([(name, runs) for name in CACHES for runs in (5, 100)], core=[("window", 5)]),
)
def test_loop_over_fits_ends_and_serves_all_that_fit_alone(name, runs):
    """A loop plans all waiting tokens, then those that fit; some sequences end on the way."""
    rng = random.Random(name)
    for _ in range(runs):
        cache = make_used(name, rng)
        counts, batch, options = drawn_batch(cache, rng)
        waiting = np.array(counts) > 0
        while waiting.any():
            plan = init_batch(cache, batch.keep_sequences(waiting), **options)
            served = waiting & np.asarray(plan.fits)
            if not served.any():
                break
            plan = init_batch(cache, batch.keep_sequences(served), **options).check()
            for ubatch in plan.ubatches:
                cache = apply_plan(cache, ubatch)
            waiting &= ~served
            if rng.random() < 0.5:
                cache, _ = jaxkv.seq_rm(cache, int(np.flatnonzero(served)[0]))
        for seq in np.flatnonzero(waiting):
            alone = batch.keep_sequences(np.arange(len(counts)) == seq)
            assert not init_batch(cache, alone, **options).ok


@pytest.mark.parametrize(
    ("name", "runs"),
    mark_cases([(name, runs) for name in CACHES for runs in (3, 20)], core=[("window", 3)]),
)
def test_fits_of_a_traced_cache_is_at_most_one_sequence(name, runs):
    """If several ubatches free cells, a subset would need a program of its own."""
    rng, refused = random.Random(name), 0
    while refused < runs:
        cache = make_used(name, rng)
        counts, batch, options = drawn_batch(cache, rng)
        known = init_batch(cache, batch, **options)
        if known.ok and refused:
            continue
        refused += not known.ok
        plan = jax.jit(functools.partial(init_batch, batch=batch, **options))(cache)
        assert plan.ok == known.ok
        subsets = subsets_that_fit(counts, functools.partial(plan_kept, cache, batch, options))
        fits = {seq for seq in np.flatnonzero(counts) if plan.fits[seq]}
        assert fits in subsets or not fits
        assert fits or not any(len(kept) == 1 for kept in subsets)
        assert [reason == Reason.OK for reason in plan.reason] == plan.fits.tolist()


def test_fits_ignores_sequences_with_other_faults():
    """Sequence 1 has a wrong position; of the others, one fits."""
    cache = make_empty("window")
    ids = [0] * 6 + [1] * 2 + [2] * 4
    positions = [*range(6), 3, 5, *range(4)]
    batch = make_batch([1] * 12, sequences=ids, positions=positions)
    plan = init_batch(cache, batch, ubatch_size=4, split_by="equal")
    assert plan.reason.tolist() == [Reason.OUT_OF_CELLS, Reason.POSITION_GAP, Reason.OK]
    assert plan.expected.tolist()[:2] == [6, 4] and plan.actual.tolist()[:2] == [1, 5]
    assert init_batch(cache, batch.keep_sequences(plan.fits), ubatch_size=4, split_by="equal").ok
