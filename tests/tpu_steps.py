"""Compile a step for TPUs with their own compiler, and print what it made of it: a line a layout.

Run in a process of its own, since libtpu can be opened once: `python -m tests.tpu_steps`. No TPU is
wanted, only the wheel.
"""

import json
import os

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import numpy as np
from jax.experimental import topologies

from tests import hlo
from tests.pods import LAYERS, OF_8B


def compiled(name, pod):
    """Lower and compile a step with the memory donated; what matters of it, as JSON takes it."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name.split()[0])
    with jax.set_mesh(pod.mesh(np.array(topology.devices))):
        step = jax.jit(pod.step, donate_argnums=1)
        traced = step.trace(pod.weights(), pod.memory(), *pod.next_tokens())
        lowered = traced.lower(lowering_platforms=("tpu",))
        program, layout = lowered.compile(), pod.layout()
    memory = program.memory_analysis()
    return {
        "name": name,
        "collectives": [(one.name, one.bytes) for one in hlo.collectives(program)],
        "temporaries": memory.temp_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "share": layout.table + layout.buffers,
        "keys": layout.buffers // LAYERS // 2,
        "sent": layout.sent,
        # The forms for processors alone have barriers; elsewhere there are none.
        "barriers": lowered.as_text().count("optimization_barrier"),
    }


if __name__ == "__main__":
    for name, pod in OF_8B.items():
        print(json.dumps(compiled(name, pod)), flush=True)
