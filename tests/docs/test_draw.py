"""Drawings of caches: text widths, lines that never raise, tables, plots, and donated caches."""

import functools
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch, plot
from jaxkv.cache import merge
from jaxkv.draw.cell_runs import merge_runs
from jaxkv.draw.colours import PALETTE
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.mask import visible_cells_mask
from tests.helpers.caches import Kind, attention_cache, delete_copy, parse_cache, recurrent_cache
from tests.helpers.mistakes import assert_raises, mistakes

pytestmark = pytest.mark.core

STATES = {"x": ((3,), jnp.float32)}
POOL = Kind("", cells=24, sequences=40)


def put(cache, tokens, sequences):
    plan = jaxkv.init_batch(cache, make_batch(tokens, sequences=sequences)).check()
    for ubatch in plan.ubatches:
        step = jaxkv.apply(cache, ubatch)
        cache = merge(step.table, step.buffers)
    return cache, step


@functools.cache
def pool():
    """Sequences 0 and 1, 2 as a fork of 0, a hole in 1, and 33 in a second word of owners."""
    return parse_cache(
        "0{0,2} 1{0,2} 2{0,2} 3{0,2} 4{0,2} 5{0} 6{0} 7{0} 0{1} 1{1} . . 4{1} 5{1} 0{33}", POOL
    )


@functools.cache
def streams():
    cells = "0{0,1} 1{0,1} 2{0,1} | 0{3} 1{3} 2{3}"
    return parse_cache(cells, Kind("", cells=8, sequences=4, streams=2))


@functools.cache
def states():
    cache = recurrent_cache(layers=1, states=STATES, sequences=3, max_rollback=3)
    cache, _ = put(cache, [[1] * 3, [2] * 3], [0, 2])
    return jaxkv.seq_cp(cache, 0, 1).cache


@functools.cache
def hybrid():
    cells = attention_cache(layers=1, kv_heads=1, head_dim=2, cells=8, sequences=2)
    state = recurrent_cache(layers=1, states=STATES, sequences=2, max_rollback=1)
    return put(compose_hybrid_cache((cells, (0,)), (state, (1,))), [[1, 2], [3, 4]], [0, 1])[0]


ALL = [pool, streams, states, hybrid]
over_all = pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)


@functools.cache
def interleaved():
    owners = np.random.default_rng(0).integers(0, 4, 291).tolist()
    cells = [f"{owners[:i].count(seq)}{{{seq}}}" for i, seq in enumerate(owners)]
    return parse_cache(" ".join(cells), Kind("", cells=300, sequences=4))


def remove_sequence():
    return jaxkv.seq_rm(states(), 1)[0]


def move_positions():
    return jaxkv.seq_add(pool(), 1, 4, -1, delta=3).cache


def test_show_prints_recorded():
    recorded = (Path(__file__).parent.parent / "data" / "shown.txt").read_text()
    cases = re.findall(r"^# (\w+) (\w+)\n((?:[^#].*\n)+)", recorded, re.M)
    assert len(cases) == recorded.count("# ")
    for name, width, wanted in cases:
        cache, width = globals()[name](), None if width == "None" else int(width)
        assert jaxkv.show(cache, width=width) == wanted[:-1], name


@pytest.mark.parametrize(("call", "outcome"), mistakes("draw"))
def test_draw_of_no_cache_with_values_raises(call, outcome):
    assert_raises(call, outcome, globals())


def stack_twice(cache):
    return jax.tree.map(lambda x: jnp.stack([x, x]), cache)


@over_all
def test_repr_of_cache_is_one_line(make):
    cache = make()
    counts = " + ".join(str(part.num_used_cells()) for part in cache.parts)
    traced = []
    jax.eval_shape(lambda cache: traced.append(cache), cache)
    odd = [jax.tree.map(lambda x, leaf=leaf: leaf, cache) for leaf in (None, "a")]
    for one, end in [
        (cache, f": {counts} used)"),
        (traced[0], ": traced)"),
        (jax.eval_shape(make), ": shapes alone)"),
        (delete_copy(cache), ": donated)"),
        (merge(cache.table, delete_copy(cache.buffers)), f": {counts} used, buffers donated)"),
        *((one, ")") for one in (cache.table, stack_twice(cache), *odd)),
    ]:
        line = repr(one)
        assert line.endswith(end) and "\n" not in line and line.count("(") == line.count(")")


def test_repr_of_plans_batches_and_states_is_one_line():
    cache = pool()
    plan = jaxkv.init_batch(cache, make_batch([[1], [2, 3]], sequences=[1, 5]))
    assert repr(plan) == "Plan(ok, 1 ubatch: 1 x 4 tokens)"
    assert repr(plan.ubatches[0]).endswith("rows=1, tokens=4: 3 valid of sequences [1, 5])")
    refused = jaxkv.init_batch(cache, make_batch([1] * 30, sequences=1))
    assert repr(refused) == "Plan(refused: sequence 1 OUT_OF_CELLS)"
    assert repr(jax.eval_shape(lambda: plan)) == "Plan(1 ubatch: 1 x 4 tokens; values not known)"
    assert repr(make_batch([1] * 9)) == "Batch(tokens=int32[9], sequences=int32[9], valid=bool[9])"
    state = jaxkv.generation.init_decode(cache, tokens=[5, 7]).state
    assert "token=[5, 7]" in repr(state) and "key=key<fry>[2]" in repr(state)
    assert "shift=int32[1,24]" in repr(jaxkv.init_update(cache))


