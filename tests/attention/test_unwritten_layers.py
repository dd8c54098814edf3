"""A layer of a stacked cache that a step skipped is read as NaN, until its stream is empty."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import snapshot
from tests.helpers.caches import (
    CODES,
    GROUPS,
    LATENT,
    LAYERS,
    SMALL,
    SPLIT,
    WINDOW,
    attend_signed,
    plan_rows,
)
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core


@jax.jit
def run_layers(cache, ubatch, writes=(True, True)):
    """Run a ubatch in the layers that are True; return the cache and the outputs of all layers."""
    q, writes = jnp.zeros((*ubatch.valid.shape, 4, 4)), jnp.asarray(writes)

    def of_layer(step, layer):
        return jax.lax.cond(
            writes[layer],
            lambda step: attend_signed(step, layer),
            lambda step: jaxkv.attend(step, layer, q),
            step,
        )

    step, saw = jax.lax.scan(of_layer, jaxkv.apply(cache, ubatch), jnp.arange(LAYERS))
    return step.cache, list(saw)


def plan(cache, *counts):
    """Plan `counts` (at most 2) next tokens for each of four sequences, in rows of one shape."""
    shape = cache.table.spec.sequences, 2
    counts = (np.resize(counts, shape[0]) * (np.arange(shape[0]) < 4))[:, None]
    return plan_rows(cache, np.ones(shape, int), np.arange(2) < counts).check().ubatches[0]


def gives_nan(saw):
    return [bool(np.isnan(out).any()) for out in saw]


SMALL, SPLIT, GROUPS = (replace(kind, stacked=True) for kind in (SMALL, SPLIT, GROUPS))
KINDS = [SMALL, SPLIT, GROUPS, *(replace(kind, stacked=True) for kind in (WINDOW, CODES, LATENT))]
FEW = [SMALL, SPLIT]


@pytest.mark.parametrize("kind", mark_cases(KINDS, FEW), ids=str)
def test_layer_that_lacks_tokens_reads_nan_until_it_lacks_none(kind):
    cache, saw = run_layers(kind.make(None), plan(kind.make(None), 1, 0))
    assert gives_nan(saw) == [False, False]
    whole, table = cache, cache.table

    lacking, saw = run_layers(cache, plan(cache, 1), (True, False))
    assert gives_nan(saw) == [False, True]
    written, _ = run_layers(cache, plan(cache, 1))  # the same tokens, in other buffers
    assert not jaxkv.rewind(lacking, to=written.table)[1]
    with pytest.raises(ValueError, match="expected every layer to hold all tokens of sequence 0"):
        snapshot.save(lacking)
    after, saw = run_layers(lacking, plan(lacking, 1))  # later writes do not fill them in
    assert gives_nan(saw) == [False, True]

    for later in (lacking, after):
        back, ok = jaxkv.rewind(later, to=table)
        assert ok
        (_, saw), (_, expected) = (run_layers(one, plan(one, 2)) for one in (back, whole))
        jax.tree.map(np.testing.assert_array_equal, saw, expected)
        again, ok = jaxkv.rewind(back, to=later.table)
        assert ok
        assert gives_nan(run_layers(again, plan(again, 1))[1]) == [False, True]

    empty = jaxkv.clear(after)
    none, data = snapshot.save(empty), snapshot.save(whole)
    for one in (empty, snapshot.load(none, into=empty), snapshot.load(data, into=empty)):
        assert gives_nan(run_layers(one, plan(one, 2))[1]) == [False, False]


@pytest.mark.parametrize("kind", [SPLIT, GROUPS], ids=str)
@pytest.mark.parametrize("copy", [jaxkv.seq_cp, jaxkv.seq_select], ids=["seq_cp", "seq_select"])
def test_copy_between_streams_lacks_what_its_source_lacks(kind, copy):
    last = kind.sequences - 1
    first = np.arange(kind.sequences) == 0
    whole, _ = run_layers(kind.make(None), plan(kind.make(None), *first))
    lacking, _ = run_layers(whole, plan(whole, *first), (True, False))
    pair = (np.array([0]), np.array([last])) if copy is jaxkv.seq_select else (0, last)
    for cache, expected in ((whole, [False, False]), (lacking, [False, True])):
        copied, ok = copy(cache, *pair)[:2]
        assert np.all(ok)
        before, _ = jaxkv.rewind(copied, to=cache.table)
        again, ok = jaxkv.rewind(before, to=copied.table)
        assert ok
        for one in (copied, again):
            assert gives_nan(run_layers(one, plan(one, *first[::-1]))[1]) == expected


def test_view_of_a_layer_that_lacks_tokens_is_nan():
    step = jaxkv.apply(SMALL.make(), plan(SMALL.make(), 1))
    view = jax.jit(jaxkv.read_kv)
    assert np.isnan(view(step, 0).k).all()
    step, _ = jax.jit(attend_signed)(step, 0)
    found = view(step, 0)
    assert np.isfinite(found.k).any() and np.isnan(view(step, 1).k).all()
    assert found.mask[0, 0].sum() == 1  # its own cell
    assert np.isfinite(jaxkv.read_kv(step, 0).k).any()  # a static number
    assert np.isnan(jaxkv.read_kv(step, 1).k).all()


def test_stream_that_lacks_nothing_goes_on_beside_one_that_does():
    cache, _ = run_layers(SPLIT.make(), plan(SPLIT.make(), 1))
    cache, _ = run_layers(cache, plan(cache, 1, 0, 0), (True, False))
    out = run_layers(cache, plan(cache, 1))[1][1]
    assert np.isnan(out).any(axis=(1, 2, 3)).tolist() == [True, False, False]
    beside = run_layers(cache, plan(cache, 0, 1))[1][1]  # no token of the stream that lacks some
    assert not np.isnan(beside).any()


def test_copy_brings_nothing_that_its_source_does_not_lack():
    ids = np.arange(GROUPS.sequences)
    whole, _ = run_layers(GROUPS.make(None), plan(GROUPS.make(None), *(ids == 0)))
    lacking, _ = run_layers(whole, plan(whole, *(ids == ids[-1])), (True, False))
    emptied, _ = jaxkv.seq_rm(lacking, ids[-1])
    for cache, expected in ((emptied, [False, False]), (lacking, [False, True])):
        copied, ok = jaxkv.seq_cp(cache, 0, ids[-2])
        assert ok
        assert gives_nan(run_layers(copied, plan(copied, *(ids == ids[-2])))[1]) == expected
