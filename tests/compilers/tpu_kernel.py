"""Compile the kernel for TPUs with their own compiler, and print what it made of it, by line.

Run in a process of its own, as `tpu_steps.py`: `python -m tests.compilers.tpu_kernel`.
"""

import json
import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kernels import CASES, DTYPES, of_a_step, of_attention

CHIPS = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")


def on(chip):
    """How an array lies on one device of a topology, and its shape."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    where = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), P())
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)


if __name__ == "__main__":
    for chip in CHIPS:
        for dtype, size in CASES:
            found = of_attention("tpu", on(chip), size, dtype)
            print(json.dumps({"name": f"{chip} {dtype} {size}", **found}), flush=True)
        for dtype in (*DTYPES, "int8"):
            found = of_a_step("tpu", on(chip), dtype)
            print(json.dumps({"name": f"{chip} {dtype} step", **found}), flush=True)
