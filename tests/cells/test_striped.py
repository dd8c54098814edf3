"""Striped cells: each device of a mesh has an equal share of each sequence's cells."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxkv import sharding
from jaxkv.kv.placement import Striped, cells_at_ranks
from tests.helpers.caches import STRIPES
from tests.helpers.meshes import RULES, mesh_of
from tests.helpers.reference_cache import Oracle

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
