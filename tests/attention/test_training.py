"""Gradients flow through the cache: what is written in one ubatch is learnt from a later one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkv

QKV = np.random.default_rng(0).normal(size=(3, 1, 6, 2, 4)).astype(np.float32)


def make(cells=16):
    return jaxkv.make_kv_cache(layers=1, cells=cells, kv_heads=2, head_dim=4)


def attended(memory, q, k, v, **options):
    """A memory after one ubatch, and what its tokens read."""
    plan = jaxkv.init_batch(memory, jaxkv.make_batch([1] * q.shape[1]))
    memory = jaxkv.apply(memory, plan)
    return jaxkv.attend(memory, 0, plan.ubatches[0], q, k, v, **options)


@pytest.mark.core
def test_grad_reaches_keys_and_values_of_earlier_ubatch():
    """Equal to differentiating plain attention over all keys."""
    q, k, v = QKV

    def through_the_cache(k, v):
        memory, _ = attended(make(), q[:, :4], k[:, :4], v[:, :4])
        _, out = attended(memory, q[:, 4:], k[:, 4:], v[:, 4:])
        return jnp.sum(out[:, :2] ** 2)

    def plainly(k, v):
        logits = jnp.einsum("rthd,rnhd->rhtn", q[:, 4:], k) / 2
        seen = jnp.arange(6)[None] <= jnp.arange(4, 6)[:, None]
        weights = jax.nn.softmax(jnp.where(seen[None, None], logits, -jnp.inf))
        return jnp.sum(jnp.einsum("rhtn,rnhd->rthd", weights, v) ** 2)

    got = jax.jit(jax.grad(through_the_cache, argnums=(0, 1)))(k, v)
    want = jax.jit(jax.grad(plainly, argnums=(0, 1)))(k, v)
    for a, b in zip(got, want, strict=True):
        assert (jnp.abs(b[:, :4]) > 1e-4).any()
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["whole", "tiles"])
def test_grad_of_forgotten_nan_is_unchanged(implementation):
    """Keys and values that were written, and that no token sees, do not reach a gradient."""
    q, k, v = (x[:, :2] for x in QKV)

    def learn(q, k, v, rest):
        memory, _ = attended(make(8), q, k + rest, v + rest)
        now = (x[:, :1] for x in (q, k, v))
        _, out = attended(jaxkv.clear(memory), *now, implementation=implementation)
        return jnp.sum(out**2)

    derive = jax.jit(jax.grad(learn, argnums=(0, 1, 2)))
    for a, b in zip(derive(q, k, v, jnp.nan), derive(q, k, v, 0.0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(b).max() > 1e-3


@pytest.mark.core
@pytest.mark.parametrize("cells", [8, 4096], ids=["whole", "tiles"])
def test_grad_of_jit_checkpoint_and_scan_agree(cells):
    """The step is traced first then, and derived when that trace has ended."""

    def learn(q, k, v):
        return jnp.sum(attended(make(cells), q, k, v)[1] ** 2)

    def scanned(*arrays):
        _, losses = jax.lax.scan(lambda _, x: (_, learn(*arrays) * x), None, jnp.arange(2.0))
        return jnp.sum(losses)

    arrays = [x[:, :4] for x in QKV]
    wanted = jax.jit(jax.grad(learn, argnums=(0, 1, 2)))(*arrays)
    assert all((jnp.abs(x) > 1e-3).any() for x in wanted)
    for staged in (jax.jit(learn), jax.checkpoint(learn), scanned):
        for a, b in zip(jax.grad(staged, argnums=(0, 1, 2))(*arrays), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.nightly
def test_soft_prefix_trained_through_the_cache_lowers_loss(small):
    """Eight embeddings before a text, the only thing that is trained, make it likelier.

    To two layers of the model, that is: through all thirty it compiles for a minute.
    """
    text = jnp.asarray(small.tokenizer.encode("The zebra plays chess with a purple submarine."))[:8]
    prefix = small.weights["vocabulary"]["head"][jnp.arange(100, 108)]

    def loss(prefix, weights):
        memory, logits = small.make_memory(cells=32), []
        for batch in (
            jaxkv.make_batch(embeddings=prefix, outputs=jnp.arange(8) == 7),
            jaxkv.make_batch(text, outputs=jnp.ones(8, bool)),
        ):
            (ubatch,) = jaxkv.init_batch(memory, batch).ubatches
            memory, out = small.forward(weights, jaxkv.apply(memory, ubatch), ubatch)
            logits.append(out)
        logits = jnp.concatenate([logits[0][7:8], logits[1][:-1]])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text).mean()

    optimizer = optax.adam(1e-2)
    value_and_grad = jax.jit(jax.value_and_grad(loss))
    state, losses = optimizer.init(prefix), []
    for _ in range(20):
        value, grad = value_and_grad(prefix, small.weights)
        chex.assert_tree_all_finite(grad)
        assert jnp.abs(grad).max() > 0
        updates, state = optimizer.update(grad, state)
        prefix = optax.apply_updates(prefix, updates)
        losses.append(float(value))
    assert losses[-1] < 0.6 * losses[0], losses
