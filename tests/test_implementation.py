"""Attention may run in several ways, which agree."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv.ops.attention.api import best

DATA = Path(__file__).parent / "data"
Q, H, K, D = 3, 4, 2, 8


def attended(implementation, streams, **options):
    """Two prompts in a memory that holds a third one, seen by their own tokens and padding."""
    memory = jaxkv.make_kv_cache(layers=1, cells=16, heads=K, size=D, sequences=Q, streams=streams)

    @jax.jit
    def step(memory, ubatch, q, k, v):
        memory = jaxkv.apply(memory, ubatch)
        return jaxkv.attend(memory, 0, ubatch, q, k, v, implementation=implementation, **options)

    rng = np.random.default_rng(0)
    for sequences in ([1], [0, 2]):
        batch = jaxkv.make_batch([[1, 2, 3]] * len(sequences), sequences=sequences)
        (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
        q, k, v = (
            jnp.asarray(rng.normal(size=(*ubatch.valid.shape, heads, D)), jnp.float32)
            for heads in (H, K, K)
        )
        memory, out = step(memory, ubatch, q, k, v)
    return np.asarray(out)


@pytest.mark.parametrize("streams", [1, Q])
@pytest.mark.parametrize("implementation", ["tiles", "whole", "xla"])
def test_they_agree(implementation, streams):
    np.testing.assert_allclose(
        attended(implementation, streams), attended(None, streams), atol=2e-6
    )


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match=r"wanted an implementation of \('tiles', .*got 'flash'"):
        attended("flash", 1)
    with pytest.raises(ValueError, match="'xla' has neither a softcap nor sinks"):
        attended("xla", 1, softcap=30.0)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be there")
def test_without_cudnn_jax_says_so():
    with pytest.raises(RuntimeError, match="cuDNN"):
        attended("cudnn", 1)


def test_on_a_gpu_a_token_each_reads_all_cells_at_once(monkeypatch):
    rows = jax.ShapeDtypeStruct((1, 8, 4096, 128), jnp.bfloat16)
    few, many = (jax.ShapeDtypeStruct((1, t, 32, 128), jnp.bfloat16) for t in (32, 33))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (best(few, rows, rows), best(many, rows, rows)) == ("whole", "tiles")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert best(few, rows, rows) == "tiles"


def shapes_of_a_step(name, implementation):
    """Run a model as shapes; nothing is compiled."""
    model = models.load(DATA / name, implementation=implementation)
    memory = model.make_memory(cells=32)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2])).ubatches
    step = jaxkv.loops.step_of(model.forward)
    return jax.eval_shape(step, model.weights, *jaxkv.split(memory), ubatch)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "granite_hybrid", "recurrent_gemma"])
def test_models_pass_it_on(name):
    wanted = shapes_of_a_step(name, None)
    for implementation in ("whole", "xla"):
        same = jax.tree.map(
            lambda a, b: a.shape == b.shape and a.dtype == b.dtype,
            shapes_of_a_step(name, implementation),
            wanted,
        )
        assert all(jax.tree.leaves(same))
    with pytest.raises(ValueError, match="wanted an implementation of .*got 'flash'"):
        shapes_of_a_step(name, "flash")


def test_a_model_without_attention_has_none_to_choose():
    with pytest.raises(models.ModelError, match="no attention to choose implementation='whole'"):
        models.load(DATA / "mamba2", implementation="whole")
