"""Programs that the GPU compiler makes for an H100, of the kernel and of a step, without a GPU.

Skipped where its wheels are not installed: `pip install "jaxkv[cuda]"`. The programs are those that
run on a GPU, so temporary bytes, donation and spills are exact; times are not measured.
"""

import pytest

from tests.compilers.compilers import marks_of, run_module
from tests.helpers.kernels import CASES, DTYPES, LAYERS

pytestmark = marks_of("jax_cuda12_plugin", "'jaxkv[cuda]'")
KERNELS = 2  # per layer: one for the weights, one that joins


@pytest.fixture(scope="module")
def kernels():
    return run_module("tests.compilers.gpu_kernel")


@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_kernel_reads_in_place_and_spills_nothing(kernels, dtype, size):
    found = {name: x for name, x in kernels.items() if name.startswith(f"{dtype} {size} ")}
    for name, x in found.items():
        print(name, "registers and spilled bytes:", x["assembled"])
        assert x["kernels"] == KERNELS * LAYERS and not x["works"]
        assert x["temporaries"] < 0.01 * 32 * 2 * x["keys"]
        assert len(x["assembled"]) == KERNELS
        assert not any(spilled for _, spilled in x["assembled"])
    assert len(found) >= 2


@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
def test_step_writes_in_place_and_runs_the_kernel(kernels, dtype):
    found = kernels[f"{dtype} step"]
    assert found["kernels"] == KERNELS * LAYERS
    assert set(found["works"]) <= {"fusion", "scatter"}  # the write
    assert found["temporaries"] < 0.01 * 32 * found["layer"]
    assert found["aliased"] >= found["cache"]


def test_step_on_mesh_runs_the_kernel_on_each_share(kernels):
    assert kernels["mesh"]["kernels"] == KERNELS
