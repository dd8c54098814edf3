"""Sequences that go from one cache into another (`insert`) and into a new one (`extract`).

The random machines of `test_stateful` extract and insert too. Here the caches differ in form.
"""

import random
from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import extract, insert
from jaxkv.kv.cells import incomplete_layers
from tests.helpers import caches, edit_sequences, hlo
from tests.helpers.caches import (
    CHUNKS,
    CODES,
    GROUPS,
    GROUPS_STRIPES,
    GROUPS_TILES,
    GROUPS_WINDOW,
    HEAD_ROWS,
    LATENT,
    SMALL,
    SPLIT,
    STACKED,
    STRIPES,
    TILES,
    TWO,
    WIDE,
    WINDOW,
    Kind,
    assert_identical,
    attention_cache,
    cells_of,
    fill_cache,
)
from tests.helpers.parametrize import mark_cases
from tests.helpers.reference_caches import Twin, edit_randomly

core = pytest.mark.core
NEAR = jaxkv.Window.sliding(4)
IN_PAIRS = {"sequences": 4, "streams": 2}
HYBRID = {"kinds": "ra", "window": NEAR}
PAIRS = {
    "one stream to two": (SMALL, GROUPS),
    "two streams to one for each": (GROUPS, SPLIT),
    "40 sequences to two streams": (WIDE, GROUPS),
    "window to two streams": (WINDOW, GROUPS_WINDOW),
    "striped window of two streams to one": (GROUPS_STRIPES, WINDOW),
    "chunks of three streams to one": (CHUNKS, replace(CHUNKS, cells=24, streams=1)),
    "full and window to tiles": (TWO, replace(GROUPS_TILES, windows=TWO.windows)),
    "tiles to stripes": (TILES, STRIPES),
    "stripes to tiles": (STRIPES, TILES),
    "rows of heads to stacked": (HEAD_ROWS, STACKED),
    "stacked to rows of heads": (STACKED, HEAD_ROWS),
    "codes to rows of codes": (CODES, replace(CODES, streams=1, cells=20, lanes=9)),
    "rows of codes to stacked codes": (replace(CODES, lanes=9), replace(CODES, stacked=True)),
    "latent to stacked rows": (LATENT, replace(LATENT, stacked=True, lanes=9, streams=1)),
    "float32 to int8": (GROUPS, CODES),
    "float32 to bfloat16": (GROUPS, replace(SMALL, dtype="bfloat16")),
    "states to fewer states": ({"kinds": "rr", "kept": 3}, {"kinds": "rr", "kept": 1}),
    "states to more states": ({"kept": 1} | IN_PAIRS, {"kept": 2, "streams": 3}),
    "states to streams": ({"kept": 2, "streams": 3}, {"kept": 1} | IN_PAIRS),
    "hybrid to streams": (HYBRID | {"kept": 2}, HYBRID | IN_PAIRS | {"kept": 1, "cells": 12}),
    "streams to hybrid": (HYBRID | IN_PAIRS | {"kept": 0}, HYBRID | {"kept": 0}),
}
CORE = ["two streams to one for each", "hybrid to streams"]


def make_twin(kind):
    return Twin(kind) if isinstance(kind, Kind) else edit_sequences.Twin(**kind)


def resumable(twin, seq):
    return [pos for pos in range(30) if twin.cache.can_resume(seq, pos)]


def assert_same_sequence(one, seq, other, parent):
    """The target has the positions, the last hash and the resumable positions of its parent."""
    new, old = one.cache, other.cache
    assert new.seq_pos_max(seq) == old.seq_pos_max(parent)
    ids = jnp.array([parent]), jnp.array([seq])
    last, _ = old.table.compare_last_tokens(ids[0], jnp.zeros(1, jnp.uint32))
    assert new.table.compare_last_tokens(ids[1], last)[1]
    states = [side for side in one.oracles if hasattr(side, "states")]
    wanted = resumable(other, parent)
    assert resumable(one, seq) == [p for p in wanted if all(s.can_resume(seq, p) for s in states)]


