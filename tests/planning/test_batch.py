"""Batches: how they are made and split, and the order of their outputs."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv import make_batch
from jaxkv.core.array_utils import next_power_of_two
from jaxkv.core.constants import NO_SLOT
from jaxkv.planning.layout import equal_split, lay_out_batch, sequence_split, simple_split
from tests.generation.tiny import forward, load_tiny
from tests.helpers import caches
from tests.helpers.caches import SMALL, SPLIT, attention_cache, parse_cache, recurrent_cache
from tests.helpers.steps import apply_batch

SPLITS = [simple_split, equal_split, sequence_split]


def parse_four():
    return parse_cache("0{0} 1{0} 2{0} 3{0}")


def test_make_batch_of_rows_takes_an_id_for_each_row():
    wanted = [[4, 4, 4], [1, 1, 1]]
    rows, ids = np.ones((2, 3), np.int32), np.array([4, 1])
    assert make_batch(rows, sequences=ids).sequences.tolist() == wanted
    traced = jax.jit(lambda rows, ids: make_batch(rows, sequences=ids).sequences)(rows, ids)
    assert traced.tolist() == wanted


@pytest.mark.parametrize(
    ("tokens", "sequences", "wanted"),
    [
        ([[1, 2], [3]], [7, 4], [7, 7, 4]),
        ([1, 2, 3], None, [0, 0, 0]),
        (np.array([1, 2, 3], np.uint8), np.int64(5), [5, 5, 5]),
    ],
)
def test_make_batch_fills_in_sequences(tokens, sequences, wanted):
    batch = make_batch(tokens, sequences=sequences)
    assert batch.tokens.tolist() == [1, 2, 3] and batch.sequences.tolist() == wanted
    assert batch.tokens.dtype == batch.sequences.dtype == np.int32
    assert isinstance(batch.tokens, np.ndarray)
    assert isinstance(make_batch(jnp.asarray(batch.tokens)).tokens, jax.Array)


@pytest.mark.parametrize("split_by", SPLITS, ids=lambda f: f.__name__)
@given(sequences=st.lists(st.integers(0, 3), min_size=1, max_size=40), size=st.integers(1, 9))
def test_split_takes_every_token_once_in_order(split_by, sequences, size):  # traps 46, 47
    sequences = np.array(sequences, np.int32)
    parts = split_by(sequences, size)
    taken = [part[part != NO_SLOT].tolist() for part in parts]
    assert sorted(sum(taken, [])) == list(range(len(sequences)))
    assert all(1 <= len(tokens) <= size for tokens in taken)
    for seq in set(sequences.tolist()):
        mine = [i for i in sum(taken, []) if sequences[i] == seq]
        assert mine == sorted(mine)
    for part, tokens in zip(parts, taken, strict=True):
        assert part.dtype == np.int32
        assert part.shape[1] in {size, min(size, next_power_of_two(part.shape[1]))}
        ids = [set(sequences[row[row != NO_SLOT]].tolist()) for row in part]
        if split_by is equal_split:
            assert all(len(row) == 1 for row in ids)
            assert len(set.union(*ids)) == part.shape[0]
            assert len({(row != NO_SLOT).sum() for row in part}) == 1
        else:
            assert part.shape[0] == 1
        if split_by is simple_split:
            assert tokens == list(range(tokens[0], tokens[-1] + 1))
        if split_by is sequence_split:
            assert len(ids[0]) == 1


def test_layout_pads_to_buckets_and_never_past_the_sequences():
    batch = make_batch(np.ones(20, np.int32), outputs=np.arange(20) == 3)
    flat, parts, outputs = lay_out_batch(SMALL.make().table.spec, batch, 512, None)
    assert (flat.tokens.shape, [part.shape for part in parts], outputs) == ((32,), [(1, 32)], 8)
    cache = SPLIT.make()
    for prompts, rows in (([[1]], 1), ([[1], [2]], 2), ([[1], [2], [3]], 3)):
        _, (part,), _ = lay_out_batch(cache.table.spec, make_batch(prompts), 512, None)
        assert part.shape == (rows, 1)
    for lengths, wanted in (
        ([5, 1, 3], [(3, 8)]),  # a padded row for each, instead of three shapes
        ([200, 1, 1], [(3, 1), (1, 256)]),  # there would be more padding than tokens
        ([257, 255], [(2, 256), (1, 2)]),  # and more than 512 slots
        ([60, 60, 50], [(3, 64)]),
        ([200, 200, 150], [(3, 256), (2, 64)]),  # more tokens than fit into one
    ):
        batch = make_batch([[1] * length for length in lengths])
        flat, parts, _ = lay_out_batch(cache.table.spec, batch, 512, None)
        assert [part.shape for part in parts] == wanted
        taken = np.concatenate([part[part != NO_SLOT] for part in parts])
        assert sorted(taken) == [*range(sum(lengths))]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["split", "window", "hybrid"])
def test_padded_rows_of_ragged_prompts_equal_rows_of_equal_lengths(name):
    if name == "hybrid":
        model = load_tiny("granite_hybrid")
        run = model.forward, model.params
        cache = model.make_cache(cells=16, sequences=3, streams=3)
    else:
        sizes = {"window": jaxkv.Window.sliding(3)} if name == "window" else {"cells": 12}
        sizes |= dict(layers=caches.LAYERS, kv_heads=caches.HEADS, head_dim=caches.SIZE)
        cache = attention_cache(**sizes, rope=caches.ROPE, sequences=3, streams=3)
        run = forward, None
    found, wanted = cache, cache
    for lengths in ([5, 1, 3], [1, 2, 1], [2, 1]):
        batch = make_batch([[3 + i, *range(n - 1)] for i, n in enumerate(lengths)])
        plan = jaxkv.init_batch(found, batch)
        assert len(plan.ubatches) == 1
        found, logits, *_ = jaxkv.prefill(*run, found, batch, plan=plan)
        plan = jaxkv.init_batch(wanted, batch, split_by="equal")
        assert len(plan.ubatches) > 1
        wanted, others, *_ = jaxkv.prefill(*run, wanted, batch, plan=plan)
        np.testing.assert_allclose(logits, others, atol=2e-5)
        assert found.seq_pos_max().tolist() == wanted.seq_pos_max().tolist()
        assert found.seq_pos_min().tolist() == wanted.seq_pos_min().tolist()


def test_window_with_few_cells_takes_ragged_prompts_in_several_ubatches():
    cache = replace(SPLIT, cells=8, windows=(jaxkv.Window.sliding(4),)).make()
    plan = jaxkv.init_batch(cache, make_batch([[1] * 10, [2] * 5])).check()
    assert [ubatch.valid.shape for ubatch in plan.ubatches] == [(2, 8), (1, 8)]


@pytest.mark.parametrize(
    "split_by", ["simple", "sequence", pytest.param("equal", marks=pytest.mark.core)]
)
def test_gather_outputs_restores_the_order_of_the_batch(split_by):  # trap 49
    """Two sequences are interleaved; each token's logits are its own number."""
    tokens, sequences = np.array([5, 1, 4, 2, 6, 3, 7]), np.array([2, 0, 2, 0, 0, 2, 0])
    outputs = np.array([False, True, True, False, True, True, False])
    batch = make_batch(tokens, sequences=sequences, outputs=outputs)
    plan = jaxkv.init_batch(parse_four(), batch, ubatch_size=4, split_by=split_by).check()
    assert len(plan.ubatches) > 1
    logits = []
    for ubatch in plan.ubatches:  # a model whose logits are the token
        logits.append(ubatch.tokens.reshape(-1)[ubatch.outputs][:, None] * jnp.ones((1, 2)))
        assert ubatch.valid.sum() <= 4
    assert plan.gather_outputs(logits)[:, 0].tolist() == tokens[outputs].tolist()
    plan = jaxkv.init_batch(parse_four(), make_batch([1], outputs=[False]))
    assert plan.gather_outputs([jnp.ones((8, 2))]).shape == (0, 2)


