"""Layers that families share: the vocabulary, norms, products, attention, gated feed-forward parts.

What is the same in every family is here; how a family puts it together is in its own file.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv import Ubatch
from jaxkv.rope import Rope
from models.families.linear import linear, matrix


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, in float32.

    size: numbers that are normalised.
    eps: what keeps it from dividing by zero.
    groups: parts with a mean of their own.
    less_one: the weight is stored less 1, as Gemma's are.
    """

    def __init__(
        self, size: int, eps: float, dtype: jnp.dtype, *, groups: int = 1, less_one: bool = False
    ):
        self.weight = nnx.Param(jnp.full(size, 0 if less_one else 1, dtype))
        self.eps, self.groups, self.less_one = eps, groups, less_one

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dimension; returns the dtype of the weight."""
        y = x.astype(jnp.float32).reshape(*x.shape[:-1], self.groups, -1)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(jnp.float32) + self.less_one
        y = y.reshape(x.shape) * weight.reshape((1,) * (x.ndim - 1) + (-1,))
        return y.astype(self.weight[...].dtype)


class Linear(nnx.Module):
    """A product with a matrix, and a bias if there is one."""

    def __init__(
        self, inputs: int, outputs: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, bias: bool = False
    ):
        self.weight = matrix(rngs, outputs, inputs, dtype)
        self.biased = bias
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map the last dimension, from `inputs` numbers to `outputs`."""
        y = linear(x, self.weight[...])
        return y + self.bias[...].reshape((1,) * (x.ndim - 1) + (-1,)) if self.biased else y


class Vocabulary(nnx.Module):
    """The embedding and the head: one matrix if they are tied."""

    def __init__(self, size: int, width: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, tied: bool):
        self.tied = tied
        self.head = matrix(rngs, size, width, dtype)
        if not tied:
            self.embedding = matrix(rngs, size, width, dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what stands for them, `[R, T, width]`."""
        return (self.head if self.tied else self.embedding)[...][tokens]

    def logits(self, x: jax.Array) -> jax.Array:
        """Turn what the last layer makes of O tokens, `[O, width]`, into logits `[O, V]`."""
        return linear(x, self.head[...]).astype(jnp.float32)


class Heads(Protocol):
    """The sizes that `Attention` takes from the config of a family.

    width: numbers of a token between the layers.
    heads: H, query heads.
    kv_heads: K, key/value heads.
    head_dim: D, numbers of a head.
    implementation: how attention is computed, see `jaxkv.attend`; None leaves it to jaxkv.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    implementation: jaxkv.ops.attention.Implementation | None


class Attention(nnx.Module):
    """Attention over the memory, between its two projections.

    config: the sizes.
    layer: the number that the memory knows this layer by.
    rope: how queries and keys turn with position, None where they do not.
    bias: whether queries, keys and values have biases.
    output_bias: whether what comes out has one.
    norm: makes the norm of queries and that of keys, head by head; None for neither.
    scale: what products of queries and keys are multiplied by, None for 1 / sqrt(D).
    softcap: what the logits of attention stay below, None for no limit.
    """

    def __init__(
        self,
        config: Heads,
        layer: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        rope: Rope | None,
        bias: bool = False,
        output_bias: bool = False,
        norm: Callable[[], RMSNorm] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ):
        c = self.config = config
        self.layer, self.rope, self.scale, self.softcap = layer, rope, scale, softcap
        # Queries, keys and values are one product: with few tokens the time goes into reading
        # weights, and fewer, larger products read them faster.
        size = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.qkv = Linear(c.width, size, dtype, rngs, bias=bias)
        self.output = Linear(c.heads * c.head_dim, c.width, dtype, rngs, bias=output_bias)
        self.norms = norm is not None
        if norm is not None:
            self.q_norm, self.k_norm = norm(), norm()

    def __call__(self, memory: Any, ubatch: Ubatch, x: jax.Array) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the memory and the outcome."""
        c = self.config
        qkv = self.qkv(x).reshape(*x.shape[:2], c.heads + 2 * c.kv_heads, c.head_dim)
        qk, v = jnp.split(qkv, [c.heads + c.kv_heads], axis=2)
        if self.norms:
            q, k = jnp.split(qk, [c.heads], axis=2)
            qk = jnp.concatenate([self.q_norm(q), self.k_norm(k)], axis=2)
        q, k = jnp.split(jaxkv.rotate(qk, ubatch.positions, self.rope), [c.heads], axis=2)
        memory, out = jaxkv.attend(
            memory,
            self.layer,
            ubatch,
            q,
            k,
            v,
            scale=self.scale,
            softcap=self.softcap,
            implementation=c.implementation,
        )
        return memory, self.output(out.reshape(*x.shape[:2], -1))


class GatedFeed(nnx.Module):
    """A feed-forward part: what goes up is multiplied by a gate, and goes down again.

    width: numbers of a token between the layers.
    hidden: numbers of a token inside.
    activation: of the gate.
    bias: whether its products have biases.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
    ):
        self.activation = activation
        self.gate_up = Linear(width, 2 * hidden, dtype, rngs, bias=bias)
        self.down = Linear(hidden, width, dtype, rngs, bias=bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `x`, `[R, T, width]`, token by token."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.activation(gate) * up)


def gelu(x: jax.Array) -> jax.Array:
    """The approximate GELU, by tanh, that Gemma's gates are trained with."""
    return jax.nn.gelu(x, approximate=True)
