"""Compile a step for TPUs with their own compiler, and print what it made of it: a line a layout.

Run in a process of its own, since libtpu can be opened once:
`python -m tests.compilers.tpu_steps`. No TPU is wanted, only the wheel.
"""

import json
import os
from dataclasses import replace

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import numpy as np
from jax.experimental import topologies

import jaxkv
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
        "kernels": program.as_text().count('custom_call_target="tpu_custom_call"'),
        # The forms for processors alone have barriers; elsewhere there are none.
        "barriers": lowered.as_text().count("optimization_barrier"),
    }


def attending(name, pod, tokens):
    """What attention holds on a device, and its share of the layer's keys and values."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=name.split()[0])
    with jax.set_mesh(pod.mesh(np.array(topology.devices))):
        ubatch = pod.ubatch(tokens)
        attend = jax.jit(
            lambda memory, ubatch, q, k, v: jaxkv.attend(memory, 0, ubatch, q, k, v),
            donate_argnums=0,
        )
        traced = attend.trace(pod.memory(), ubatch, *pod.new(ubatch))
        program = traced.lower(lowering_platforms=("tpu",)).compile()
        return [hlo.temporary_bytes(program), pod.layout().buffers // LAYERS]


if __name__ == "__main__":
    for name, pod in OF_8B.items():
        found = compiled(name, pod)
        found["decode"] = attending(name, replace(pod, cells=131_072), pod.sequences)
        found["prompt"] = attending(name, replace(pod, cells=1 << 20), 64)
        print(json.dumps(found), flush=True)
