"""Compile the GPU kernel with XLA's compiler for GPUs, and print a line of JSON for each program.

Run as a process: `python -m tests.compilers.gpu_kernel`. It needs wheels and no GPU.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=f"--xla_dump_to={tempfile.mkdtemp()}")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from tests.compilers.compilers import print_result
from tests.helpers.kernels import CASES, DTYPES, FORKS, of_a_step, of_attention, place_shapes
from tests.helpers.pods import Pod

DUMP = Path(os.environ["XLA_FLAGS"].split("=")[-1])
"""The folder of the compiler's programs in PTX."""

# XLA's description of an H100, a GpuTargetConfigProto; numbers as NVIDIA's driver reports them.
H100 = (Path(__file__).parents[1] / "data" / "h100.txt").read_text()
NAMED = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", 132, "gpu"))
TOKENS = {"float32": (1, FORKS), "bfloat16": (1, 8, FORKS)}  # so that all block sizes occur
TOKENS["int8"] = TOKENS["bfloat16"]
POD = Pod((("tensor", 2), ("cells", 2)), head_dim=128, dtype="bfloat16")


def devices(count=1):
    """Virtual devices, with all properties that the compiler needs."""
    shape = f"1x1x{count}"
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=H100
    )
    return np.array(described.devices)


def ptxas():
    """The wheel's assembler, which prints the number of registers of a kernel."""
    for folder in sys.path:
        found = Path(folder) / "nvidia/cuda_nvcc/bin/ptxas"
        if found.exists():
            return found
    raise FileNotFoundError("expected ptxas: pip install nvidia-cuda-nvcc-cu12")


def read_assembly():
    """Registers and spilled bytes of each jaxkv kernel since the last call."""
    found = []
    for path in (path for path in DUMP.glob("*.ptx") if ".entry jaxkv_" in path.read_text()):
        command = [ptxas(), "-v", "-arch=sm_90a", path, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        for part in said.split("Compiling entry function")[1:]:
            spilled = sum(map(int, re.findall(r"(\d+) bytes spill", part)))
            found.append([int(re.search(r"Used (\d+) registers", part)[1]), spilled])
    for path in DUMP.iterdir():
        path.unlink()
    return sorted(found)


def say(name, found):
    print_result(name, {**found, "assembled": read_assembly()})


if __name__ == "__main__":
    of = place_shapes(devices())
    with jax.sharding.use_abstract_mesh(NAMED):
        for dtype, size in CASES:
            for tokens in TOKENS[dtype]:
                say(f"{dtype} {size} {tokens}", of_attention("cuda", of, size, dtype, tokens))
        for dtype in (*DTYPES, "int8"):
            say(f"{dtype} step", of_a_step("cuda", of, dtype))
    with jax.set_mesh(POD.mesh(devices(POD.devices))):  # its GPUs split heads and cells
        lowered = POD.lower_step(platform="cuda").as_text()
    say("mesh", {"kernels": lowered.count("xla.gpu.triton")})