def test_init_batch_traced_list_has_room_for_every_output():
    """Outputs are traced, so each may be marked; without them each sequence has one."""

    @jax.jit
    def chosen(cache, tokens, outputs):
        (ubatch,) = jaxkv.init_batch(cache, make_batch(tokens, outputs=outputs)).ubatches
        return ubatch.tokens.reshape(-1).at[ubatch.outputs].get(mode="fill", fill_value=-1)

    tokens = jnp.arange(1, 11)
    assert chosen(SMALL.make(), tokens, tokens > 0)[:10].tolist() == tokens.tolist()
    assert chosen(SMALL.make(), tokens, None).tolist() == [10, *[0] * 7]  # padding is in range
    assert chosen(SMALL.make(), tokens[:8], None).tolist() == tokens[:8].tolist()  # as few as 8


def extra_of(tokens):
    tokens = np.asarray(tokens)
    return {"twice": np.stack([tokens, 2 * tokens], axis=-1).astype(float), "odd": tokens % 2 == 1}


STATES = recurrent_cache(1, {"x": ((), jnp.float32)}, sequences=3)


@pytest.mark.parametrize(
    ("cache", "traced"),
    [
        (SMALL.make(), False),
        pytest.param(SMALL.make(), True, marks=pytest.mark.core),
        pytest.param(STATES, False, marks=pytest.mark.core),
    ],
    ids=["cells", "cells, traced", "states"],
)
def test_extra_goes_with_its_token(cache, traced):
    """For any way of splitting, padding and arranging a batch."""
    tokens, valid = np.arange(5, 13), np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    sequences = [0, 1, 77, 0, 2, 2, 0, 2]  # padding may have any
    batch = make_batch(tokens, sequences=sequences, valid=valid, extra=extra_of(tokens))
    plan = partial(jaxkv.init_batch, ubatch_size=512 if traced else 3)
    found = []
    for ubatch in (jax.jit(plan) if traced else plan)(cache, batch).check().ubatches:
        there = np.asarray(ubatch.valid)
        for name, wanted in extra_of(ubatch.tokens).items():
            assert ubatch.extra[name].shape == wanted.shape
            np.testing.assert_array_equal(np.asarray(ubatch.extra[name])[there], wanted[there])
        found += np.asarray(ubatch.tokens)[there].tolist()
    assert sorted(found) == tokens[valid].tolist()


