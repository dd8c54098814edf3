"""Compile the TPU kernel with the TPU compiler, and print a line of JSON for each program.

Run as a process, like `tpu_steps.py`: `python -m tests.compilers.tpu_kernel`.
"""

import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

from jax.experimental import topologies

from tests.compilers.compilers import print_result
from tests.helpers.kernels import CASES, DTYPES, of_a_step, of_attention, place_shapes

CHIPS = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")


def on(chip):
    """The sharding of an array on one device of a topology, and its shape."""
    return place_shapes(topologies.get_topology_desc(platform="tpu", topology_name=chip).devices)


if __name__ == "__main__":
    for chip in CHIPS:
        for dtype, size in CASES:
            print_result(f"{chip} {dtype} {size}", of_attention("tpu", on(chip), size, dtype))
        for dtype in (*DTYPES, "int8"):
            print_result(f"{chip} {dtype} step", of_a_step("tpu", on(chip), dtype))
        for size in (64, 96):
            print_result(
                f"{chip} heads of {size} step", of_a_step("tpu", on(chip), "bfloat16", size)
            )
