"""Keys and values of 8 bits: codes and scales, and all that a memory does with them.

The encoding has an oracle in NumPy. What a memory does has another memory beside it, of float32,
which is told the numbers that the first one stores: `Pair`.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import snapshot
from jaxkv.ops.attention import api, pallas_gpu, pallas_tpu
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.sight import mask_of
from jaxkv.ops.attention.softmax import Options
from jaxkv.ops.quantised import decoded, encoded, zeros
from jaxkv.snapshot.file import written
from jaxkv.snapshot.whole import describe
from tests.cases import mostly_nightly
from tests.memories import assert_identical
from tests.meshes import mesh_of, placed
from tests.sights import sight_of_mask

DATA = Path(__file__).parent.parent / "data"
core = pytest.mark.core
HEADS, GROUP, SIZE = 2, 2, 5
ROPE = jaxkv.make_rope(4, base=100.0)
MOST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
over_dtypes = pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])


def coded(x, dtype="int8"):
    """Codes and scales of numbers `[..., D]`: the encoding as it is written down, in NumPy."""
    x = np.asarray(x, np.float32)
    codes, scales = [], []
    for first in range(0, x.shape[-1], 128):
        group = x[..., first : first + 128]
        scale = np.abs(group).max(-1, keepdims=True) * np.float32(1 / MOST[dtype])
        scale[~np.isfinite(x).all(-1)] = np.nan
        there = scale > 0
        code = np.where(there, group, np.float32(0)) / np.where(there, scale, np.float32(1))
        code = np.clip(np.rint(code) if dtype == "int8" else code, -MOST[dtype], MOST[dtype])
        codes.append(code.astype(ml_dtypes.float8_e4m3fn if "e4m3" in dtype else dtype))
        scales.append(scale)
    return np.concatenate(codes, axis=-1), np.concatenate(scales, axis=-1)


def rounded(x, dtype="int8"):
    """What is read of numbers that were stored."""
    codes, scales = coded(x, dtype)
    return codes.astype(np.float32) * np.repeat(scales, 128, axis=-1)[..., : codes.shape[-1]]


@over_dtypes
@pytest.mark.parametrize("size", [pytest.param(7, marks=core), 64, pytest.param(160, marks=core)])
def test_codes_and_scales_are_those_of_the_formula(size, dtype):
    """Also of zeros, of the largest and the smallest numbers, and of what is not finite."""
    rng = np.random.default_rng(size)
    x = rng.normal(size=(2, 50, size)).astype(np.float32)
    x *= np.float32(10.0) ** rng.integers(-30, 30, (2, 50, 1))
    x[0, 0], x[0, 1], x[1, 3] = 0, 3e38, -1e-45
    x[0, 2, 0], x[0, 3], x[0, 4, 1] = np.nan, np.nan, -np.inf
    found = jax.jit(encoded)(jnp.asarray(x), zeros((1,), dtype))
    codes, scales = coded(x, dtype)
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(np.asarray(found.codes, np.float32), codes.astype(np.float32))
    assert found.codes.dtype == dtype and found.scales.dtype == jnp.float32
    assert np.isfinite(np.asarray(found.codes, np.float32)).all()
    read = np.asarray(decoded(found))
    assert (read[0, 0] == 0).all() and np.isnan(read[0, 2:5]).all()
    finite = np.isfinite(x).all(-1)
    error, limit = np.abs(read - x)[finite], np.abs(x).max(-1, keepdims=True)[finite]
    assert (error <= limit * (0.5 / 127 if dtype == "int8" else 1 / 16) * 1.001 + 1e-38).all()


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def memory_of(dtype="int8", **sizes):
    sizes = {"cells": 12, "kv_heads": HEADS, "head_dim": SIZE, "rope": ROPE, **sizes}
    return jaxkv.make_kv_cache(layers=1, dtype=dtype, **sizes)


def parts_of(buffers):
    return [x for half in (buffers.k, buffers.v) for one in half for x in (one.codes, one.scales)]


class Pair:
    """A quantised memory, and one of float32 that is told what the first one should store.

    Both are led through the same verbs. What tokens see is compared with the plain formula over
    the other memory's keys and values.
    """

    def __init__(self, dtype="int8", **sizes):
        self.dtype, self.seed = dtype, 0
        self.ours, self.other = memory_of(dtype, **sizes), memory_of("float32", **sizes)

    def tell(self, texts, *, ubatch_size=None, sequences=None):
        """Tell sequences so many tokens each."""
        batch = jaxkv.make_batch([[0] * n for n in texts], sequences=sequences)
        plan, other = (
            jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check()
            for memory in (self.ours, self.other)
        )
        for ubatch, twin in zip(plan.ubatches, other.ubatches, strict=True):
            self.step(ubatch, twin)

    def step(self, ubatch, twin):
        self.seed += 1
        shape = ubatch.valid.shape
        q, k, v = (
            numbers((self.seed, i), *shape, heads, SIZE)
            for i, heads in enumerate((HEADS * GROUP, HEADS, HEADS))
        )
        self.ours, out = attended(self.ours, ubatch, q, k, v)
        self.other, wanted = looked(self.other, twin, q, *(rounded(x, self.dtype) for x in (k, v)))
        np.testing.assert_allclose(out, wanted, atol=2e-6)
        self.compare()

    def edit(self, verb, *args):
        """Do it to both; of a verb that returns a pair, the memory is the first."""
        for name in ("ours", "other"):
            done = verb(getattr(self, name), *args)
            setattr(self, name, done[0] if isinstance(done, tuple) else done)
        self.compare()

    def plan(self, make, **options):
        """Carry out an update or a defrag."""
        for name in ("ours", "other"):
            memory = getattr(self, name)
            setattr(self, name, jaxkv.apply(memory, make(memory, **options)))
        # What was rotated is stored anew; what was not comes back as it is, but for the last bit.
        table, buffers = jaxkv.split(self.other)
        k = tuple(jnp.asarray(rounded(x, self.dtype)) for x in buffers.k)
        self.other = jaxkv.join(table, replace(buffers, k=k))
        self.compare()

    def compare(self):
        """The tables are the same, and so is what the cells in use hold."""
        for field in ("position", "owners", "shift"):
            one, other = (getattr(m.table, field) for m in (self.ours, self.other))
            np.testing.assert_array_equal(one, other)
        used = np.asarray(self.ours.table.position)[:, None, :, None] >= 0
        for half in "kv":
            (one,), (other,) = (getattr(m.buffers, half) for m in (self.ours, self.other))
            np.testing.assert_allclose(
                np.where(used, decoded(one), 0), np.where(used, other, 0), rtol=2e-6, atol=1e-6
            )


@jax.jit
def attended(memory, ubatch, q, k, v):
    return jaxkv.attend(jaxkv.apply(memory, ubatch), 0, ubatch, q, k, v)


@jax.jit
def looked(memory, ubatch, q, k, v):
    """The same by the plain formula."""
    memory = jaxkv.write(jaxkv.apply(memory, ubatch), 0, ubatch, k, v)
    k, v, mask, _ = jaxkv.view(memory, 0, ubatch)
    lists = q.reshape(*mask.shape[:2], *q.shape[2:])
    return memory, reference(lists, k, v, mask, Options()).reshape(q.shape)


@core
def test_tokens_see_what_is_stored_and_a_shift_decodes_rotates_and_encodes():
    pair = Pair()
    pair.tell([7], ubatch_size=4)
    pair.edit(jaxkv.seq_rm, 0, 2, 4)
    pair.edit(jaxkv.seq_add, 0, 4, -1, -2)
    pair.plan(jaxkv.init_update)
    pair.tell([4], ubatch_size=4)


def test_bytes_and_the_line_that_tells_them():
    memory = memory_of()
    assert memory.buffers.k[0].shape == (1, HEADS, 12, SIZE)
    assert "int8, " in repr(memory) and "float32" not in repr(memory)
    assert jaxkv.nbytes(memory.buffers) == 2 * HEADS * 12 * (SIZE + 4)
    large = jax.eval_shape(partial(memory_of, head_dim=64))
    assert jaxkv.nbytes(large.buffers) / (2 * HEADS * 12 * 64 * 4) <= 0.27


SIZES = {
    "one stream": {"cells": 24, "sequences": 3},
    "a stream each": {"cells": 16, "sequences": 3, "streams": 3},
    "groups": {"cells": 20, "sequences": 4, "streams": 2},
    "window": {"cells": 16, "sequences": 3, "streams": 3, "window": jaxkv.window.sliding(4)},
}


@core
@pytest.mark.parametrize(
    ("dtype", "name"),
    mostly_nightly(
        [*(("int8", name) for name in SIZES), ("float8_e4m3fn", "groups")],
        few=[("int8", "window"), ("float8_e4m3fn", "groups")],
    ),
)
def test_a_life_with_forks_cuts_shifts_copies_and_moves(dtype, name):
    pair = Pair(dtype, **SIZES[name])
    pair.tell([5, 3, 2], ubatch_size=3)
    pair.tell([1, 1, 1])
    pair.edit(jaxkv.seq_rm, 2)
    pair.edit(jaxkv.seq_cp, 0, 2, 0, 4)  # in several streams a copy, else a fork
    pair.tell([1, 2], sequences=[2, 1], ubatch_size=3)
    pair.edit(jaxkv.seq_rm, 0, 5, -1)
    pair.edit(jaxkv.seq_add, 1, 3, -1, 2)
    pair.plan(jaxkv.init_update)
    pair.edit(jaxkv.seq_select, [1, 0], [0, 1])  # they change places
    pair.tell([1, 1, 1])
    pair.edit(jaxkv.seq_rm, 2)
    pair.plan(jaxkv.defrag_plan)
    pair.tell([2, 1], ubatch_size=3)


@core
@pytest.mark.parametrize("streams", [1, 2])
def test_on_a_mesh_cells_heads_and_streams_are_split(streams):
    """Eight devices: the very bits of one device, through writes, copies, shifts and moves."""
    sizes = {"cells": 16, "sequences": 2, "streams": streams, "placement": "striped", "shards": 4}
    axes = {"data": streams, "tensor": 2, "cells": 4 // streams}

    def lived(memory):
        rng = np.random.default_rng(0)
        for texts in ([6, 4], [1, 1]):
            batch = jaxkv.make_batch([[0] * n for n in texts])
            for ubatch in jaxkv.init_batch(memory, batch).check().ubatches:
                shape = ubatch.valid.shape
                q, k, v = (rng.normal(size=(*shape, h, SIZE)).astype(np.float32) for h in (4, 2, 2))
                memory, out = attended(memory, ubatch, q, k, v)
        memory = jaxkv.seq_cp(jaxkv.seq_rm(memory, 1)[0], 0, 1, 0, 5)
        memory = jaxkv.seq_add(jaxkv.seq_rm(memory, 0, 0, 2)[0], 0, 2, -1, -2)
        memory = jaxkv.apply(memory, jaxkv.init_update(memory))
        return jaxkv.apply(memory, jaxkv.defrag_plan(memory)), out

    wanted, out = lived(memory_of(**sizes))
    with jax.set_mesh(mesh_of(**axes)):
        memory, found = lived(placed(memory_of(**sizes)))
        shard = memory.buffers.k[0].scales.addressable_shards[0].data.shape
    assert shard == (1, HEADS // 2, 16 * streams // 4, 1)
    np.testing.assert_allclose(found, out, atol=2e-6)
    used = np.asarray(wanted.table.position)[:, None, :, None] >= 0
    for one, other in zip(parts_of(memory.buffers), parts_of(wanted.buffers), strict=True):
        one, other = (np.where(used, np.asarray(x, np.float32), 0) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1 if one.shape[3] > 1 else 0)


# ----------------------------------------------------------------------------- implementations


def dense(seed, cells, tokens, dtype="int8", size=SIZE):
    """Queries, quantised keys and values, a sight, and the plain formula over what is decoded."""
    mask = np.random.default_rng(seed).random((2, tokens, cells)) < 0.3
    sight = sight_of_mask(mask, [0, 1], 2)
    q, k, v = (
        numbers((seed, i), *shape, size)
        for i, shape in enumerate([(2, tokens, 4), (2, 2, cells), (2, 2, cells)])
    )
    wanted = reference(q, *(jnp.asarray(rounded(x, dtype)) for x in (k, v)), mask, Options())
    k, v = (encoded(jnp.asarray(x), zeros((1,), dtype)) for x in (k, v))
    return jnp.asarray(q), k, v, sight, wanted


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        (None, "int8"),
        pytest.param(None, "float8_e4m3fn", marks=core),
        pytest.param(None, "float8_e5m2", marks=core),
        pytest.param("whole", "int8", marks=core),
        pytest.param("xla", "int8", marks=core),
    ],
)
@pytest.mark.parametrize("size", [SIZE, pytest.param(160, marks=core)])
def test_implementations_give_the_formula_over_what_is_decoded(implementation, dtype, size):
    if dtype == "float8_e5m2":  # of which the oracle is the decoder, and not NumPy
        q, k, v, sight, _ = dense(1, 40, 3, "int8", size)
        k, v = (encoded(decoded(x), zeros((1,), dtype)) for x in (k, v))
        wanted = reference(q, decoded(k), decoded(v), mask_of(sight), Options())
    else:
        q, k, v, sight, wanted = dense(1, 40, 3, dtype, size)
    found = api.attend(q, k, v, sight, Options(), implementation)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@core
@pytest.mark.parametrize("kernel", ["tpu", "gpu", "tiles"])
@pytest.mark.parametrize(("cells", "tokens", "size"), [(1100, 3, 5), (600, 70, 128)])
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_kernels_and_tiles_do_too(kernel, cells, tokens, size):
    q, k, v, sight, wanted = dense(2, cells, tokens, size=size)
    weigh = {
        "tpu": partial(pallas_tpu.weigh, interpret=True),
        "gpu": partial(pallas_gpu.weigh, interpret=True),
        "tiles": api.IMPLEMENTATIONS["tiles"],
    }[kernel]
    run = jax.jit(lambda *args: api.finished(weigh(*args, Options()), args[0], Options()))
    np.testing.assert_allclose(run(q, k, v, sight), wanted, atol=2e-6)
    # A scale that is NaN shows in the tokens that see its cell, of its head, and in no other.
    mask = np.asarray(mask_of(sight))[1]
    cell = np.argmax(mask.any(0))
    broken, sees = replace(k, scales=k.scales.at[1, 1, cell].set(jnp.nan)), mask[:, cell]
    found, wanted = np.array(run(q, broken, v, sight)), np.asarray(wanted)
    assert np.isnan(found[1, sees, 2:]).all() and sees.any()
    found[1, sees, 2:] = wanted[1, sees, 2:]
    np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_what_cannot_decode_refuses_by_name():
    q, k, v, sight, _ = dense(1, 40, 3)
    with pytest.raises(ValueError, match="'cudnn' wants .* got float32, int8 and int8: leave"):
        api.attend(q, k, v, sight, Options(), "cudnn")
    q, k, v, sight, _ = dense(1, 40, 3, size=160)
    with pytest.raises(ValueError, match="int8 with heads of at most 128"):
        api.attend(q, k, v, sight, Options(), "pallas")
    q, k, v, sight, _ = dense(1, 40, 3, "float8_e4m3fn")
    with pytest.raises(ValueError, match="'pallas' wants .* got float32 .* float8_e4m3fn"):
        api.attend(q, k, v, sight, Options(), "pallas")


# --------------------------------------------------------------------- what is not finite, and else


@pytest.mark.parametrize(
    ("half", "bad"),
    [("k", np.nan), pytest.param("v", np.inf, marks=core), pytest.param("k", np.inf, marks=core)],
)
def test_what_is_not_finite_shows_where_it_is_seen_and_nowhere_else(half, bad):
    memory = memory_of(sequences=2)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([[1, 2, 3], [4, 5, 6]])).ubatches
    shape = ubatch.valid.shape
    q, k, v = (numbers(i, *shape, heads, SIZE) for i, heads in enumerate((4, 2, 2)))
    _, clean = attended(memory, ubatch, q, k, v)
    {"k": k, "v": v}[half][0, 4, 1, 2] = bad  # the second token of sequence 1, head 1
    memory, out = attended(memory, ubatch, q, k, v)
    keys, values = memory.buffers.k[0], memory.buffers.v[0]
    assert np.isnan(keys.scales[0, 1, 4]).all() and (keys.codes[0, 1, 4] == 0).all()
    assert (np.asarray(decoded(values))[0, 1, 4] == 0).all()
    assert np.isfinite(values.scales).all() and np.isnan(keys.scales).sum() == 1
    out = np.array(out)
    assert np.isnan(out[0, 4:6, 2:]).all()
    out[0, 4:6, 2:] = clean[0, 4:6, 2:]
    np.testing.assert_allclose(out, clean, atol=2e-6)
    memory = jaxkv.seq_add(memory, 1, 0, -1, 3)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    assert np.isnan(memory.buffers.k[0].scales).sum() == 1


@core
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_derivatives_are_those_of_the_queries_alone(dtype):
    memory = memory_of(dtype)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3, 4])).ubatches
    q, k, v = (jnp.asarray(numbers(i, 1, 4, heads, SIZE)) for i, heads in enumerate((4, 2, 2)))

    def loss(q, k, v):
        return jnp.sum(attended(memory, ubatch, q, k, v)[1] ** 2)

    def plain(q):
        kv = (jnp.asarray(rounded(x, dtype)) for x in (k, v))
        mask = jnp.tril(jnp.ones((1, 4, 4), bool))
        return jnp.sum(reference(q, *(x.swapaxes(1, 2) for x in kv), mask, Options()) ** 2)

    of_q, *others = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    np.testing.assert_allclose(of_q, jax.grad(plain)(q), atol=1e-5)
    assert not any(map(jnp.any, others))


@core
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_snapshot_holds_codes_and_scales(dtype):
    memory = memory_of(dtype, sequences=2)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([[1, 2, 3], [4, 5, 6]])).ubatches
    x = numbers(0, *ubatch.valid.shape, HEADS, SIZE)
    memory = jaxkv.write(jaxkv.apply(memory, ubatch), 0, ubatch, x, 2 * x)
    data = snapshot.to_bytes(memory)
    assert snapshot.inspect(data).arrays["buffers.k.0.codes"] == (dtype, (6, HEADS, SIZE))
    assert_identical(snapshot.load(data).buffers, memory.buffers)
    other = memory_of(dtype, sequences=3, cells=7)
    other = jaxkv.apply(other, jaxkv.init_batch(other, jaxkv.make_batch([1])))
    other = snapshot.load_into(data, other, sequences={1: 2})
    for one, wanted in zip(parts_of(other.buffers), parts_of(memory.buffers), strict=True):
        assert_identical(one[:, :, 1:4], wanted[:, :, 3:6])
    for wrong in {"float32", "int8", "float8_e4m3fn"} - {dtype}:
        with pytest.raises(ValueError, match=f"the dtype of this one, {wrong}, got one with"):
            snapshot.load_into(data, memory_of(wrong))


def test_a_snapshot_of_codes_without_scales_is_refused():
    memory = memory_of()
    arrays = {f"buffers.{half}.0": np.zeros((0, HEADS, SIZE), np.int8) for half in "kv"}
    description = {"memory": describe(memory), "model": None}
    with pytest.raises(ValueError, match="a snapshot that describes a memory, .*buffers.k.0.codes"):
        snapshot.load(written(description, arrays))


@core
def test_states_beside_them_keep_the_dtype_of_the_weights():
    model = models.load(DATA / "granite_hybrid")
    memory = model.make_memory(cells=8, dtype="int8")
    found = {np.dtype(x.dtype).name for x in jax.tree.leaves(memory.buffers)}
    assert found == {"int8", "float32"}
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3])).ubatches
    out = [
        model.forward(model.weights, jaxkv.apply(one, ubatch), ubatch)[1]
        for one in (memory, model.make_memory(cells=8))
    ]
    assert 0 < np.abs(out[0] - out[1]).max() < 0.05 * np.abs(out[1]).max()


@core
def test_under_vmap_memories_are_one_of_more_streams():
    pairs = [Pair(), Pair()]
    for i, pair in enumerate(pairs):
        pair.seed = 10 * i
        pair.tell([5], ubatch_size=5)
    memory = jax.tree.map(lambda *x: jnp.stack(x), *(pair.ours for pair in pairs))
    (ubatch,) = jaxkv.init_batch(pairs[0].ours, jaxkv.make_batch([1])).ubatches
    ubatches = [jaxkv.init_batch(p.ours, jaxkv.make_batch([1])).ubatches[0] for p in pairs]
    q, k = numbers(1, 2, 1, 1, 4, SIZE), numbers(2, 2, 1, 1, 2, SIZE)
    ubatch = jax.tree.map(lambda *x: jnp.stack(x), *ubatches)
    _, out = jax.vmap(attended)(memory, ubatch, q, k, k)
    for i, pair in enumerate(pairs):
        _, wanted = attended(pair.ours, ubatches[i], q[i], k[i], k[i])
        np.testing.assert_allclose(out[i], wanted, atol=2e-6)