@pytest.mark.parametrize("name", mark_cases(PAIRS, core=CORE))
def test_insert_matches_oracle_between_forms(name):
    source, target = map(make_twin, PAIRS[name])
    for seed, twin in enumerate((source, target)):
        edit_randomly(twin, seed)
    rng, inserted = random.Random(0), 0
    parents, ids = (range(twin.kind.sequences) for twin in (source, target))
    for _ in range(4):
        source.decode([rng.choice(parents) for _ in range(3)])
        seq, other = rng.sample(parents, 2)
        source.seq_cp(seq, [other], 0, -1)  # shared cells
        source.edit("seq_add", seq, 1, -1, 2)  # pending shifts
        src, dst = [seq, rng.choice(parents)], rng.sample(ids, 2)
        target.seq_rm(rng.choice(ids))
        if not target.insert(source, src, dst):
            target.edit("clear")
            source.seq_rm(src[1])
        ok = target.insert(source, src, dst)
        target.compare()
        if ok:
            inserted += 1
            for pair in zip(dst, src, strict=True):
                assert_same_sequence(target, pair[0], source, pair[1])
        source.update()
        target.update()
        cut = target.oracles.reached(dst[0])
        target.seq_rm(dst[0], max(cut, 0), -1)
        target.seq_cp(dst[0], [rng.choice(ids)], 0, -1)
        target.decode([rng.choice(dst) for _ in range(3)])
        target.compare()
        source.compare()  # unchanged by the insert
    assert inserted


def stored(cache, seq):
    """Positions and shifts of a sequence, in their order, and its keys and values."""
    stream = seq // cache.table.sequences_per_stream
    held = [(p, d, i) for (_, i), (p, ids, d) in cells_of(cache.table).items() if seq in ids]
    places = [i for *_, i in sorted(held)]
    halves = [caches.by_layer(half, cache.buffers) for half in (cache.buffers.k, cache.buffers.v)]
    return [one[:2] for one in sorted(held)], [x[:, stream, :, places] for x in halves]


CODES_ROWS = replace(CODES, lanes=9, stacked=True)


@pytest.mark.parametrize(
    ("kind", "other"),
    mark_cases(
        [(SMALL, HEAD_ROWS), (GROUPS, STACKED), (CODES, CODES_ROWS), (TILES, SPLIT)],
        core=[(CODES, CODES_ROWS)],
    ),
    ids=str,
)
def test_sequence_that_went_out_and_in_continues_as_the_one_that_stayed(kind, other):
    """With a pending shift and a fork; its logits are those of the sequence that stayed."""
    stayed = jaxkv.seq_cp(fill_cache(6, kind=kind), 0, 1, 0, 4).check()
    stayed = jaxkv.seq_add(stayed, 0, 3, None, delta=4).check()
    away = extract(stayed, [1, 0], cells=8).check()
    assert away.num_used_cells() == 6
    cache = insert(fill_cache(2, 3, 2, kind=other), away, [0, 1], [2, 1]).check()
    assert cache.num_used_cells() == 2 + (6 if other.streams == 1 else 10)
    for new, old in ((1, 0), (2, 1)):
        (places, arrays), (wanted, expected) = stored(cache, new), stored(stayed, old)
        assert places == wanted
        assert_identical(arrays, expected)
    stayed, cache = map(caches.apply_update, (stayed, cache))
    batch = partial(jaxkv.make_batch, [3, 4, 5, 6])
    stayed, wanted = caches.run_batch(stayed, batch(sequences=[0, 0, 1, 1]))
    cache, logits = caches.run_batch(cache, batch(sequences=[1, 1, 2, 2]))
    np.testing.assert_allclose(logits, wanted, atol=1e-4)


MAKERS = {
    "cells": partial(fill_cache, 3, 2, 4),
    "streams": partial(fill_cache, 3, 2, 4, kind=SPLIT),
    "states": lambda: edit_sequences.make_filled_twin(kept=1, counts=[3, 2, 4]).cache,
    "hybrid": lambda: edit_sequences.make_filled_twin(kinds="ar", counts=[3, 2, 4]).cache,
}


@pytest.mark.parametrize("name", mark_cases(MAKERS, core=["streams", "hybrid"]))
def test_insert_traced_unknown_ids_change_nothing(name):
    cache, source = MAKERS[name](), extract(MAKERS[name](), [2, 1], cells=8).check()
    run = jax.jit(lambda *args: insert(*args))
    for src, dst in (([2, -1, 0], [0, 1, 3]), ([0, 1, -(2**31)], [-1, 2**31 - 1, 2])):
        result = run(cache, source, jnp.array(src), jnp.array(dst))
        assert result.ok
        assert_identical(result.cache, cache)
    last = run(cache, source, jnp.array([1, 0, 5]), jnp.array([0, 0, 0])).cache
    assert last.seq_pos_max().tolist() == [3, 1, 3]  # the last known entry is used
    taken = jax.jit(lambda cache, ids: extract(cache, ids, cells=8))(cache, jnp.array([3, 1, -1]))
    assert taken.ok and taken.cache.seq_pos_max().tolist() == [-1, 1, -1]


