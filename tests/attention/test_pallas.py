"""The kernels for TPUs and GPUs: the numbers of the formula, and what of the buffers they read.

They are interpreted; on a GPU the one for GPUs runs. What the compilers make of them is in
`tests/compilers/test_tpu_compiler.py` and `tests/compilers/test_gpu_compiler.py`.
"""

import math
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.kv.mask import sight_of
from jaxkv.ops.attention import api, pallas_gpu, pallas_tpu, softmax
from jaxkv.ops.attention.live import TILE, live_of
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.sight import Sight, mask_of
from jaxkv.ops.attention.softmax import Options
from jaxkv.window import chunked, sliding, symmetric
from tests.cases import mostly_nightly

core = pytest.mark.core
# Said by jax from 0.11 on, about what the kernel for GPUs is written with.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)
S, W, N = 3, 2, 2 * TILE + 40
COARSE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2}
WEIGH = {
    "tpu": partial(pallas_tpu.weigh, interpret=True),
    "gpu": api.by_platform(
        cuda=pallas_gpu.weigh, default=partial(pallas_gpu.weigh, interpret=True)
    ),
}
both_kernels = pytest.mark.parametrize("kernel", WEIGH)


@partial(jax.jit, static_argnames="kernel")
def attended(kernel, q, k, v, sight, options):
    return api.finished(WEIGH[kernel](q, k, v, sight, options), q, options)


