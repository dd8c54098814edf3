"""Attention over a mask, against the plain formula in NumPy and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.ops.attention import attention, xla_cpu
from jaxkv.ops.attention.reference import reference as plain_reference
from jaxkv.ops.attention.softmax import Options

R, T, H, K, N, D, V = 2, 3, 4, 2, 7, 6, 5  # V: the size of a value, another than that of a key


def reference(q, k, v, mask, scale=None):
    """The formula, a token and a head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, tokens, heads, size = q.shape
    group = heads // k.shape[1]
    out = np.zeros((rows, tokens, heads, v.shape[-1]))
    for r, t, h in np.ndindex(rows, tokens, heads):
        seen = np.flatnonzero(mask[r, t])
        if len(seen):
            logits = k[r, h // group, seen] @ q[r, t, h] * (size**-0.5 if scale is None else scale)
            weights = np.exp(logits - logits.max())
            out[r, t, h] = weights @ v[r, h // group, seen] / weights.sum()
    return out


def arrays(seed=0, *, heads=H, groups=K, cells=N, dtype=np.float32):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(R, T, heads, D)).astype(dtype)
    k = rng.normal(size=(R, groups, cells, D)).astype(dtype)
    v = rng.normal(size=(R, groups, cells, V)).astype(dtype)
    mask = rng.random((R, T, cells)) < 0.6
    mask[..., 0] = True
    return q, k, v, mask


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_formula(heads, groups):
    q, k, v, mask = arrays(heads=heads, groups=groups)
    np.testing.assert_allclose(attention(q, k, v, mask), reference(q, k, v, mask), atol=2e-6)


def test_what_implementations_are_compared_with_is_the_formula():
    q, k, v, mask = arrays(11)
    mask[0, 1] = False
    got = plain_reference(q, k, v, mask, Options(scale=0.3))
    np.testing.assert_allclose(got, reference(q, k, v, mask, scale=0.3), atol=2e-6)


def test_scale():
    q, k, v, mask = arrays(1)
    out = attention(q, k, v, mask, scale=0.3)
    np.testing.assert_allclose(out, reference(q, k, v, mask, scale=0.3), atol=2e-6)


def test_logits_that_overflow_do_not_show_what_is_hidden():
    """Keys that are seen have the weight, even where each of their logits is -inf."""
    q, k, v, mask = arrays(3)
    mask[..., 1], v[..., 1, :] = False, 1e6
    k[..., 0, :], q[...] = -3e38, 3e38
    k[..., 1:, :] = 0.0
    mask[..., 2:] = False
    out = attention(q, k, v, mask)[:, :, 0]
    np.testing.assert_allclose(out, np.broadcast_to(v[:, None, 0, 0], out.shape), rtol=1e-6)


def test_large_logits():
    """Nothing overflows: only differences of logits matter."""
    q, k, v, mask = arrays(2)
    np.testing.assert_allclose(
        attention(q * 100, k, v, mask), reference(q * 100, k, v, mask), atol=1e-4
    )
    q = np.full_like(q, 1e4)
    k = np.full_like(k, 1e4)
    mean = (v * mask[:, 0, None, :, None]).sum(2) / mask[:, 0].sum(-1)[:, None, None]
    out = attention(q, k, v, np.repeat(mask[:, :1], T, axis=1))
    np.testing.assert_allclose(out[:, 0].reshape(R, K, H // K, V)[:, :, 0], mean, rtol=1e-5)


def test_half_precision_sums_in_float32():
    q, k, v, mask = arrays(3, cells=600, groups=1, heads=2)
    mask[:] = True
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q * 0, k, 1 + abs(v)))
    out = attention(q, k, v, mask)
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(v, np.float64).mean(2)[:, :, None]
    # One rounding of the result. Sums in bfloat16 would be off by tens of percent.
    np.testing.assert_allclose(
        np.asarray(out, np.float64), np.broadcast_to(exact, out.shape), rtol=5e-3
    )


def test_sums_of_many_weights_are_exact():
    """An odd number of cells is not cut into parts: added up by one product they are 2e-6 off.

    Weighted values are such a product: how exact they are depends on the processor.
    """
    cells, heads = 131071, 9
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, 2)).astype(np.float32) for n in (heads, cells, cells))
    mask = np.ones((1, 1, cells), bool)
    total = jax.jit(xla_cpu.by_mask)(q, k, v, mask, Options()).total[0, 0]
    logits = np.einsum("hd,nd->hn", q[0, 0], k[0, 0], dtype=np.float64) / np.sqrt(2)
    wanted = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(np.asarray(total, np.float64), wanted, rtol=5e-7)


