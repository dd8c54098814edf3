"""Placements of users, whose sort keys every choice of cells follows, and striped cells."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import sharding, snapshot
from jaxkv.kv.placement import Striped, cells_at_ranks
from tests.helpers.caches import (
    GROUPS_LAST_FIT,
    LAST_FIT_WINDOW,
    SMALL,
    STRIPES,
    LastFit,
    drawing,
    parse_cache,
    run_model,
)
from tests.helpers.meshes import RULES, mesh_of, place_on_mesh
from tests.helpers.reference_cache import Oracle

LAST = replace(SMALL, cells=8, placement=LastFit())


@dataclass(frozen=True)
class NextTo(jaxkv.Placement):
    """Cells near a cell first; a placement with a parameter."""

    cell: int

    def sort_keys(self, stream):
        return jnp.abs(jnp.arange(stream.free.size) - self.cell) + 0.5


@jax.jit
def step(cache, token):
    return jaxkv.plan_step(cache, token)


def test_plan_of_one_token_takes_the_first_cell_by_its_key():
    cache = parse_cache("0{0} 1{0} . . 0{1} . 0{2} .", LAST)
    assert jaxkv.plan_step(cache, [5], sequences=[1]).ubatch.slots.tolist() == [[7]]
    assert step(parse_cache(". . . . . . 0{0} 1{0}", LAST), jnp.array([1, 2, 3])).ok


def test_plan_of_several_tokens_takes_cells_in_the_order_of_keys():
    cache = parse_cache("0{0} . . . . 0{1} . .", replace(LAST, placement=NextTo(4)))
    batch = jaxkv.make_batch([1, 2, 3, 4], sequences=[0, 1, 2, 2])
    assert jaxkv.init_batch(cache, batch).ubatch.slots.ravel().tolist() == [4, 3, 2, 6]


@pytest.mark.core
def test_generate_with_own_placement_gives_the_same_tokens():
    results = [
        jaxkv.generate(
            lambda _, step: run_model(step),
            None,
            [[1, 2, 3], [4, 5, 6, 7, 8]],
            cache=replace(SMALL, cells=24, placement=placement).make(),
            max_new_tokens=4,
        )
        for placement in ("any", LastFit(), NextTo(12))
    ]
    for result in results[1:]:
        assert result.tokens.tolist() == results[0].tokens.tolist()
    tables = [result.cache.table.position[0] for result in results]
    assert np.all(tables[0][-8:] < 0) and np.all(tables[1][:8] < 0)


def test_window_evicts_lowest_position_of_own_placement():
    cache = parse_cache("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", replace(LAST_FIT_WINDOW, cells=6))
    plan = jaxkv.init_batch(cache, jaxkv.make_batch([1, 2]))
    assert plan.ubatch.slots.ravel().tolist() == [0, 1]


def test_copy_between_streams_takes_the_last_free_cells():
    cache = parse_cache("0{0} 1{0} | . . . . . . . . 0{2} .", GROUPS_LAST_FIT)
    copied = jaxkv.seq_cp(cache, 0, [3])
    assert copied.ok and drawing(copied.cache) == "0{0} 1{0} | . . . . . . . 1{3} 0{2} 0{3}"


def test_defrag_moves_cells_to_the_end():
    cache = parse_cache("0{0} . 1{0} . . 0{1} . 1{1}", LAST)
    plan = jaxkv.defrag_plan(cache)
    assert plan.num_changes == 2
    cache = jaxkv.apply(cache, plan)
    assert drawing(cache) == ". . . . 0{0} 0{1} 1{0} 1{1}"
    assert jaxkv.defrag_plan(cache).num_changes == 0


def test_snapshot_of_own_placement_loads_into_caches_only():
    data = snapshot.save(parse_cache("0{0} . 1{0}", LAST), sequences=[0])
    assert "placement=LastFit" in repr(snapshot.inspect(data).cache)
    with pytest.raises(ValueError, match=r"got 'LastFit' of a user; load into a cache .*\(into=\)"):
        snapshot.load(data)
    full = parse_cache("0{2} . . . . . 0{1} .", LAST)
    loaded = snapshot.load(data, into=full)
    assert drawing(loaded) == "0{2} . . . . 1{0} 0{1} 0{0}"
    assert loaded.table.placement == LastFit()
    other = snapshot.load(data, into=replace(LAST, placement="any").make())
    assert drawing(other) == "0{0} 1{0}"


def test_plan_of_another_placement_raises():
    near, far = (replace(LAST, placement=NextTo(cell)).make() for cell in (1, 5))
    assert near.table.spec == replace(LAST, placement=NextTo(1)).make().table.spec
    plan = jaxkv.plan_step(near, [1], sequences=[0])
    for cache in (far, LAST.make()):
        with pytest.raises(ValueError, match="placement="):
            jaxkv.apply(cache, plan)


@pytest.mark.core
def test_own_placement_on_a_mesh_chooses_the_same_cells():
    kind = replace(GROUPS_LAST_FIT, cells=8)
    tokens, valid = np.ones((4, 3), int), np.arange(3) < np.array([[1], [2], [0], [3]])
    sequences = np.broadcast_to(np.arange(4)[:, None], tokens.shape)
    batch = jaxkv.make_batch(tokens, sequences=sequences, valid=valid)
    with jax.set_mesh(mesh_of(data=2, tensor=2)):
        split = jaxkv.init_batch(place_on_mesh(kind.make()), batch)
    whole = jaxkv.init_batch(kind.make(), batch)
    assert np.asarray(split.ubatch.slots).tolist() == np.asarray(whole.ubatch.slots).tolist()
    assert set(whole.ubatch.slots[whole.ubatch.valid].tolist()) == {5, 6, 7}


def test_own_placement_of_a_part_is_that_of_its_part():
    spec = jaxkv.CacheSpec.attention(1, 1, 2)
    hybrid = jaxkv.CacheSpec.hybrid((spec, [0]), (spec, [1]))
    cache = jaxkv.make_cache(hybrid, cells=4, placement=(LastFit(), "any"))
    slots = jaxkv.plan_step(cache, [1]).ubatch.slots
    assert [x.tolist() for x in slots] == [[[3]], [[0]]]


# ----------------------------------------------------------------------------------------- striped

SHARDS = 4
LONG = replace(STRIPES, cells=1024, placement=f"striped:{SHARDS}", sequences=2)
BY_NUMBER = {"placement": "any"}


@pytest.mark.parametrize(("share", "shards"), [(3, 2), (6, 2), (65, 3), (320, 4)])
def test_dealt_and_cell_of_match_oracle(share, shards):
    cells = share * shards
    order = Striped(shards).sort(jnp.arange(cells, dtype=jnp.int32))
    assert order.tolist() == Oracle(cells, 1, placement=f"striped:{shards}").order
    assert cells_at_ranks(jnp.arange(cells + 1), order).tolist() == [*order.tolist(), cells]


UNEVEN = "fills the devices unevenly that split cells by cells; take placement='striped:4'"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (BY_NUMBER, f"placement='any' {UNEVEN}"),
        ({"placement": "striped:2"}, f"placement='striped:2' {UNEVEN}"),
        ({"placement": "striped:8"}, ""),
    ],
)
def test_layout_of_striped_cells_says_whether_devices_hold_alike(made, said):
    cache = jax.eval_shape(replace(LONG, **made).make)
    layout = sharding.device_bytes(cache, mesh_of(cells=4), RULES)
    assert "\n".join(layout.uneven) == said and str(layout).endswith(said or " bytes")