@pytest.mark.core
def test_extra_and_its_name_are_part_of_the_content():
    """Keys of another place differ from those of an earlier table."""
    cache = SMALL.make()
    extras = (None, {"at": [0, 1]}, {"at": [0, 2]}, {"to": [0, 1]})
    after = [apply_batch(cache, [1, 2], extra=extra) for extra in extras]
    for one in after:
        assert [bool(jaxkv.rewind(other, to=one.table)[1]) for other in after].count(True) == 1


def test_extra_of_64_bits_becomes_32_where_it_fits():
    edges = [2**31 - 1, -(2**31)]
    (edge,) = make_batch([1, 2], extra={"edge": np.array(edges)}).extra.values()
    assert edge.dtype == np.int32 and edge.tolist() == edges


@pytest.mark.core
def test_extra_reaches_prefill_and_its_derivative():
    """A prompt in ubatches, and the derivative by an extra array."""

    def forward(params, step):
        x = (params[step.tokens] * step.extra["at"])[:, :, None]
        step, out = jaxkv.attend(step, 0, x, x, x)
        return step, out.reshape(-1, 2)[step.outputs]

    cache = attention_cache(layers=1, cells=8, kv_heads=1, head_dim=2)

    def last(place, size):
        batch = make_batch(np.arange(6), extra={"at": place})
        params = jnp.arange(12.0).reshape(6, 2) / 7
        return jnp.sum(jaxkv.prefill(forward, params, cache, batch, ubatch_size=size)[1])

    place = jnp.arange(6.0).reshape(6, 1)
    value, grad = jax.value_and_grad(last)(place, 512)
    np.testing.assert_allclose(last(place, 3), value, rtol=1e-6)
    assert np.isfinite(grad).all() and np.any(grad != 0)