def test_repr_of_results_names_reasons():
    result = jaxkv.seq_rm(states(), 0, 1, 2)
    assert repr(result).startswith("EditResult(cache=Cache(recurrent, ")
    assert repr(result).endswith(": 6 used), ok=False, reason=STATE_NOT_STORED)")
    both = jaxkv.seq_rm(states(), [0, 2], [2, 3])
    assert repr(both).endswith("ok=[True, True], reason=[OK, OK])")
    extended = jaxkv.generation.self_extend(streams(), 0, 0, group=2, width=4)
    assert repr(extended).endswith("ok=True, reason=OK, grouped=0)")
    traced = []
    jax.eval_shape(lambda cache: traced.append(repr(jaxkv.seq_rm(cache, 0))), pool())
    assert traced[0].endswith("ok=bool[] traced, reason=int32[] traced)")


@over_all
def test_repr_html_has_text_and_no_script(make):
    html = make()._repr_html_()
    assert html.count("<div") == html.count("</div>") and "<script" not in html
    texts = re.sub(r"<[^>]*>", " ", html.split("</code>")[1]).split()
    assert {"0", "1"} <= set(texts)
    bare = [
        delete_copy(make())._repr_html_(),
        jax.eval_shape(make)._repr_html_(),
        stack_twice(make())._repr_html_(),
    ]
    bare += [
        jax.tree.map(lambda x, leaf=leaf: leaf, make())._repr_html_() for leaf in (None, np.True_)
    ]
    assert all(one.count("<div") == 1 for one in bare)


def test_repr_html_of_long_table_is_folded():
    html = interleaved()._repr_html_()
    assert html.count("title=") <= 32 and "cells 291 to 299: empty" in html
    assert "and 24 more streams" in Kind("", cells=2, sequences=40, streams=40).make()._repr_html_()


def test_folded_without_neighbours_builds_one_fold():
    """Trying every fold would be slow for a large table."""
    view = replace(interleaved().cells(), position=np.arange(300, 0, -1)[None])
    asked = []
    merge_runs(view, 0, 50, lambda runs: asked.append(len(runs)) or True)
    assert asked == [1]


@pytest.fixture
def agg():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def sequences_in(image):
    """The palette index of each pixel; -1 for other colours."""
    from matplotlib.colors import to_rgba_array

    rgb = to_rgba_array(PALETTE)[:, :3]
    near = np.abs(np.asarray(image)[:, :, None] - rgb).max(-1)
    return np.where(near.min(-1) < 1e-6, near.argmin(-1), -1)


def test_plot_cells_has_colours_of_owners(agg):
    ax = plot.cells(pool())
    wanted = pool().cells().owner[0]
    (image,) = ax.images
    drawn = sequences_in(image.get_array()).ravel()[:24]
    np.testing.assert_array_equal(drawn, np.where(wanted < 0, -1, wanted % 7))
    (hatched,) = ax.collections  # the cells that 0 and 2 share
    assert [path.get_extents().bounds for path in hatched.get_paths()] == [(-0.5, -0.5, 5, 1)]
    _, given = agg.subplots()
    assert plot.cells(streams(), given) is given


def test_plot_attention_mask_is_the_mask(agg):
    _, step = put(pool(), [[1, 2], [3]], [2, 1])
    ax = plot.attention_mask(step)
    mask = np.asarray(visible_cells_mask(step))[0, :3]
    drawn = sequences_in(ax.images[0].get_array())
    np.testing.assert_array_equal(drawn >= 0, mask)
    assert set(drawn[0][mask[0]]) == {2} and set(drawn[2][mask[2]]) == {1}
    at = sequences_in(plot.attention_mask(step, by_position=True).images[0].get_array())
    assert (at[0, :6] >= 0).all() and (at[0, 6:] < 0).all()
    with pytest.raises(TypeError, match="of attention"):
        plot.attention_mask(put(states(), [[1]], [0])[1])


def test_plot_legends_name_every_sequence(agg):
    def names(ax):
        return [text.get_text() for text in ax.get_legend().get_texts()]

    cache, step = put(Kind("", cells=16, sequences=16).make(), [[1]] * 9, [*range(8), 14])
    wanted = ["0, 7, …", *"123456"]
    assert names(plot.cells(cache))[:-1] == [f"sequence {one}" for one in wanted]
    assert names(plot.occupancy([cache])) == [f"sequence {one}" for one in wanted]
    seen = names(plot.attention_mask(step))
    assert seen[:-2] == [f"visible to sequence {one}" for one in wanted]


def test_plot_occupancy_and_nbytes_add_up(agg):
    ax = plot.occupancy([POOL.make(), pool()])
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in ax.collections]
    assert max(tops) == pool().num_used_cells() and ax.texts[0].get_text() == "24 cells"
    bars = plot.nbytes(hybrid()).containers[0]
    assert sum(bar.get_width() for bar in bars) == hybrid().nbytes
    for steps, message in [([], "got none"), ([pool(), 3], "got both; pass cache.num_used_cells")]:
        with pytest.raises(ValueError, match=message):
            plot.occupancy(steps)


def test_plot_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="got none; pip install matplotlib"):
        plot.nbytes(pool())
