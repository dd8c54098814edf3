"""A program is that of the platform it is lowered for, wherever it is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.ops.attention.api import attend
from jaxkv.ops.attention.softmax import Options
from tests.pods import Pod
from tests.sights import sight_of_mask

ELSEWHERE = pytest.mark.parametrize("platform", ["tpu", "cuda"])


def step_for(platform, *, tokens=1, size=64, dtype=jnp.float32, implementation=None):
    """Writing and attending in a layer, as text."""

    def make():
        return jaxkv.make_kv_cache(layers=1, cells=8192, kv_heads=2, head_dim=size, dtype=dtype)

    memory = jax.eval_shape(make)
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=tokens).ubatches
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, size), dtype) for heads in (4, 2))

    def step(memory, ubatch, q, k):
        return jaxkv.attend(memory, 0, ubatch, q, k, k, implementation=implementation)

    traced = jax.jit(step).trace(memory, ubatch, q, k)
    return traced.lower(lowering_platforms=(platform,)).as_text()


@ELSEWHERE
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.core)])
@pytest.mark.parametrize("implementation", [None, "tiles", "whole"])
def test_what_is_tuned_for_a_processor_is_in_no_other_program(platform, dtype, implementation):
    options = {"dtype": dtype, "implementation": implementation}
    assert "optimization_barrier" in step_for("cpu", **options)
    for tokens in (1, 128):
        assert "optimization_barrier" not in step_for(platform, tokens=tokens, **options)


def test_on_a_gpu_a_token_reads_all_cells_at_once_and_a_prompt_reads_tiles():
    assert "stablehlo.while" not in step_for("cuda")
    assert "stablehlo.while" in step_for("cuda", tokens=128)
    assert "stablehlo.while" in step_for("cpu")


@pytest.mark.parametrize("tokens", [1, pytest.param(128, marks=pytest.mark.core)])
def test_on_a_tpu_both_run_the_kernel_and_nowhere_else_does(tokens):
    assert "tpu_custom_call" in step_for("tpu", tokens=tokens)
    assert "tpu_custom_call" not in step_for("cuda", tokens=tokens)
    half = step_for("tpu", tokens=tokens, dtype=jnp.float16)
    assert "tpu_custom_call" not in half


def named(kind):
    """Say which GPU programs are made for."""
    device = jax.sharding.AbstractDevice(kind, 132, "gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


# Said by jax from 0.11 on, about what the kernel is written with.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the GPU that is there is known")
def test_on_a_gpu_that_is_known_both_run_the_kernel():
    assert "xla.gpu.triton" not in step_for("cuda")
    with named("NVIDIA A100-SXM4-80GB"):
        assert "xla.gpu.triton" not in step_for("cuda")
    with named("NVIDIA H100 80GB HBM3"):
        for tokens in (1, 128):
            assert "xla.gpu.triton" in step_for("cuda", tokens=tokens)
        assert "xla.gpu.triton" in step_for("cuda", implementation="pallas")
        assert "xla.gpu.triton" not in step_for("cuda", dtype=jnp.float16)
        assert "xla.gpu.triton" not in step_for("cuda", size=512, implementation="pallas")


@ELSEWHERE
def test_elsewhere_last_positions_are_looked_for_in_one_pass(platform):
    def plan(memory):
        return jaxkv.plan_step(memory, jnp.zeros(4, int), jnp.arange(4), jnp.ones(4, bool))

    def make():
        return jaxkv.make_kv_cache(layers=1, cells=8192, kv_heads=1, head_dim=2, sequences=4)

    traced = jax.jit(plan).trace(jax.eval_shape(make))
    cpu, other = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", platform))
    a_block, all_cells = "tensor<1x128x32xi32>", "tensor<1x8192x32xi32>"
    assert a_block in cpu and all_cells not in cpu
    assert a_block not in other and all_cells in other


@pytest.mark.core
def test_on_a_mesh_each_share_runs_the_kernel():
    pod = Pod((("data", 2), ("tensor", 2), ("cells", 2)), streams=8, cells=2048)
    with jax.set_mesh(pod.mesh(np.array(jax.devices()))):
        traced = jax.jit(pod.step).trace(pod.weights(), pod.memory(), *pod.next_tokens())
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.core
def test_small_streams_of_a_token_each_are_read_at_once_on_a_tpu():
    for cells, kernel in ((512, False), (1024, True)):
        sight = sight_of_mask(np.zeros((4, 1, cells), bool), range(4), 4)
        q, k = jnp.zeros((4, 1, 2, 8)), jnp.zeros((4, 2, cells, 8))
        lowered = attend.trace(q, k, k, sight, Options()).lower(lowering_platforms=("tpu",))
        assert ("tpu_custom_call" in lowered.as_text()) == kernel