def test_nothing_visible_gives_zeros():
    q, k, v, mask = arrays()
    mask[0, 1] = False
    out = attention(q, k, v, mask)
    np.testing.assert_array_equal(out[0, 1], 0.0)
    np.testing.assert_allclose(out, reference(q, k, v, mask), atol=2e-6)
    np.testing.assert_array_equal(attention(q, k * np.nan, v, np.zeros_like(mask)), 0.0)


# ------------------------------------------------------------------------- what is not a number


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cells", [N, 256, 517])
def test_hidden_keys_are_as_if_they_were_not_there(cells, value):
    """Whether cells are cut into parts or not; values are always finite."""
    q, k, v, mask = arrays(4, cells=cells)
    hidden = [2, 3, cells - 3, cells - 1]
    mask[..., hidden] = False
    clean = attention(q, k, v, mask)
    k[:, :, hidden], v[:, :, hidden] = value, 3e38
    np.testing.assert_array_equal(attention(q, k, v, mask), clean)


def test_a_key_that_is_no_number_shows_where_it_is_seen_and_nowhere_else():
    q, k, v, mask = arrays(5)
    mask[:, :, 4] = False
    mask[0, 1, 4] = True
    clean = np.asarray(attention(q, k, v, mask))
    k[0, 1, 4, 2] = np.nan  # heads 2 and 3 read it
    out = np.array(attention(q, k, v, mask))
    assert np.isnan(out[0, 1, 2:]).all()
    out[0, 1, 2:] = clean[0, 1, 2:]
    np.testing.assert_array_equal(out, clean)


# ------------------------------------------------------------------------------------- gradients


def loss(q, k, v, mask):
    out = attention(q, k, v, mask)
    return jnp.sum(jnp.sin(out) * jnp.arange(1.0, out.size + 1).reshape(out.shape) / out.size)


gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


def plain(q, k, v, mask):
    """The same loss in the plainest JAX, without grouped heads, for its gradient."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[1], axis=1) for x in (k, v))
    logits = jnp.einsum("rthd,rhnd->rhtn", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], logits, -1e30))
    out = jnp.einsum("rhtn,rhnd->rthd", weights, v)
    return jnp.sum(jnp.sin(out) * jnp.arange(1.0, out.size + 1).reshape(out.shape) / out.size)


def test_gradients_are_those_of_the_plain_formula():
    q, k, v, mask = arrays(7)
    wanted = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(q, k, v, mask)
    for one, other in zip(gradients(q, k, v, mask), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_gradients_are_finite_differences():
    q, k, v, mask = arrays(8)
    rng = np.random.default_rng(0)
    grads = gradients(q, k, v, mask)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    for i, (x, grad) in enumerate(zip((q, k, v), grads, strict=True)):
        along = rng.normal(size=x.shape)

        def at(step, i=i, along=along):
            moved = [q, k, v]
            moved[i] = moved[i] + step * along
            out = reference(*moved, mask)
            order = np.arange(1.0, out.size + 1).reshape(out.shape)
            return np.sum(np.sin(out) * order / out.size)

        difference = (at(1e-4) - at(-1e-4)) / 2e-4
        np.testing.assert_allclose(np.sum(grad * along), difference, rtol=1e-3)


def test_hidden_keys_and_values_get_no_gradient():
    q, k, v, mask = arrays(9)
    mask[:, :, [1, 5]] = False
    mask[1, 2] = False  # a token that sees nothing
    q_grad, k_grad, v_grad = gradients(q, k, v, mask)
    for grad in (q_grad, k_grad, v_grad):
        assert np.isfinite(grad).all()
    np.testing.assert_array_equal(k_grad[:, :, [1, 5]], 0.0)
    np.testing.assert_array_equal(v_grad[:, :, [1, 5]], 0.0)
    np.testing.assert_array_equal(q_grad[1, 2], 0.0)


def test_gradients_do_not_read_hidden_values():
    """What stands in a hidden value never matters, in the way back neither."""
    q, k, v, mask = arrays(10)
    mask[:, :, [1, 5]] = False
    clean = gradients(q, k, v, mask)
    v[:, :, [1, 5]] = np.nan
    for one, other in zip(gradients(q, k, v, mask), clean, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# ---------------------------------------------------------------------------------------- errors


def test_shapes_that_do_not_fit():
    q, k, v, mask = arrays()
    for bad in ((q[:, :, :3], k, v), (q, k[:, :, :4], v), (q, k[..., :4], v), (q, k[:, :1], v)):
        with pytest.raises(ValueError, match=r"wanted q \[R, T, H, D\]"):
            attention(*bad, mask)
    with pytest.raises(ValueError, match="wanted a mask"):
        attention(q, k, v, mask[:, :2])
