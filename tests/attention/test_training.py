"""Gradients flow through the cache: what is written in one ubatch is learnt from a later one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxkv


@pytest.mark.core
def test_gradients_reach_keys_and_values_of_an_earlier_ubatch():
    """Through writes and attention, equal to differentiating plain attention over all keys."""
    k, v, q = (jax.random.normal(jax.random.key(i), (1, 6, 2, 4)) for i in range(3))

    def through_the_cache(k, v):
        memory = jaxkv.make_kv_cache(layers=1, cells=16, kv_heads=2, head_dim=4)
        for half in (slice(0, 4), slice(4, 6)):
            tokens = jnp.zeros(half.stop - half.start, jnp.int32)
            batch = jaxkv.make_batch(tokens)
            plan = jaxkv.init_batch(memory, batch)
            memory = jaxkv.apply(memory, plan)
            (ubatch,) = plan.ubatches
            memory, out = jaxkv.attend(memory, 0, ubatch, q[:, half], k[:, half], v[:, half])
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
def test_what_no_token_sees_does_not_reach_a_gradient(implementation):
    """Not even where it is no number: keys and values that were written, and forgotten."""
    k, v, q = (jax.random.normal(jax.random.key(i), (1, 2, 2, 4)) for i in range(3))

    def learn(q, k, v, rest):
        memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=2, head_dim=4)
        plan = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2]))
        (ubatch,) = plan.ubatches
        memory, _ = jaxkv.attend(jaxkv.apply(memory, plan), 0, ubatch, q, k + rest, v + rest)
        memory = jaxkv.clear(memory)
        plan = jaxkv.init_batch(memory, jaxkv.make_batch([3]))
        (ubatch,) = plan.ubatches
        now = (x[:, :1] for x in (q, k, v))
        memory = jaxkv.apply(memory, plan)
        _, out = jaxkv.attend(memory, 0, ubatch, *now, implementation=implementation)
        return jnp.sum(out**2)

    derive = jax.jit(jax.grad(learn, argnums=(0, 1, 2)))
    for a, b in zip(derive(q, k, v, jnp.nan), derive(q, k, v, 0.0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(b).max() > 1e-3


@pytest.mark.core
@pytest.mark.parametrize("cells", [8, 4096], ids=["whole", "by tiles"])
def test_a_step_may_be_jitted_scanned_or_computed_again_inside_of_grad(cells):
    """The step is traced first then, and derived when that trace has ended."""
    k, v, q = (jax.random.normal(jax.random.key(i), (1, 4, 2, 4)) for i in range(3))

    def learn(q, k, v):
        memory = jaxkv.make_kv_cache(layers=1, cells=cells, kv_heads=2, head_dim=4)
        plan = jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3, 4]))
        memory, out = jaxkv.attend(jaxkv.apply(memory, plan), 0, plan.ubatches[0], q, k, v)
        return jnp.sum(out**2)

    def scanned(*arrays):
        _, losses = jax.lax.scan(lambda _, x: (_, learn(*arrays) * x), None, jnp.arange(2.0))
        return jnp.sum(losses)

    wanted = jax.jit(jax.grad(learn, argnums=(0, 1, 2)))(q, k, v)
    assert all((jnp.abs(x) > 1e-3).any() for x in wanted)
    for staged in (jax.jit(learn), jax.checkpoint(learn), scanned):
        for a, b in zip(jax.grad(staged, argnums=(0, 1, 2))(q, k, v), wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.nightly
def test_a_soft_prefix_trained_through_the_cache_lowers_the_loss(small):
    """Eight embeddings before a text, the only thing that is trained, make it likelier.

    To two layers of the model, that is: through all thirty it compiles for a minute.
    """
    text = jnp.asarray(small.tokenizer.encode("The zebra plays chess with a purple submarine."))
    text = text[:8]
    prefix = small.weights["vocabulary"]["head"][jnp.arange(100, 108)]

    def loss(prefix, weights):
        memory = small.make_memory(cells=32)
        parts = (
            jaxkv.make_batch(embeddings=prefix, outputs=jnp.arange(8) == 7),
            jaxkv.make_batch(text, outputs=jnp.ones(8, bool)),
        )
        logits = []
        for batch in parts:
            plan = jaxkv.init_batch(memory, batch)
            (ubatch,) = plan.ubatches
            memory = jaxkv.apply(memory, ubatch)
            memory, out = small.forward(weights, memory, ubatch)
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