@core
def test_edits_of_empty_lists_change_nothing():
    """Copies between streams, which choose cells, included."""
    for kind in (GROUPS, GROUPS_WINDOW):
        cache = fill_cache(3, 2, kind=kind)
        copied = jaxkv.seq_cp(cache, 0, []), insert(cache, fill_cache(2, kind=kind), [], [])
        assert_identical([one.cache for one in copied], [cache, cache])
    states = edit_sequences.make(1, 4, 1, 2)
    assert_identical(insert(states, states, [], []).cache, states)


@core
def test_insert_with_too_few_cells_changes_no_part():
    """The recurrent part alone would have cells."""
    twin = edit_sequences.make_filled_twin(1, [6, 7], kinds="ar", cells=14)
    other = edit_sequences.make_filled_twin(1, [8], kinds="ar", cells=14)
    assert not twin.insert(other, [0], [0])  # 14 - 7 cells
    assert twin.insert(other, [0], [1])
    twin.compare()
    small, ok = twin.extract([0, 1], cells=13)
    assert not ok and small.cache.num_used_cells() == 0


@core
def test_insert_of_layers_not_written_marks_them_in_stacked_caches():
    source = STACKED.make()
    step = jaxkv.apply(source, jaxkv.init_batch(source, jaxkv.make_batch([1, 2], sequences=2)))
    kv = jnp.ones((*step.valid.shape, caches.HEADS, caches.SIZE))
    source = jaxkv.write_kv(step, 1, kv, kv).cache  # of layer 0, stream 1 lacks keys
    marked = insert(fill_cache(2, 2, kind=STACKED), source, [2, 0], [2, 1]).check()
    assert incomplete_layers(marked.table).tolist() == [[False, False], [True, False]]
    away = extract(marked, 2, cells=4).check()
    assert incomplete_layers(away.table).tolist() == [[True, False]]


LATENT_SLICE = slice(1, 4)
# Latent values are not quantised.
FORMS = [(dtype, None) for dtype in ("bfloat16", "int8", "float16", "float8_e4m3fn")]
FORMS += [("bfloat16", LATENT_SLICE), ("float16", LATENT_SLICE)]


@pytest.mark.parametrize(("dtype", "latent"), mark_cases(FORMS, FORMS[2:3], FORMS[1:2]), ids=str)
def test_insert_converts_as_a_write_and_stores_finite_values(dtype, latent):
    """Heads that overflow give NaN only to tokens that attend to them, as after a write."""
    sizes = dict(layers=1, kv_heads=1 if latent else 2, head_dim=4, cells=8, value_dim=latent)
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, 4, sizes["kv_heads"], 4)).astype(np.float32)
    k[0, 1, 0, 2], v[0, 2, 0, 1] = 1e5, -3e38
    k, v = jnp.asarray(k), jnp.asarray(v)

    def write(dtype, tokens=4):
        cache = attention_cache(**sizes, dtype=dtype)
        (ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch([1] * tokens)).ubatches
        step = jaxkv.apply(cache, ubatch)
        return jaxkv.write_kv(step, 0, k[:, :tokens], None if latent else v[:, :tokens]).cache

    converted = insert(attention_cache(**sizes, dtype=dtype), write("float32"), 0, 0).check()
    assert_identical(converted.buffers, write(dtype).buffers)
    back = insert(write("float32", 2), converted, 0, 0).check()
    for values in (cache.buffers.layer(0).decode()[1] for cache in (converted, back)):
        assert latent or jnp.isfinite(values).all()


@core
def test_rewind_to_an_insert_from_another_form_is_refused():
    """Sources with equal tables and other dtypes, or with rotated heads, give other numbers."""
    cache = fill_cache(0, 2)
    dtypes = "float32", "int8", "bfloat16", ("int8", "int4")
    sources = [fill_cache(3, kind=replace(SMALL, dtype=dtype)) for dtype in dtypes]
    rotated = replace(sources[1].buffers, rotated=True)
    sources.append(jaxkv.Cache(table=sources[1].table, buffers=rotated))
    inserted = [insert(cache, source, 0, 0).cache for source in sources]
    assert_identical(sources[0].table, sources[1].table)
    for i, j in product(range(len(sources)), repeat=2):
        assert jaxkv.rewind(inserted[i], to=inserted[j].table)[1] == (i == j)


