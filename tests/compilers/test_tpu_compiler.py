"""Programs that the TPU compiler makes for a step on a pod, in real shapes, without a TPU.

Skipped where the wheel `libtpu` is not installed. The programs are those that run on a TPU, so
transfers, temporary bytes and donation are exact; times are not measured.
"""

import pytest

from tests.compilers.compilers import marks_of, run_module
from tests.helpers.kernels import CASES
from tests.helpers.pods import LAYERS, MESSAGES, OF_8B

pytestmark = marks_of("libtpu", "libtpu==0.0.42 fits jax 0.10.2")


@pytest.fixture(scope="module")
def steps():
    return run_module("tests.compilers.tpu_steps")


@pytest.fixture(scope="module")
def kernels():
    return run_module("tests.compilers.tpu_kernel")


over_layouts = pytest.mark.parametrize("name", OF_8B)
over_chips = pytest.mark.parametrize("chip", ("v5e:2x2", "v6e:2x2", "v5p:2x2x1"))


@over_layouts
def test_step_on_pod_sends_what_its_layout_says(steps, name):
    """An all-reduce per layer (output projection), a join per layer of split cells, and scalars.

    The last and largest all-reduce is that of the logits' rows. A feed-forward adds one per layer.
    """
    step, pod = steps[name], OF_8B[name]
    axes, sums = dict(pod.axes), ("all-reduce", pod.sequences * pod.width * 2)
    sent = [tuple(one) for one in step["collectives"]]
    assert not [one for one in sent if one[0] == "collective-permute"]
    layer = []
    if "tensor" in axes:
        rows = pod.sequences // axes.get("data", 1)
        layer.append(("all-reduce", rows * pod.width * 2))
    if "cells" in axes:
        layer.append(("all-gather", step["sent"] // LAYERS))
    last = [sums] if pod.streams > 1 else []
    for one in [*layer * LAYERS, *last]:
        sent.remove(one)
    assert len(sent) + len(last) <= (MESSAGES if pod.streams > 1 else 0)
    assert max((size for _, size in sent), default=0) <= 3 * pod.sequences * 4


@over_layouts
def test_step_on_pod_runs_the_kernel_and_holds_little(steps, name):
    """The TPU programs are lowered, though only CPUs exist here."""
    step = steps[name]
    assert step["kernels"] == LAYERS and step["barriers"] == 0
    assert step["share"] <= step["aliased"] <= 1.01 * step["share"]  # padded arrays
    assert step["temporaries"] < 4_000_000


@over_layouts
@pytest.mark.parametrize("ubatch", ["decode", "prompt"])
def test_attend_over_many_cells_holds_two_hundredths(steps, name, ubatch):
    """A token for each sequence over 262,144 cells, and 64 tokens over a million.

    Small arrays, up to 1.1 MB, have the same size from 32,768 cells up to there.
    """
    temporaries, share = steps[name][ubatch]
    assert temporaries <= share * 0.02


@over_chips
@pytest.mark.parametrize(("dtype", "size"), CASES)
def test_kernel_reads_keys_and_values_in_place(kernels, chip, dtype, size):
    found = kernels[f"{chip} {dtype} {size}"]
    assert found["kernels"] == LAYERS and not found["works"]
    assert found["temporaries"] < 0.01 * 32 * 2 * found["keys"]


@over_chips
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "heads of 64", "heads of 96"])
def test_step_writes_in_place_and_runs_the_kernel(kernels, chip, dtype):
    found = kernels[f"{chip} {dtype} step"]
    assert found["kernels"] == LAYERS
    assert set(found["works"]) <= {"while", "dynamic-update-slice", "scatter"}  # the write
    assert found["temporaries"] < 0.01 * 32 * found["layer"]


def test_plan_over_eight_devices_takes_a_tenth(steps):
    """64 streams of 131,072 cells: a tenth of the 2.35 million cycles of the whole table.

    Cycles that depend on the number of cells are counted separately from small instructions.
    """
    assert steps["planning"]["updates"] <= 64
    assert steps["planning"]["of_cells"] <= 80_000
    assert steps["planning"]["cycles"] <= 250_000
