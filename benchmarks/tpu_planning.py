"""Estimated cycles of a planned step of the table from the TPU compiler, without a TPU.

64 sequences with a stream each plan and apply a token, with the table on one device and split over
eight. As in `benchmarks.tpu_cycles` the numbers are the compiler's estimates. A program for a
single step also converts the owners of cells to the layout of its arguments. This is counted
separately, since a loop does not do it.

`--model` prints the share of plans, `apply` and masks in a step of the layers of Llama 3.1 8B: the
cycles of a model of one layer, less those that a second layer adds. The shares are upper bounds,
since the compiler estimates nothing for the kernel of attention.
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
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from benchmarks import step
from benchmarks.tpu_cycles import estimates
from jaxkv import sharding

SEQUENCES = 64
MODEL_STEPS = {
    "64 sequences, a stream each": {"sequences": 64, "streams": 64, "tokens": 1},
    "64 sequences in one pool": {"sequences": 64, "streams": 1, "tokens": 1},
    "a prompt of 512": {"sequences": 1, "streams": 1, "tokens": 512},
}


def plan_and_apply(table, buffers, tokens, valid):
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
        traced = jax.jit(plan_and_apply, donate_argnums=0).trace(table, buffers, tokens, valid)
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


def step_of_model(layers, sequences, streams, tokens):
    """The compiled step of a model with cells for 8,192 tokens in each stream, on one device."""
    spec = jaxkv.CacheSpec.attention(layers=layers, kv_heads=step.HEADS, head_dim=step.SIZE)
    sizes = dict(cells=8_192, sequences=sequences, streams=streams, dtype="bfloat16")
    cache = jax.eval_shape(lambda: jaxkv.make_cache(spec, **sizes))

    def run(params, table, buffers, tokens):
        cache = jaxkv.Cache(table=table, buffers=buffers)
        if tokens.shape[1] == 1:
            plan = jaxkv.plan_step(cache, tokens[:, 0], sequences=jnp.arange(sequences))
        else:
            plan = jaxkv.init_batch(cache, jaxkv.make_batch(tokens, sequences=range(sequences)))
        x = jnp.take(jnp.ones((64, step.WIDTH), "bfloat16"), plan.ubatch.tokens, axis=0)
        after, x = step.forward(params, jaxkv.apply(cache, plan), x, jaxkv.attend)
        return after.cache.table, after.cache.buffers, x

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    on_device = SingleDeviceSharding(topology.devices[0])
    given = (
        *(jax.eval_shape(lambda: step.weights_of(layers)), cache.table, cache.buffers),
        jax.ShapeDtypeStruct((sequences, tokens), jnp.int32),
    )
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device), given
    )
    traced = jax.jit(run, donate_argnums=(1, 2)).trace(*given)
    return traced.lower(lowering_platforms=("tpu",)).compile()


def share_of_plan(**sizes):
    """Cycles outside of layers, and their share of a step of 32 layers."""
    one, two = (sum(estimates(step_of_model(layers, **sizes))) for layers in (1, 2))
    outside = 2 * one - two
    return outside, outside / (outside + 32 * (two - one))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e:2x4")
    parser.add_argument("--model", action="store_true", help="the share of a step of a model")
    arguments = parser.parse_args()
    if arguments.model:
        print("thousands of cycles outside of layers, and their share of 32 layers of 8B, v5e")
        for name, sizes in MODEL_STEPS.items():
            outside, share = share_of_plan(**sizes)
            print(f"{name:34} {outside / 1e3:8.0f} {share:8.2%}", flush=True)
        return
    print(f"thousands of cycles of a step, {SEQUENCES} streams, {arguments.chip}")
    print(f"{'cells':>8} {'devices':>8} {'step':>8} {'order':>8} {'largest scatter':>16}")
    for cells in (8_192, 131_072):
        for devices in (1, 8):
            cycles, order, updates = cost(arguments.chip, cells, devices)
            print(
                f"{cells:8} {devices:8} {cycles / 1e3:8.0f} {order / 1e3:8.0f} {updates:16}",
                flush=True,
            )


if __name__ == "__main__":
    main()