def table(seed, *, cells=N, streams=S, holes=0.5, forks=4, last=900):
    """Positions and owners of cells: any position may be anywhere, in runs, with empty cells."""
    rng = np.random.default_rng(seed)
    position = rng.integers(0, last, (streams, cells))
    owners = np.zeros((streams, W, cells), np.uint32)
    for _ in range(forks):
        word, bit = rng.integers(0, W, (streams, cells)), rng.integers(0, 3, (streams, cells))
        np.put_along_axis(
            owners, word[:, None], (np.uint32(1) << bit.astype(np.uint32))[:, None], axis=1
        )
    runs = rng.random((streams, -(-cells // 64))) < holes  # whole tiles are empty now and then
    empty = np.repeat(runs, 64, axis=1)[:, :cells] | (rng.random((streams, cells)) < 0.1)
    owners[np.broadcast_to(empty[:, None], owners.shape)] = 0
    return position.astype(np.int32), owners


def sight(seed, *, tokens=2, lists=None, window=None, causal=True, last=900, **options):
    """Tokens that look at such a table, one of them padding, and one with no cell of its own."""
    rng = np.random.default_rng(seed)
    position, owners = table(seed, last=last, **options)
    lists = np.arange(len(position)) if lists is None else np.array(lists)
    shape = (len(lists), tokens)
    bit = np.uint32(1) << rng.integers(0, 3, shape).astype(np.uint32)
    bit[-1, -1] = 0
    return Sight(
        position=jnp.asarray(position),
        owners=jnp.asarray(owners),
        streams=jnp.asarray(lists, jnp.int32),
        at=jnp.asarray(rng.integers(0, last, shape), jnp.int32),
        word=jnp.asarray(rng.integers(0, W, shape), jnp.int32),
        bit=jnp.asarray(bit),
        window=window,
        causal=causal,
        all_streams=len(lists) == len(position),
    )


def arrays(seed, sight, *, groups=2, queries=3, size=8, value_dim=8, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    streams, cells = sight.position.shape
    shapes = (
        (*sight.at.shape, groups * queries, size),
        (streams, groups, cells, size),
        (streams, groups, cells, value_dim),
    )
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@jax.jit
def formula(q, k, v, sight, options):
    with jax.default_matmul_precision("highest"):
        return reference(q, k[sight.streams], v[sight.streams], mask_of(sight), options)


def compare(kernel, q, k, v, sight, options):
    got = attended(kernel, q, k, v, sight, options)
    wanted = formula(q, k, v, sight, options)
    coarse = COARSE[q.dtype.type]
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=coarse, atol=coarse)
    assert not np.asarray(got[-1, -1], np.float32).any()


BOTH = Options(scale=0.3, softcap=2.0, sinks=jnp.linspace(-1.0, 1.0, 6))


@pytest.mark.parametrize(
    "case",
    [
        {},
        *(
            pytest.param(case, marks=core)
            for case in (
                {"lists": [2, 0]},
                {"cells": 30, "streams": 1},  # less than a tile
                {"cells": TILE, "holes": 0.0},
                {"holes": 1.0},  # nothing at all
                {"tokens": 2 * pallas_tpu.QUERIES // 3 + 5, "streams": 1},  # several blocks
            )
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [Options(), pytest.param(BOTH, marks=core)], ids=["", "both"])
@both_kernels
def test_numbers_are_those_of_the_formula(kernel, case, options):
    seen = sight(0, **case)
    compare(kernel, *arrays(0, seen), seen, options)


@core
@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@both_kernels
def test_head_sizes_and_sizes_of_values(kernel, size, dtype):
    seen = sight(1, streams=1, cells=TILE + 8)
    for value_dim in (size, 128):
        compare(
            kernel, *arrays(1, seen, size=size, value_dim=value_dim, dtype=dtype), seen, Options()
        )


WINDOWS = [None, sliding(90), chunked(128), symmetric(64)]


@core
@pytest.mark.parametrize("causal", mostly_nightly([True, False], few=[True]))
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@both_kernels
@hypothesis.settings(max_examples=60)
@hypothesis.given(
    seed=st.integers(0, 1 << 30),
    holes=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    forks=st.integers(1, 6),
    last=st.sampled_from([3, 900, (1 << 31) - 1]),
    dtype=st.sampled_from(list(COARSE)),
)
def test_any_table_and_window(kernel, window, causal, seed, holes, forks, last, dtype):
    seen = sight(seed, window=window, causal=causal, holes=holes, forks=forks, last=last)
    compare(kernel, *arrays(seed, seen, dtype=dtype), seen, BOTH)


@core
@both_kernels
@hypothesis.settings(max_examples=12)
@hypothesis.given(data=st.data())
def test_tables_that_verbs_made(kernel, data):
    """Forks, cuts, shifts and windows of a memory, and a step of all sequences on top."""
    streams = data.draw(st.sampled_from([1, 3]))
    memory = jaxkv.make_kv_cache(
        layers=1, cells=3 * 192 // streams, kv_heads=1, head_dim=4, sequences=3, streams=streams,
        window=data.draw(st.sampled_from([None, sliding(20)])), rope=jaxkv.make_rope(4),
    )  # fmt: skip
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))

    def step(memory, batch):
        (ubatch,) = jaxkv.init_batch(memory, batch, ubatch_size=128).check().ubatches
        new = np.random.default_rng(1).normal(size=(*ubatch.valid.shape, 4, 4))
        q, k = (jnp.asarray(new[:, :, :n], jnp.float32) for n in (2, 1))
        memory = jaxkv.apply(memory, ubatch)
        return *jaxkv.attend(memory, 0, ubatch, q, k, k), ubatch, q

    for seq in range(3):
        batch = jaxkv.make_batch([1] * 64, sequences=seq)
        memory, *_ = step(memory, batch)
    for _ in range(data.draw(st.integers(0, 6))):
        verb = data.draw(st.sampled_from(["cut", "fork", "shift"]))
        seq, first = int(rng.integers(3)), int(rng.integers(1, 60))
        if verb == "cut":
            memory, _ = jaxkv.seq_rm(memory, seq, first, first + 9)
        elif verb == "fork" and streams == 1:
            memory, _ = jaxkv.seq_rm(memory, seq)
            memory = jaxkv.seq_cp(memory, (seq + 1) % 3, seq)
        elif verb == "shift" and jaxkv.can_seq_add(memory, seq, 0, 1000, 5):
            memory = jaxkv.seq_add(memory, seq, 0, 1000, 5)
            memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    batch = jaxkv.make_batch([[1]] * 3, sequences=[0, 1, 2])
    memory, wanted, ubatch, q = step(memory, batch)
    (k,), (v,) = memory.buffers.k, memory.buffers.v
    seen = sight_of(memory.table, ubatch, causal=True)
    got = attended(kernel, q.reshape(*seen.at.shape, *q.shape[2:]), k, v, seen, Options())
    np.testing.assert_allclose(got.reshape(wanted.shape), wanted, rtol=2e-6, atol=2e-6)


@core
@both_kernels
def test_a_hidden_nan_is_harmless_in_every_tile_and_a_seen_one_shows(kernel):
    seen = sight(3, tokens=2, holes=0.2)
    q, k, v = arrays(3, seen)
    mask = np.asarray(mask_of(seen))
    hidden = ~mask.any(1)
    dirty = jnp.where(hidden[:, None, :, None], jnp.nan, k)
    clean = attended(kernel, q, k, v, seen, Options())
    np.testing.assert_array_equal(attended(kernel, q, dirty, v, seen, Options()), clean)
    for tile in range(3):
        shown = np.flatnonzero(mask[0, 0, tile * TILE : (tile + 1) * TILE]) + tile * TILE
        broken = k.at[0, 1, shown[0]].set(jnp.nan)
        got = np.asarray(attended(kernel, q, broken, v, seen, Options()))
        sees = mask[:, :, shown[0]] & (np.arange(S) == 0)[:, None]
        np.testing.assert_array_equal(np.isnan(got[:, :, 3:]).all((2, 3)), sees)
        np.testing.assert_array_equal(got[~sees], np.asarray(clean)[~sees])


@core
@both_kernels
def test_open_sums_over_parts_of_the_cells_join(kernel):
    seen = sight(4)
    q, k, v = arrays(4, seen)

    def weigh(first, count):
        part = seen.of_cells(jnp.int32(first), count)
        cut = slice(first, first + count)
        return WEIGH[kernel](q, k[:, :, cut], v[:, :, cut], part, Options())

    sums = softmax.joined(weigh(0, TILE + 100), weigh(TILE + 100, N - TILE - 100))
    got = api.finished(sums, q, Options())
    np.testing.assert_allclose(got, formula(q, k, v, seen, Options()), atol=2e-6)


@core
@both_kernels
def test_dead_tiles_are_not_read(kernel):
    """A value that is a NaN shows wherever it is multiplied, also by the zero of a hidden cell."""
    seen = sight(5, holes=0.9)
    q, k, v = arrays(5, seen)
    size = TILE if kernel == "tpu" else pallas_gpu.cut_of(q, k, v).cells
    tiles = np.asarray(live_of(seen, 8, size).tiles)[int(live_of(seen, 8, size).turns) :]
    dead = np.zeros((S, -(-N // size)), bool)
    dead.reshape(-1)[tiles] = True
    assert dead.any() and not dead.all()
    where = jnp.asarray(np.repeat(dead, size, axis=1)[:, None, :N, None])
    clean = attended(kernel, q, k, v, seen, Options())
    nan = attended(
        kernel, q, jnp.where(where, jnp.nan, k), jnp.where(where, jnp.nan, v), seen, Options()
    )
    np.testing.assert_array_equal(nan, clean)


def fetched(q, k, v, sight):
    """Bytes of keys and values that the grid fetches: a part of them when it changes, once.

    The index maps of the kernel are run for all turns of its grid.
    """
    jaxpr = jax.make_jaxpr(lambda *a: pallas_tpu.weigh(*a, sight, Options()))(q, k, v)
    (call,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pallas_call")
    grid = call.params["grid_mapping"]
    live = live_of(sight, pallas_tpu._most(q.shape[2] // k.shape[1]))
    total = 0
    for part in grid.block_mappings[4:6]:  # beside looks, positions, owners and queries
        index = part.index_map_jaxpr
        shape = [int(getattr(n, "block_size", n)) for n in part.block_shape]
        before = None
        for h in range(grid.grid[0]):
            for i in range(int(live.turns)):
                refs = [jax.new_ref(x) for x in (live.tiles, live.streams)]
                place = jax.core.eval_jaxpr(index.jaxpr, index.consts, h, i, *refs)
                place = tuple(map(int, place))
                total += (place != before) * math.prod(shape) * k.dtype.itemsize
                before = place
    return total


@core
@pytest.mark.parametrize("forks", [1, 32])
def test_live_tiles_are_fetched_once_for_all_forks(forks):
    seen = of_forks(forks)
    q, k, v = arrays(0, seen, groups=8, queries=4, size=128, value_dim=128, dtype=jnp.bfloat16)
    live, tile = 3, 8 * TILE * 128 * 2
    assert fetched(q, k, v, seen) == live * 2 * tile
    # The kernel for GPUs has smaller tiles, and blocks of 64 queries.
    cut = pallas_gpu.cut_of(q, k, v)
    blocks = -(-4 * forks // cut.queries)
    turns = live_of(seen, cut.queries // 4, cut.cells).turns
    assert turns == blocks * (-(-700 // cut.cells) + 1)


def of_forks(forks):
    """A prompt of 700 tokens in a pool of 8 tiles, its forks with a token each in the last one."""
    cells, length = 8 * TILE, 700
    position, owners = np.zeros((1, cells), np.int32), np.zeros((1, 1, cells), np.uint32)
    position[0, :length] = np.arange(length)
    owners[0, 0, :length] = (1 << forks) - 1
    last = cells - 40
    position[0, last : last + forks] = length
    owners[0, 0, last : last + forks] = 1 << np.arange(forks)
    tokens = np.arange(forks)[None]
    return Sight(
        position=jnp.asarray(position),
        owners=jnp.asarray(owners),
        streams=jnp.zeros(1, jnp.int32),
        at=jnp.full((1, forks), length),
        word=jnp.zeros((1, forks), jnp.int32),
        bit=jnp.uint32(1) << jnp.asarray(tokens, jnp.uint32),
        window=None,
        causal=True,
        all_streams=True,
    )
