"""Batches: how they are made and cut, and how their outputs come back in order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv import make_batch
from jaxkv.places import NOWHERE, bucket
from jaxkv.planning.layout import layout, rank
from jaxkv.planning.splits import equal_split, sequence_split, simple_split
from tests.memories import SMALL, drawn

SPLITS = [simple_split, equal_split, sequence_split]


def started():
    """Sequence 0 of four tokens."""
    return drawn("0{0} 1{0} 2{0} 3{0}")


# --------------------------------------------------------------------------------------- making


@pytest.mark.parametrize(
    ("tokens", "sequences", "wanted"),
    [
        ([[1, 2], [3]], None, [0, 0, 1]),
        ([[1, 2], [3]], [7, 4], [7, 7, 4]),
        ([1, 2, 3], None, [0, 0, 0]),
        ([1, 2, 3], 5, [5, 5, 5]),
        (np.array([1, 2, 3], np.uint8), np.int64(5), [5, 5, 5]),
    ],
)
def test_make_batch_fills_in_sequences(tokens, sequences, wanted):
    batch = make_batch(tokens, sequences=sequences)
    assert batch.tokens.tolist() == [1, 2, 3] and batch.sequences.tolist() == wanted
    assert batch.tokens.dtype == batch.sequences.dtype == np.int32
    assert isinstance(batch.tokens, np.ndarray)


def test_make_batch_device_arrays_and_negative_padding_stay():
    batch = make_batch(jnp.array([1, 2]), sequences=jnp.array([0, 1]))
    assert isinstance(batch.tokens, jax.Array) and isinstance(batch.sequences, jax.Array)
    assert make_batch([1, -1], valid=[True, False]).tokens.tolist() == [1, -1]


@pytest.mark.core
def test_make_batch_embeddings_replace_tokens():
    batch = make_batch(embeddings=np.ones((3, 8), np.float32))
    assert batch.tokens is None and batch.valid.shape == (3,)
    (ubatch,) = jaxkv.init_batch(started(), batch, ubatch_size=4).ubatches
    assert ubatch.tokens is None and ubatch.embeddings.shape == (1, 4, 8)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "plain"])
def test_only_drops_tokens_and_keeps_shapes(transform):
    batch = make_batch([[1, 2], [3], [4, 5]])
    rest = transform(jaxkv.Batch.only)(batch, np.array([True, False, True]))
    assert rest.valid.tolist() == [True, True, False, True, True]
    assert rest.tokens.shape == (5,)


@pytest.mark.core
def test_only_of_plan_fits_is_planned():
    memory = drawn(" ".join(f"{i}{{0}}" for i in range(7)))
    batch = make_batch([[1, 2, 3], [4, 5, 6, 7]], sequences=[1, 2])
    plan = jaxkv.init_batch(memory, batch, ubatch_size=4)
    assert plan.fits.tolist() == [True, True, False]
    plan = jaxkv.init_batch(memory, batch.only(plan.fits), ubatch_size=4)
    assert plan.ok
    assert jaxkv.seq_pos_max(jaxkv.apply(memory, plan), [0, 1, 2]).tolist() == [6, 2, -1]


# -------------------------------------------------------------------------------------- numbering


def numbered(sequences, valid):
    """`rank`, one token at a time."""
    seen, ranks, before = {}, [], []
    for i, (seq, there) in enumerate(zip(sequences, valid, strict=True)):
        mine = seen.setdefault(seq, []) if there else []
        ranks.append(len(mine) if there else None)
        before.append((mine[-1] if mine else i) if there else None)
        mine.append(i)
    return ranks, before


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=6, max_size=6))
def test_rank_matches_counting(tokens):
    sequences, valid = np.array([s for s, _ in tokens], np.int32), np.array([v for _, v in tokens])
    expected = numbered(sequences.tolist(), valid.tolist())
    for answer in (rank(sequences, valid), jax.jit(rank)(sequences, valid)):
        for got, wanted in zip(answer, expected, strict=True):
            assert [int(g) if v else None for g, v in zip(got, valid, strict=True)] == wanted


# ---------------------------------------------------------------------------------------- cutting


@pytest.mark.parametrize("split_by", SPLITS, ids=lambda f: f.__name__)
@given(sequences=st.lists(st.integers(0, 3), min_size=1, max_size=40), size=st.integers(1, 9))
def test_split_takes_every_token_once_in_order(split_by, sequences, size):
    sequences = np.array(sequences, np.int32)
    parts = split_by(sequences, size)
    taken = [part[part != NOWHERE].tolist() for part in parts]
    assert sorted(sum(taken, [])) == list(range(len(sequences)))
    assert all(1 <= len(tokens) <= size for tokens in taken)
    for seq in set(sequences.tolist()):
        mine = [i for i in sum(taken, []) if sequences[i] == seq]
        assert mine == sorted(mine)
    for part, tokens in zip(parts, taken, strict=True):
        assert part.dtype == np.int32
        assert part.shape[1] <= size
        assert part.shape[1] == size or part.shape[1] == bucket(part.shape[1])
        ids = [set(sequences[row[row != NOWHERE]].tolist()) for row in part]
        if split_by is equal_split:
            assert all(len(row) == 1 for row in ids)
            assert len(set.union(*ids)) == part.shape[0]
            assert len({(row != NOWHERE).sum() for row in part}) == 1
        else:
            assert part.shape[0] == 1
        if split_by is simple_split:
            assert tokens == list(range(tokens[0], tokens[-1] + 1))
        if split_by is sequence_split:
            assert len(ids[0]) == 1


def test_layout_pads_tokens_and_outputs_to_buckets():
    batch = make_batch(np.ones(20, np.int32), outputs=np.arange(20) == 3)
    flat, parts, outputs = layout(SMALL.make().table.facts, batch, 512, None)
    assert flat.tokens.shape == (32,) and [part.shape for part in parts] == [(1, 32)]
    assert outputs == 8


def test_layout_rows_are_padded_but_never_past_the_sequences():
    sizes = dict(layers=1, cells=8, kv_heads=1, head_dim=4, sequences=3, streams=3)
    memory = jaxkv.make_kv_cache(**sizes)
    facts = jaxkv.split(memory)[0].facts
    for prompts, rows in (([[1]], 1), ([[1], [2]], 2), ([[1], [2], [3]], 3)):
        _, (part,), _ = layout(facts, make_batch(prompts), 512, None)
        assert part.shape == (rows, 1)
    for size, tokens in ((2, 1), (7, 2)):
        shapes = jax.eval_shape(partial(jaxkv.init_full, memory, ubatch_size=size))
        assert shapes.ubatches[0].tokens.shape == (3, tokens)


# ------------------------------------------------------------------------------- collecting again


@pytest.mark.parametrize(
    "split_by", ["simple", "sequence", pytest.param("equal", marks=pytest.mark.core)]
)
def test_collect_restores_the_order_of_the_batch(split_by):
    """Two sequences are dealt; each token asks for the logits of its own number."""
    tokens, sequences = np.array([5, 1, 4, 2, 6, 3, 7]), np.array([2, 0, 2, 0, 0, 2, 0])
    outputs = np.array([False, True, True, False, True, True, False])
    batch = make_batch(tokens, sequences=sequences, outputs=outputs)
    plan = jaxkv.init_batch(started(), batch, ubatch_size=4, split_by=split_by).check()
    assert len(plan.ubatches) > 1
    logits = []
    for ubatch in plan.ubatches:  # a model whose logits are the token itself
        logits.append(ubatch.tokens.reshape(-1)[ubatch.outputs][:, None] * jnp.ones((1, 2)))
        assert ubatch.valid.sum() <= 4
    assert plan.collect(logits)[:, 0].tolist() == tokens[outputs].tolist()


def test_collect_without_outputs_is_empty():
    plan = jaxkv.init_batch(started(), make_batch([1, 2, 3], outputs=[False] * 3), ubatch_size=4)
    (ubatch,) = plan.ubatches
    assert plan.collect([jnp.ones((*ubatch.outputs.shape, 2))]).shape == (0, 2)


def test_init_batch_traced_list_has_room_for_every_output():
    """Which are marked is not known, so it may be each of them; else each sequence has one."""

    @jax.jit
    def chosen(memory, tokens, outputs):
        (ubatch,) = jaxkv.init_batch(memory, make_batch(tokens, outputs=outputs)).ubatches
        return ubatch.tokens.reshape(-1).at[ubatch.outputs].get(mode="fill", fill_value=-1)

    tokens = jnp.arange(1, 11)
    assert chosen(SMALL.make(), tokens, tokens > 0)[:10].tolist() == tokens.tolist()
    assert chosen(SMALL.make(), tokens, None)[:1].tolist() == [10]


def test_init_batch_padding_goes_nowhere():
    batch = make_batch([1, 99, 2, 3], sequences=[0, 77, 0, 1], valid=[True, False, True, True])
    plan = jaxkv.init_batch(started(), batch)
    (ubatch,) = plan.ubatches
    assert ubatch.slots[ubatch.valid].tolist() == [4, 5, 6]
    assert ubatch.positions[ubatch.valid].tolist() == [4, 5, 0]
    memory = jaxkv.apply(started(), plan)
    assert jaxkv.seq_pos_max(memory, [0, 1, 2]).tolist() == [5, 0, -1]


# ------------------------------------------------------------------------------------------ extra


def extra_of(tokens):
    """The same of each token: twice the token, and where it is odd."""
    tokens = np.asarray(tokens)
    return {"twice": np.stack([tokens, 2 * tokens], axis=-1).astype(float), "odd": tokens % 2 == 1}


CELLS = jaxkv.make_kv_cache(layers=1, cells=20, kv_heads=1, head_dim=2, sequences=3)
STATES = jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, sequences=3)


@pytest.mark.parametrize(
    ("memory", "traced"),
    [
        (CELLS, False),
        pytest.param(CELLS, True, marks=pytest.mark.core),
        pytest.param(STATES, False, marks=pytest.mark.core),
    ],
    ids=["cells", "cells, traced", "states"],
)
def test_extra_goes_with_its_token(memory, traced):
    """However a batch is cut, padded and brought into rows."""
    tokens = [5, 6, 7, 8, 9, 10, 11, 12]
    valid = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    sequences = [0, 1, 2, 0, 2, 2, 0, 2]
    batch = make_batch(tokens, sequences=sequences, valid=valid, extra=extra_of(tokens))

    def plan(memory, batch):
        return jaxkv.init_batch(memory, batch, ubatch_size=512 if traced else 3)

    found = []
    for ubatch in (jax.jit(plan) if traced else plan)(memory, batch).ubatches:
        there = np.asarray(ubatch.valid)
        assert ubatch.extra["twice"].shape == (*there.shape, 2)
        for name, wanted in extra_of(ubatch.tokens).items():
            np.testing.assert_array_equal(np.asarray(ubatch.extra[name])[there], wanted[there])
        found += np.asarray(ubatch.tokens)[there].tolist()
    assert sorted(found) == sorted(np.array(tokens)[valid])


@pytest.mark.core
def test_extra_and_its_name_are_part_of_the_content():
    """Keys of another place are not those that an earlier table knew."""
    memory = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
    extras = (None, {"at": [0, 1]}, {"at": [0, 2]}, {"to": [0, 1]})
    after = [
        jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1, 2], extra=extra)))
        for extra in extras
    ]
    for one in after:
        assert [bool(jaxkv.go_back(one.table, other)[1]) for other in after].count(True) == 1


def test_extra_of_64_bits_becomes_32_where_it_fits():
    given = {"edge": np.array([2**31 - 1, -(2**31)]), "none": np.zeros((2, 0))}
    extra = make_batch([1, 2], extra=given).extra
    assert extra["edge"].dtype == np.int32 and extra["edge"].tolist() == [2**31 - 1, -(2**31)]
    assert extra["none"].shape == (2, 0)


@pytest.mark.core
def test_extra_reaches_prefill_and_its_derivative():
    """A prompt in ubatches, and the derivative of what stands beside tokens."""

    def forward(weights, memory, ubatch):
        x = (weights[ubatch.tokens] * ubatch.extra["at"])[:, :, None]
        memory, out = jaxkv.attend(memory, 0, ubatch, x, x, x)
        return memory, out.reshape(-1, 2)[ubatch.outputs]

    weights = jnp.arange(14.0).reshape(7, 2) / 7
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=2)

    def last(place, size):
        batch = make_batch([1, 2, 3, 4, 5, 6], extra={"at": place})
        return jnp.sum(jaxkv.prefill(forward, weights, memory, batch, ubatch_size=size)[1])

    place = jnp.arange(6.0).reshape(6, 1)
    value, grad = jax.value_and_grad(last)(place, 512)
    np.testing.assert_allclose(last(place, 3), value, rtol=1e-6)
    assert np.isfinite(grad).all() and np.any(grad != 0)
