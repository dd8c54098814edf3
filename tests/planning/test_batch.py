"""Batches: what is checked, how they are cut, and how their outputs come back in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.places import NOWHERE, bucket
from jaxkv.planning.layout import layout, rank
from jaxkv.planning.splits import equal_split, sequence_split, simple_split
from tests.memories import SMALL, filled, think

SPLITS = [simple_split, equal_split, sequence_split]


# --------------------------------------------------------------------------------------- making


def test_lists_of_lists_are_sequences():
    batch = make_batch([[1, 2], [3]])
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.sequences.tolist() == [0, 0, 1]
    batch = make_batch([[1, 2], [3]], sequences=[7, 4])
    assert batch.sequences.tolist() == [7, 7, 4]


def test_a_list_without_tokens_is_refused():
    """Its sequence would have no logits, and rows of logits would be taken for those of others."""
    with pytest.raises(ValueError, match=r"got none for sequences \[4\]: leave those lists out"):
        make_batch([[1, 2], []], sequences=[7, 4])


def test_negative_tokens_are_padding_or_a_mistake():
    with pytest.raises(ValueError, match="wanted tokens of at least 0, got a negative one"):
        make_batch([1, -1])
    assert make_batch([1, -1], valid=[True, False]).tokens.tolist() == [1, -1]


def test_one_id_is_for_all():
    assert make_batch([1, 2, 3], sequences=5).sequences.tolist() == [5, 5, 5]
    assert make_batch([1, 2, 3]).sequences.tolist() == [0, 0, 0]


def test_host_stays_host_and_device_device():
    assert isinstance(make_batch([1, 2]).tokens, np.ndarray)
    batch = make_batch(jnp.array([1, 2]), sequences=jnp.array([0, 1]))
    assert isinstance(batch.tokens, jax.Array)
    assert isinstance(batch.sequences, jax.Array)


@pytest.mark.core
def test_embeddings_in_place_of_tokens():
    batch = make_batch(embeddings=np.ones((3, 8), np.float32))
    assert batch.tokens is None
    assert batch.valid.shape == (3,)
    (ubatch,) = jaxkv.init_batch(filled(4), batch, ubatch_size=4).ubatches
    assert ubatch.embeddings.shape == (1, 4, 8)
    assert ubatch.tokens is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "either tokens or embeddings"),
        ({"tokens": [1], "embeddings": np.ones((1, 2))}, "either tokens or embeddings"),
        ({"tokens": [1, 2], "sequences": [0]}, r"sequences .* wanted \(2,\), got \(1,\)"),
        ({"tokens": [1, 2], "positions": [0, 1, 2]}, r"positions .* wanted \(2,\), got \(3,\)"),
        ({"tokens": [1, 2], "outputs": [True]}, r"outputs .* wanted \(2,\), got \(1,\)"),
        ({"tokens": [1, 2], "valid": [[True, True]]}, r"valid .* wanted \(2,\), got \(1, 2\)"),
        ({"tokens": [[1, 2], [3]], "sequences": [0]}, "sequences"),
        ({"tokens": [[1, 2], [3]], "sequences": [0, 1, 2]}, "sequences"),
    ],
)
def test_what_does_not_fit_together(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_batch(**wrong)


def test_one_id_for_lists_of_lists_is_not_ignored():
    """Two lists cannot be the one sequence 3; whatever happens, it is not 0 and 1 in silence."""
    try:
        batch = make_batch([[1, 2], [3]], sequences=3)
    except ValueError:
        return
    assert set(batch.sequences.tolist()) == {3}


@pytest.mark.parametrize("traced", [False, True])
def test_only_drops_tokens_and_keeps_shapes(traced):
    batch = make_batch([[1, 2], [3], [4, 5]])
    only = jax.jit(lambda b, fits: b.only(fits)) if traced else lambda b, fits: b.only(fits)
    rest = only(batch, np.array([True, False, True]))
    assert rest.valid.tolist() == [True, True, False, True, True]
    assert rest.tokens.shape == (5,)


@pytest.mark.core
def test_what_fits_goes_in_and_the_rest_later():
    memory = filled(7)
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
        if there:
            ranks.append(len(seen.get(seq, [])))
            before.append(seen[seq][-1] if seq in seen else i)
            seen.setdefault(seq, []).append(i)
        else:
            ranks.append(None)
            before.append(None)
    return ranks, before


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=6, max_size=6))
def test_rank(tokens):
    sequences, valid = np.array([s for s, _ in tokens], np.int32), np.array([v for _, v in tokens])
    expected = numbered(sequences.tolist(), valid.tolist())
    for answer in (rank(sequences, valid), jax.jit(rank)(sequences, valid)):
        for got, wanted in zip(answer, expected, strict=True):
            assert [int(g) if v else None for g, v in zip(got, valid, strict=True)] == wanted


def test_bucket():
    for count in range(1, 70):
        assert bucket(count) >= count
        assert bucket(count) < 2 * count
        assert bin(bucket(count)).count("1") == 1


# ---------------------------------------------------------------------------------------- cutting


@pytest.mark.parametrize("split_by", SPLITS, ids=lambda f: f.__name__)
@given(sequences=st.lists(st.integers(0, 3), min_size=1, max_size=40), size=st.integers(1, 9))
def test_splits_take_every_token_once_in_order_and_never_too_many(split_by, sequences, size):
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
        if split_by is simple_split:
            assert part.shape[0] == 1
            assert tokens == list(range(tokens[0], tokens[-1] + 1))
        if split_by is sequence_split:
            assert part.shape[0] == 1
            assert len(ids[0]) == 1
        if split_by is equal_split:
            assert all(len(row) == 1 for row in ids)
            assert len(set.union(*ids)) == part.shape[0]
            assert len({(row != NOWHERE).sum() for row in part}) == 1


def test_simple_split_fills_ubatches():
    sizes = [(part != NOWHERE).sum() for part in simple_split(np.zeros(11, np.int32), 4)]
    assert sizes == [4, 4, 3]


# ------------------------------------------------------------------------------- collecting again


@pytest.mark.parametrize("split_by", ["simple", "equal", "sequence"])
def test_outputs_come_back_in_the_order_of_the_batch(split_by):
    """Two sequences are dealt; each token asks for the logits of its own number."""
    tokens, sequences = np.array([5, 1, 4, 2, 6, 3, 7]), np.array([2, 0, 2, 0, 0, 2, 0])
    outputs = np.array([False, True, True, False, True, True, False])
    batch = make_batch(tokens, sequences=sequences, outputs=outputs)
    plan = jaxkv.init_batch(filled(4), batch, ubatch_size=4, split_by=split_by).check()
    assert len(plan.ubatches) > 1
    logits = []
    for ubatch in plan.ubatches:  # a model whose logits are the token itself
        logits.append(ubatch.tokens.reshape(-1)[ubatch.outputs][:, None] * jnp.ones((1, 2)))
        assert ubatch.valid.sum() <= 4
    assert plan.collect(logits)[:, 0].tolist() == tokens[outputs].tolist()


def test_a_traced_list_has_room_for_every_output_that_it_may_mark():
    """Which are marked is not known, so it may be each of them; else each sequence has one."""

    @jax.jit
    def chosen(memory, tokens, outputs):
        (ubatch,) = jaxkv.init_batch(memory, make_batch(tokens, outputs=outputs)).ubatches
        return ubatch.tokens.reshape(-1).at[ubatch.outputs].get(mode="fill", fill_value=-1)

    tokens = jnp.arange(1, 11)
    assert chosen(SMALL.make(), tokens, tokens > 0)[:10].tolist() == tokens.tolist()
    assert chosen(SMALL.make(), tokens, None)[:1].tolist() == [10]


def test_a_batch_without_outputs():
    plan = jaxkv.init_batch(filled(4), make_batch([1, 2, 3], outputs=[False] * 3), ubatch_size=4)
    _, logits = think(filled(4), plan.ubatches[0])
    assert plan.collect([logits]).shape[0] == 0


def test_padding_inside_a_batch_goes_nowhere():
    valid = [True, False, True, True]
    batch = make_batch([1, 99, 2, 3], sequences=[0, 77, 0, 1], valid=valid)
    memory = filled(4)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, batch, ubatch_size=4))
    assert jaxkv.seq_pos_max(memory, [0, 1]).tolist() == [5, 0]
    assert jaxkv.used(memory).item() == 7


@pytest.mark.core
def test_a_traced_token_of_no_sequence_refuses_all_and_counts_as_padding():
    @jax.jit
    def plan(memory, sequences):
        return jaxkv.init_batch(memory, make_batch(jnp.array([5, 6, 7]), sequences=sequences))

    for unknown in (-1, 3):
        refused = plan(SMALL.make(), jnp.array([0, unknown, 1]))
        assert not refused.ok and set(refused.reason.tolist()) == {Reason.UNKNOWN_SEQUENCE}
        assert refused.ubatches[0].valid[0, :3].tolist() == [True, False, True]


def test_rows_that_come_ready_are_computed_at_once():
    """`[R, T]` tokens inside of jit: each row is a sequence here, and one is padded."""

    @jax.jit
    def plan(memory, tokens, sequences, valid):
        return jaxkv.init_batch(memory, make_batch(tokens, sequences=sequences, valid=valid))

    tokens = jnp.array([[1, 2], [3, 4]])
    sequences = jnp.array([[1, 1], [2, 2]])
    valid = jnp.array([[True, True], [True, False]])
    memory = filled(4)
    done = plan(memory, tokens, sequences, valid)
    (ubatch,) = done.ubatches
    assert ubatch.slots[valid].tolist() == [4, 5, 6]
    assert ubatch.positions[valid].tolist() == [0, 1, 0]
    after = jaxkv.apply(memory, done)
    assert jaxkv.seq_pos_max(after, [0, 1, 2]).tolist() == [3, 1, 0]


def test_padding_asks_for_no_outputs():
    batch = make_batch(np.ones(20, np.int32), outputs=np.arange(20) == 3)
    flat, parts, outputs = layout(SMALL.make().table.facts, batch, 512, None)
    assert flat.tokens.shape == (32,) and [part.shape for part in parts] == [(1, 32)]
    assert outputs == 8


# ----------------------------------------------------------------------------- what else is told


def told(batch):
    """The same of each token: twice the token, and where it is odd."""
    tokens = np.asarray(batch)
    return {"twice": np.stack([tokens, 2 * tokens], axis=-1).astype(float), "odd": tokens % 2 == 1}


@pytest.mark.parametrize(
    ("kind", "traced"),
    [
        ("pool", False),
        pytest.param("pool", True, marks=pytest.mark.core),
        pytest.param("states", False, marks=pytest.mark.core),
    ],
)
def test_what_else_is_told_goes_with_its_token(kind, traced):
    """However a batch is cut, padded and brought into rows."""
    sizes = dict(sequences=3, streams=1)
    memory = (
        jaxkv.make_kv_cache(layers=1, cells=20, kv_heads=1, head_dim=2, **sizes)
        if kind == "pool"
        else jaxkv.make_recurrent_cache(layers=1, states={"x": ((), jnp.float32)}, **sizes)
    )
    tokens = [5, 6, 7, 8, 9, 10, 11, 12]
    valid = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    batch = make_batch(tokens, sequences=[0, 1, 2, 0, 2, 2, 0, 2], valid=valid, extra=told(tokens))
    plan = jax.jit if traced else lambda f: f
    ubatches = plan(
        lambda memory, batch: jaxkv.init_batch(memory, batch, ubatch_size=512 if traced else 3)
    )(memory, batch).ubatches
    found = []
    for ubatch in ubatches:
        there = np.asarray(ubatch.valid)
        assert ubatch.extra["twice"].shape == (*there.shape, 2)
        for name, wanted in told(ubatch.tokens).items():
            np.testing.assert_array_equal(np.asarray(ubatch.extra[name])[there], wanted[there])
        found += np.asarray(ubatch.tokens)[there].tolist()
    assert sorted(found) == sorted(np.array(tokens)[valid])


def test_what_else_is_told_is_a_part_of_the_content():
    """Keys of another place are not those that an earlier table knew."""
    memory = jaxkv.make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
    after = [
        jaxkv.apply(memory, jaxkv.init_batch(memory, make_batch([1, 2], **more)))
        for more in ({}, {"extra": {"at": [0, 1]}}, {"extra": {"at": [0, 2]}})
    ]
    tables = [jaxkv.split(one)[0] for one in after]
    for i, table in enumerate(tables):
        assert [bool(jaxkv.go_back(table, one)[1]) for one in after] == [i == j for j in range(3)]


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"a": [1, 2]}, ValueError, r"extra\['a'\] must have one entry a token: wanted \(3,\)"),
        ({"a": ["x", "y", "z"]}, TypeError, "wanted integers, floats or bools"),
        ({1: [1, 2, 3]}, TypeError, "wanted extra as arrays by name"),
        ([1, 2, 3], TypeError, "wanted extra as arrays by name"),
    ],
)
def test_what_else_is_told_has_an_entry_a_token(extra, error, message):
    with pytest.raises(error, match=message):
        make_batch([1, 2, 3], extra=extra)


@pytest.mark.core
def test_a_model_is_told_in_prefill_and_by_derivatives():
    """A prompt in ubatches, and the derivative of what stands beside tokens."""
    place = jnp.arange(6.0).reshape(6, 1)

    def forward(weights, memory, ubatch):
        x = weights[ubatch.tokens] * ubatch.extra["at"]
        x = x[:, :, None]
        memory, out = jaxkv.attend(memory, 0, ubatch, x, x, x)
        return memory, out.reshape(-1, 2)[ubatch.outputs]

    weights = jnp.arange(14.0).reshape(7, 2) / 7
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=2)

    def last(place, size):
        batch = make_batch([1, 2, 3, 4, 5, 6], extra={"at": place})
        return jnp.sum(jaxkv.prefill(forward, weights, memory, batch, ubatch_size=size)[1])

    np.testing.assert_allclose(last(place, 2), last(place, 512), rtol=1e-6)
    grad = jax.grad(lambda place: last(place, 512))(place)
    assert np.isfinite(grad).all() and np.any(grad != 0)
