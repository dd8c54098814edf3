"""Compile steps on pods with the TPU compiler, and print a line of JSON for each.

Run as a process, since libtpu can be opened once per process: `python -m
tests.compilers.tpu_steps`. It needs the wheel and no TPU.
"""

import os
from dataclasses import replace

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import numpy as np
from jax.experimental import topologies

from benchmarks.tpu_planning import cost
from tests.compilers.compilers import print_result
from tests.helpers import hlo, kernels
from tests.helpers.pods import LAYERS, OF_8B


def describe_step(pod):
    """Properties of a compiled step with the cache donated, as JSON values."""
    lowered, layout = pod.lower_step(platform="tpu"), pod.layout()
    program = lowered.compile()
    return {
        "collectives": hlo.collectives(program),
        "temporaries": hlo.temporary_bytes(program),
        "aliased": program.memory_analysis().alias_size_in_bytes,
        "share": layout.table + layout.buffers,
        "sent": layout.sent,
        "kernels": kernels.kernels(program),
        # Only the CPU programs have barriers.
        "barriers": lowered.as_text().count("optimization_barrier"),
    }


def measure_attention(pod, tokens):
    """Temporary bytes of attention on a device, and its share of the layer's keys and values."""
    program = pod.lower_attention(tokens, platform="tpu").compile()
    return hlo.temporary_bytes(program), pod.layout().buffers // LAYERS


if __name__ == "__main__":
    for name, pod in OF_8B.items():
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name.split()[0])
        with jax.set_mesh(pod.mesh(np.array(topology.devices))):
            found = describe_step(pod)
            found["decode"] = measure_attention(replace(pod, cells=1 << 18), pod.sequences)
            found["prompt"] = measure_attention(replace(pod, cells=1 << 20), 64)
        print_result(name, found)
    cycles, _, updates = cost("v5e:2x4", 131_072, 8)
    of_cells = cycles - cost("v5e:2x4", 8_192, 8)[0]
    print_result("planning", {"cycles": cycles, "of_cells": of_cells, "updates": updates})
