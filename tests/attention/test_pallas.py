"""The kernels for TPUs and GPUs: random tables, head sizes, and the tiles that they read.

They run interpreted; on a GPU the GPU kernel runs compiled. `tests/compilers` compiles both.
"""

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.attention import pallas_gpu, pallas_tpu
from jaxkv.ops.attention.active_tiles import TILE, find_active_tiles
from jaxkv.window import Window
from tests.attention.formula import make_case, visible_mask
from tests.attention.ways import TRITON, attend_jitted
from tests.helpers.parametrize import mark_cases
from tests.helpers.visibility import make_visibility

core = pytest.mark.core
pytestmark = TRITON
LONG = 2 * TILE + 40
KERNELS = ("tpu", "gpu")
TABLES = [
    ("tpu", Window.symmetric(64), False),
    ("gpu", Window.chunked(128), True),
    ("tpu", Window.sliding(90), True),
    ("gpu", Window.symmetric(64), False),
    ("tiles", Window.sliding(90), True),
    *((way, None, causal) for way in (*KERNELS, "tiles") for causal in (True, False)),
]


@pytest.mark.parametrize("way, window, causal", mark_cases(TABLES, core=TABLES[:2]), ids=str)
@hypothesis.given(
    seed=st.integers(0, 1 << 30),
    holes=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    last=st.sampled_from([3, 900, (1 << 31) - 1]),
)
def test_attend_matches_formula_random_tables(way, window, causal, seed, holes, last):
    """Includes positions near the largest number, where adding the width would overflow."""
    one = make_case(seed, window=window, causal=causal, holes=holes, last=last, cells=LONG)
    np.testing.assert_allclose(attend_jitted(way, *one), one.wanted(), rtol=1e-5, atol=2e-6)


SIZES = [(64, 128), (80, 80), (96, 128), (128, 128), (256, 128), (256, 256)]
HEADS = [(dtype, sizes) for dtype in ("float32", "bfloat16") for sizes in SIZES]
HEADS += [("int8", (128, 128))]
SOME = [("float32", (80, 80)), ("bfloat16", (128, 128)), ("float32", (256, 128)), HEADS[-1]]


@pytest.mark.parametrize("way", KERNELS)
@pytest.mark.parametrize(("dtype", "sizes"), mark_cases(HEADS, core=SOME))
def test_kernel_head_sizes_match_formula(way, dtype, sizes):
    queries = "float32" if dtype == "int8" else dtype
    options = {"dtype": dtype, "queries": queries, "size": sizes[0], "value_dim": sizes[1]}
    one = make_case(1, streams=1, cells=TILE + 8, **options)
    close = 2e-2 if dtype == "bfloat16" else 5e-6
    got = np.asarray(attend_jitted(way, *one), np.float32)
    np.testing.assert_allclose(got, one.wanted(), rtol=close, atol=close)


@core
@pytest.mark.parametrize("way", KERNELS)
def test_kernel_reads_no_dead_tile(way):
    """A NaN value reaches the output if multiplied, also by the zero weight of a hidden cell."""
    q, k, v, looks = make_case(cells=LONG, holes=0.7)
    live = np.pad(visible_mask(looks).any(1), [(0, 0), (0, 3 * TILE - LONG)])
    live = live.reshape(3, 3, TILE).any(2)
    assert live.any() and not live.all()
    dead = ~np.repeat(live, TILE, axis=1)[:, None, :LONG, None]
    got = attend_jitted(way, q, *(jnp.where(dead, jnp.nan, x) for x in (k, v)), looks)
    np.testing.assert_array_equal(got, attend_jitted(way, q, k, v, looks))


@core
@pytest.mark.parametrize("forks", [1, 32])
def test_kernel_turns_to_live_tiles_once_for_all_forks(forks):
    """A prompt of 700 tokens in a pool of 8 tiles; each fork has one token in the last tile."""
    cells, length, last = 8 * TILE, 700, 8 * TILE - 40
    mask = np.zeros((1, forks, cells), bool)
    mask[:, :, :length] = True
    mask[0, range(forks), range(last, last + forks)] = True
    seen = make_visibility(mask, [0], 1)
    assert find_active_tiles(seen, pallas_tpu._max_tokens_per_block(4)).num_active_tiles == 3
    # The GPU kernel has smaller tiles, and blocks of 64 queries.
    q, k = (jnp.zeros((1, *shape, 128), jnp.bfloat16) for shape in ((forks, 32), (8, cells)))
    cut = pallas_gpu.choose_tiling(q, k, k)
    blocks = -(-4 * forks // cut.queries)
    turns = find_active_tiles(seen, cut.queries // 4, cut.cells).num_active_tiles
    assert turns == blocks * (-(-700 // cut.cells) + 1)
