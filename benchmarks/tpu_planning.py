"""Estimated cycles of a planned step of the table from the TPU compiler, without a TPU.

64 sequences with a stream each plan and apply a token, with the table on one device and split over
eight. As in `benchmarks.tpu_cycles` the numbers are the compiler's estimates. A program for a
single step also converts the owners of cells to the layout of its arguments. This is counted
separately, since a loop does not do it.
"""

import argparse
import math
import os
import re

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from benchmarks.tpu_cycles import estimates
from jaxkv import sharding

SEQUENCES = 64


def step(table, buffers, tokens, valid):
    """Plan a token for each sequence and apply it."""
    cache, sequences = jaxkv.Cache(table=table, buffers=buffers), jnp.arange(SEQUENCES)
    plan = jaxkv.plan_step(cache, tokens, sequences=sequences, active=valid)
    ubatch, ok = plan.ubatch, plan.ok
    return jaxkv.apply(cache, ubatch).table, ubatch, ok


def compiled(chip, cells, devices):
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip)
    mesh = jax.sharding.Mesh(np.array(topology.devices)[:devices], ("data",))
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=128)
    sizes = dict(cells=cells, sequences=SEQUENCES, streams=SEQUENCES)

    def make():
        return jaxkv.make_cache(spec, **sizes, dtype=jnp.bfloat16)

    with jax.set_mesh(mesh):
        cache = sharding.shapes(make, mesh, sharding.ShardingRules())
        table, buffers = cache.table, cache.buffers
        split = NamedSharding(mesh, P("data"))
        tokens, valid = (
            jax.ShapeDtypeStruct((SEQUENCES,), dtype, sharding=split) for dtype in (jnp.int32, bool)
        )
        traced = jax.jit(step, donate_argnums=0).trace(table, buffers, tokens, valid)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def cost(chip, cells, devices):
    """Cycles of a step, those of the argument layout, and the largest number of scatter updates."""
    program = compiled(chip, cells, devices)
    (outside, inside), text = estimates(program), program.as_text()
    order = re.search(rf"= u32\[\d+,1,{cells}\]\S* copy\(.*estimated_cycles\":\"(\d+)", text)
    order = int(order[1]) if order else 0
    sizes = dict(re.findall(r"(%[\w.-]+) = \w+\[([\d,]*)\]", text))
    updates = [
        math.prod(int(n) for n in sizes[name].split(",") if n)
        for name in re.findall(r" scatter\([^)]*, (%[\w.-]+)\)", text)
    ]
    return outside + inside - order, order, max(updates, default=0)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e:2x4")
    arguments = parser.parse_args()
    print(f"thousands of cycles of a step, {SEQUENCES} streams, {arguments.chip}")
    print(f"{'cells':>8} {'devices':>8} {'step':>8} {'order':>8} {'largest scatter':>16}")
    for cells in (8_192, 131_072):
        for devices in (1, 8):
            step, order, updates = cost(arguments.chip, cells, devices)
            print(
                f"{cells:8} {devices:8} {step / 1e3:8.0f} {order / 1e3:8.0f} {updates:16}",
                flush=True,
            )


if __name__ == "__main__":
    main()
