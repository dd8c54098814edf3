"""Temporaries of the gradients of `benchmarks.rollouts` from the TPU compiler, without a TPU.

Run `python -m benchmarks.tpu_rollouts`; it needs libtpu, see docs/kernels.md. One v5e has all
samples; on eight, each has one of eight samples.
"""

import os
from functools import partial

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.rollouts import loss_of_repeated, loss_of_shared, make_params

PROMPT, GROUP, TOKENS = 512, 8, 64


def with_sharding(sharding: NamedSharding, x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def main() -> None:
    """Print megabytes of temporaries, and of memory traffic, of a device."""
    for topology, count in (("v5e:2x2", 1), ("v5e:2x4", 8)):
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = Mesh(np.array(devices[:count]), ("data",))

        everywhere, by_sample = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
        args = (
            jax.tree.map(partial(with_sharding, everywhere), jax.eval_shape(make_params)),
            with_sharding(everywhere, jnp.zeros(PROMPT, jnp.int32)),
            with_sharding(by_sample, jnp.zeros((GROUP, TOKENS), jnp.int32)),
            with_sharding(by_sample, jnp.zeros(GROUP)),
        )
        print(f"{count} of {topology}: prompt of {PROMPT}, {GROUP} samples of {TOKENS} tokens")
        for name, loss in (("jaxkv.score", loss_of_shared), ("repeated", loss_of_repeated)):
            with jax.set_mesh(mesh):
                program = jax.jit(jax.value_and_grad(loss)).lower(*args).compile()
            temporaries = program.memory_analysis().temp_size_in_bytes
            traffic = program.cost_analysis()["bytes accessed"]
            print(
                f"  {name:12s} temporaries {temporaries / 1e6:6.0f} MB, "
                f"accessed {traffic / 1e6:7.0f} MB"
            )


if __name__ == "__main__":
    main()
