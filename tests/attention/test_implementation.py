"""Attention may run in several ways, which agree."""

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv.ops.attention.api import attend
from jaxkv.ops.attention.reference import reference
from jaxkv.ops.attention.sight import mask_of
from jaxkv.ops.attention.softmax import Options
from tests.cases import mostly_nightly
from tests.sights import sight_of_mask

DATA = Path(__file__).parent.parent / "data"
Q, H, K, D = 3, 4, 2, 8
OURS = [None, "tiles", "whole", "pallas"]  # the last one is interpreted here
HERE = [*OURS, "xla"]  # those that run without a GPU


def attended(implementation, streams, **options):
    """Two prompts in a memory that holds a third one, seen by their own tokens and padding."""
    memory = jaxkv.make_kv_cache(
        layers=1, cells=16, kv_heads=K, head_dim=D, sequences=Q, streams=streams
    )

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


@pytest.mark.core
@pytest.mark.parametrize("streams", [1, Q])
@pytest.mark.parametrize("implementation", ["tiles", "whole", "pallas", "xla"])
def test_they_agree(implementation, streams):
    np.testing.assert_allclose(
        attended(implementation, streams), attended(None, streams), atol=2e-6
    )


def arrays(*, streams=2, lists=None, tokens=3, cells=40, value_dim=D, dtype=jnp.float32):
    """Queries, keys, values and a sight; the last token of the last list sees nothing."""
    rng = np.random.default_rng(0)
    lists = np.arange(streams) if lists is None else np.array(lists)
    shapes = ((len(lists), tokens, H, D), (streams, K, cells, D), (streams, K, cells, value_dim))
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    mask = rng.random((len(lists), tokens, cells)) < 0.5
    mask[..., 0], mask[-1, -1] = True, False
    return q, k, v, sight_of_mask(mask, lists, streams)


def of_the_formula(q, k, v, sight, options):
    k, v = k[sight.streams], v[sight.streams]
    return np.asarray(reference(q, k, v, mask_of(sight), options))


@pytest.mark.parametrize(
    "lists", [None, *(pytest.param(x, marks=pytest.mark.core) for x in ([1], [2, 0]))], ids=str
)
@pytest.mark.parametrize("implementation", HERE)
def test_each_is_the_formula(implementation, lists):
    # JAX's wants values of the size of keys.
    case = arrays(streams=3, lists=lists, value_dim=D if implementation == "xla" else D + 1)
    options = [Options(), Options(scale=0.3)]
    if implementation != "xla":
        options.append(Options(scale=0.3, softcap=2.0, sinks=jnp.linspace(-1.0, 1.0, H)))
    for one in options:
        got = attend(*case, one, implementation)
        np.testing.assert_allclose(got, of_the_formula(*case, one), atol=2e-6)
        assert not np.asarray(got)[-1, -1].any()


@pytest.mark.core
@pytest.mark.parametrize(
    ("queries", "buffers"),
    mostly_nightly(
        itertools.product(("float32", "bfloat16"), ("float32", "bfloat16", "float16")),
        few=[("float32", "bfloat16"), ("bfloat16", "float16")],
    ),
)
@pytest.mark.parametrize("implementation", HERE)
def test_queries_may_be_of_another_dtype_than_the_buffers(implementation, queries, buffers):
    queries, buffers = jnp.dtype(queries), jnp.dtype(buffers)
    q, k, v, sight = arrays(dtype=buffers)
    q = q.astype(queries)
    if implementation == "pallas" and buffers == jnp.float16:
        with pytest.raises(ValueError, match="'pallas' wants .*float32 or bfloat16.*got .*float16"):
            attend(q, k, v, sight, Options(), implementation)
        return
    got = attend(q, k, v, sight, Options(), implementation)
    assert got.dtype == queries
    wanted = of_the_formula(q, k, v, sight, Options())
    coarse = 3e-2 if queries == jnp.bfloat16 or buffers != jnp.float32 else 2e-6
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, atol=coarse)


@pytest.mark.parametrize("implementation", HERE)
def test_a_hidden_key_that_is_no_number_changes_nothing_and_a_seen_one_shows(implementation):
    q, k, v, sight = arrays()
    mask = np.array(mask_of(sight))
    mask[0, :, 7], mask[0, 1, 7] = False, True
    sight = sight_of_mask(mask, [0, 1], 2)
    clean = np.array(attend(q, k, v, sight, Options(), implementation))
    broken = k.at[0, 1, 7].set(jnp.nan)  # which heads 2 and 3 read
    got = np.array(attend(q, broken, v, sight, Options(), implementation))
    assert np.isnan(got[0, 1, 2:]).all()
    got[0, 1, 2:] = clean[0, 1, 2:]
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("implementation", HERE)
def test_derivatives_are_clean_of_what_no_token_sees(implementation):
    q, k, v, sight = arrays()
    mask = np.array(mask_of(sight))
    mask[:, :, 7] = False
    sight = sight_of_mask(mask, [0, 1], 2)

    @jax.jit
    def derive(q, k, v):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(attend(q, k, v, sight, Options(), implementation)))

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    clean = derive(q, k, v)
    for one, other in zip(derive(q, k.at[:, :, 7].set(jnp.nan), v), clean, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert all(np.abs(x).max() > 1e-2 for x in clean)


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ValueError, match=r"wanted an implementation of \('tiles', .*got 'flash'"):
        attended("flash", 1)
    with pytest.raises(ValueError, match="'xla' has neither a softcap nor sinks"):
        attended("xla", 1, softcap=30.0)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN may be there")
def test_without_cudnn_jax_says_so():
    case = arrays(dtype=jnp.bfloat16)
    with pytest.raises(RuntimeError, match="cuDNN"):
        attend(*case, Options(), "cudnn")
    with pytest.raises(ValueError, match="'cudnn' wants .* got float32, bfloat16 and bfloat16"):
        attend(case[0].astype(jnp.float32), *case[1:], Options(), "cudnn")


# --------------------------------------------------------------------------------------- models


def shapes_of_a_step(name, implementation):
    """Run a model as shapes; nothing is compiled."""
    model = models.load(DATA / name, implementation=implementation)
    memory = model.make_memory(cells=32)
    (ubatch,) = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2])).ubatches
    step = jaxkv.loops.step_of(model.forward)
    return jax.eval_shape(step, model.weights, *jaxkv.split(memory), ubatch)


@pytest.mark.parametrize(
    "name",
    [
        "llama_tied",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("gemma3", "granite_hybrid", "recurrent_gemma")
        ),
    ],
)
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