@pytest.mark.parametrize(
    "kind", mark_cases([SMALL, GROUPS, STACKED, HEAD_ROWS], core=[GROUPS, STACKED]), ids=str
)
def test_gradient_flows_through_insert(kind):
    """To the keys and values of the source that were copied, and to those that stay."""
    source, cache = fill_cache(3, 2), fill_cache(2, 2, kind=kind)
    weights = jax.tree.map(lambda x: np.cos(np.arange(x.size)).reshape(x.shape), cache.buffers)

    def loss(own, other):
        to, of = (jaxkv.Cache(table=c.table, buffers=b) for c, b in ((cache, own), (source, other)))
        return sum(map(jnp.vdot, *map(jax.tree.leaves, (insert(to, of, 0, 1)[0].buffers, weights))))

    args = cache.buffers, source.buffers
    tangents = jax.tree.map(lambda x: np.sin(np.arange(x.size)).reshape(x.shape), args)
    tangents = jax.tree.map(lambda x: x.astype(np.float32), tangents)
    grads = jax.grad(loss, argnums=(0, 1))(*args)
    found = sum(map(jnp.vdot, *map(jax.tree.leaves, (grads, tangents))))
    moved = jax.tree.map(jnp.add, args, tangents)
    np.testing.assert_allclose(found, loss(*moved) - loss(*args), rtol=1e-3)  # it is linear
    assert np.count_nonzero(grads[1].k[0]) == 3 * caches.HEADS * caches.SIZE


@core
def test_insert_donating_keeps_both_caches_if_it_shares_buffers():
    cache = jax.tree.map(jnp.copy, fill_cache(3, 2))
    past = cache
    cache = jaxkv.seq_rm(cache, 0, 1).cache  # has the buffers of `past`
    with pytest.raises(ValueError, match="expected a source with its own buffers, got"):
        insert(cache, past, 0, 2, donate=True)
    assert_identical(past, fill_cache(3, 2))
    kept = extract(past, 0, cells=4).check()
    again, ok = insert(cache, kept, 0, 0, donate=True)
    assert ok and cache.buffers.k[0].is_deleted()
    assert stored(again, 0)[0] == [(0, 0), (1, 0), (2, 0)]


@core
@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
def test_insert_donating_copies_no_buffer(stacked):
    """Each array is read by one gather and written by one scatter, in place."""
    sizes = dict(layers=2, kv_heads=2, head_dim=64, sequences=2, rope=None, stacked=stacked)
    make = partial(attention_cache, **sizes)
    cache, source = (jax.eval_shape(partial(make, cells=n)) for n in (8192, 1024))
    run = jax.jit(lambda cache, source: insert(cache, source, 0, 1), donate_argnums=0)
    program = run.lower(cache, source).compile()
    one_array = 8192 * 2 * 64 * 4
    assert hlo.large_moves(program, one_array // 2) == []
    assert hlo.temporary_bytes(program) < one_array // 2
    made = [(out, op) for out, op, _ in hlo.instructions(program) if out.startswith("f32")]
    assert sum(op == "gather" for _, op in made) == 4
    assert sum(op == "fusion" and "2,8192,64]" in out for out, op in made) == 4


@core
def test_parts_of_an_extracted_cache_have_their_own_numbers_of_cells():
    kind = SMALL.__class__("two", cells=8, sequences=3, windows=(None, None))
    cache = fill_cache(6, kind=kind)
    position = cache.parts[1].cell_positions(0)
    cache = jaxkv.evict(cache, (None, position[None] >= 3)).check()
    small = jaxkv.extract(cache, 0, cells=(6, 3)).check()
    assert [part.table.num_cells for part in small.parts] == [6, 3]
    assert jaxkv.extract(cache, 0, cells=(6, 2)).reason == jaxkv.Reason.OUT_OF_CELLS
    with pytest.raises(ValueError, match="expected a number of cells for each of 2 parts"):
        jaxkv.extract(cache, 0, cells=(6,))
