"""The platform of lowering and the settings of the caller select the program of attention."""

import functools
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.ops.attention.dispatch import attention
from jaxkv.ops.attention.softmax import AttentionOptions
from tests.attention.ways import TRITON, attend
from tests.helpers.caches import attention_cache
from tests.helpers.pods import Pod
from tests.helpers.visibility import make_visibility

pytestmark = pytest.mark.core


@functools.cache
def step_for(platform, *, tokens=1, size=64, dtype="float32", implementation=None, gpu=None):
    """The lowered text of a layer's write and attention; `gpu` is the target device's name."""

    sizes = dict(layers=1, cells=8192, kv_heads=2, head_dim=size, dtype=dtype)
    cache = jax.eval_shape(partial(attention_cache, **sizes))
    (ubatch,) = jaxkv.init_full(cache, ubatch_size=tokens).ubatches
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, size), dtype) for heads in (4, 2))

    def step(cache, ubatch, q, k):
        step = jaxkv.apply(cache, ubatch)
        return jaxkv.attend(step, 0, q, k, k, implementation=implementation)

    device = gpu and jax.sharding.AbstractDevice(gpu, 132, "gpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step).trace(cache, ubatch, q, k)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("implementation", "dtype"), [(None, "float32"), ("tiles", "bfloat16"), ("whole", "float32")]
)
def test_lowered_tuning_for_processor_is_in_no_other_program(implementation, dtype):
    lowered = partial(step_for, dtype=dtype, implementation=implementation)
    assert "optimization_barrier" in lowered("cpu")
    for platform in ("tpu", "cuda"):
        for tokens in (1, 128):
            assert "optimization_barrier" not in lowered(platform, tokens=tokens)


def test_lowered_for_gpu_token_reads_all_cells_and_prompt_tiles():
    assert "stablehlo.while" not in step_for("cuda")
    assert "stablehlo.while" in step_for("cuda", tokens=128)
    assert "stablehlo.while" in step_for("cpu")


def test_lowered_for_gpu_without_pallas_triton_runs_no_kernel(monkeypatch):
    monkeypatch.delattr(jax.experimental.pallas, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    lowered = step_for("cuda", size=72, implementation="pallas", gpu="NVIDIA H100 80GB HBM3")
    assert "triton" not in lowered and "dot_general" in lowered


def test_lowered_for_tpu_runs_kernel():
    for tokens in (1, 128):
        assert "tpu_custom_call" in step_for("tpu", tokens=tokens)
        assert "tpu_custom_call" not in step_for("cuda", tokens=tokens)
    assert "tpu_custom_call" not in step_for("tpu", dtype="float16")


@TRITON
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the GPU that is there is known")
def test_lowered_for_known_gpu_runs_kernel():
    assert "xla.gpu.triton" not in step_for("cuda")
    assert "xla.gpu.triton" not in step_for("cuda", gpu="NVIDIA A100-SXM4-80GB")
    known = {"gpu": "NVIDIA H100 80GB HBM3"}
    for options in ({}, {"tokens": 128}, {"implementation": "pallas"}):
        assert "xla.gpu.triton" in step_for("cuda", **known, **options)
    for options in ({"dtype": "float16"}, {"size": 512, "implementation": "pallas"}):
        assert "xla.gpu.triton" not in step_for("cuda", **known, **options)


def test_lowered_elsewhere_last_positions_take_one_pass():
    def plan(cache):
        return jaxkv.plan_step(cache, jnp.zeros(4, int))

    sizes = dict(layers=1, cells=8192, kv_heads=1, head_dim=2, sequences=4)
    cache = jax.eval_shape(partial(attention_cache, **sizes))
    traced = jax.jit(plan).trace(cache)
    a_block, all_cells = "tensor<1x128x4xui32>", "tensor<1x8192x4xui32>"
    for platform in ("cpu", "tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert (a_block in text) == (platform == "cpu")
        assert (all_cells in text) == (platform != "cpu")


def test_lowered_for_tpu_mesh_shares_run_kernel():
    pod = Pod((("data", 2), ("tensor", 2), ("cells", 2)), streams=8, cells=2048)
    with jax.set_mesh(pod.mesh(np.array(jax.devices()))):
        assert "tpu_custom_call" in pod.lower_step(platform="tpu").as_text()


def test_lowered_for_tpu_small_streams_are_read_at_once():
    for cells, kernel in ((512, False), (1024, True)):
        visibility = make_visibility(np.zeros((4, 1, cells), bool), range(4), 4)
        q, k = jnp.zeros((4, 1, 2, 8)), jnp.zeros((4, 2, cells, 8))
        traced = attend.trace(q, k, k, visibility, AttentionOptions())
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert ("tpu_custom_call" in text) == kernel


def test_import_and_step_on_cpu_leave_slow_modules_for_later():
    slow = "pallas|jaxkv.generation|jaxkv.serving|flax|optax|matplotlib|safetensors"
    code = f"""
import re, sys, jax.numpy as jnp, jaxkv
print([x for x in sys.modules if re.search("{slow}", x)])
cache = jaxkv.make_cache(jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=8), cells=4)
step = jaxkv.apply(cache, jaxkv.init_batch(cache, jaxkv.make_batch([1, 2])))
x = jnp.ones((1, 2, 1, 8))
print(jaxkv.attend(step, 0, x, x, x)[1].sum(), "jax.experimental.pallas" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n16.0 False\n"


Q, K = (
    jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(2, 3, 4, 8), (2, 2, 16, 8)])
)
MASK = jnp.ones((2, 3, 16), bool)


def test_attention_without_jit_matches():
    with jax.disable_jit():
        found = attention(Q, K, K, MASK)
    np.testing.assert_allclose(found, attention(Q, K, K, MASK), atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_attention_has_the_matmul_precision_of_its_caller(platform):
    @jax.jit
    def precise(q):
        with jax.default_matmul_precision("highest"):
            return attention(q, K, K, MASK)

    text = precise.trace(Q).lower(lowering_platforms=(platform,)).as_text()
    assert "HIGHEST" in text and "precision = [DEFAULT" not in text


def test_attention_has_the_x64_mode_of_its_caller():
    @jax.jit
    def exact(q):
        with jax.enable_x64(True):
            return attention(q.astype(jnp.float64), K, K, MASK).astype(jnp.float32)

    np.testing.assert_allclose(exact(Q), attention(Q, K, K, MASK), atol=1e-5)


def test_attention_keeps_the_types_of_meshes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, jax.NamedSharding(mesh, P("x"))) for x in (Q, K, K, MASK)]
        assert jax.typeof(jax.jit(attention)(*arrays)).sharding.spec[0] == "x"

        def twice(q, k, v, mask):
            return jax.lax.scan(lambda x, _: (attention(x, k, v, mask), None), q, None, length=2)[0]

        for function in (twice, jax.grad(lambda *x: attention(*x).sum())):
            run = jax.shard_map(function, in_specs=(P("x"),) * 4, out_specs=P("x"))
            assert jnp.all(jnp.isfinite(jax.jit(run)(*arrays)))
