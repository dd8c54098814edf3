"""Layers that families share: the vocabulary, norms, products, attention, gated feed-forward parts.

What is the same in every family is here; how a family puts it together is in its own file.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv import Ubatch
from jaxkv.rope import Rope
from models.families.linear import linear, matrix
from models.meshes import WHOLE, Split


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
    """A product with a matrix, and a bias if there is one.

    inputs: numbers that it takes.
    outputs: numbers that it makes, in one dimension or several.
    bias: whether there is one.
    split: how the matrix, `[outputs, inputs]`, is split on a mesh; the bias goes with its outputs.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | tuple[int, ...],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        split: Split = WHOLE,
    ):
        shape = outputs if isinstance(outputs, tuple) else (outputs,)
        self.weight = matrix(rngs, (*shape, inputs), dtype, split=split)
        self.biased = bias
        if bias:
            bias_split = split if split.axis < len(shape) else WHOLE
            self.bias = nnx.Param(jnp.zeros(shape, dtype), split=bias_split)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map the last dimension, from `inputs` numbers to `outputs`."""
        y = linear(x, self.weight[...])
        if not self.biased:
            return y
        bias = self.bias[...]
        return y + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


class Vocabulary(nnx.Module):
    """The embedding and the head: one matrix if they are tied."""

    def __init__(self, size: int, width: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, tied: bool):
        self.tied = tied
        make = partial(matrix, rngs, (size, width), dtype)
        split = Split(axis=0, parts=size, of="tokens of the vocabulary", with_cells=True)
        self.head = make(split=split)
        if not tied:
            self.embedding = make(split=split)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what stands for them, `[R, T, width]`; NaN for no token."""
        return jnp.take((self.head if self.tied else self.embedding)[...], tokens, axis=0)

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
    """Attention over the cache, between its two projections.

    Their weights lie by key/value head, so that a device of a mesh can have some of these and send
    nothing but its share of the sum: `qkv` is `[K, (G + 2) * D, width]`, for each key/value head
    the G = H / K query heads that look at it, its key and its value, and `output`
    `[width, H * D]` with the query heads in the same order.

    config: the sizes.
    layer: the number that the cache knows this layer by.
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
        size = (c.heads // c.kv_heads + 2) * c.head_dim
        by_head = partial(Split, parts=c.kv_heads, of="key/value heads")
        self.qkv = Linear(
            c.width, (c.kv_heads, size), dtype, rngs, bias=bias, split=by_head(axis=0)
        )
        self.output = Linear(
            c.heads * c.head_dim, c.width, dtype, rngs, bias=output_bias, split=by_head(axis=1)
        )
        self.norms = norm is not None
        if norm is not None:
            self.q_norm, self.k_norm = norm(), norm()

    def __call__(
        self, cache: Any, ubatch: Ubatch, x: jax.Array, added: Any = None
    ) -> tuple[Any, jax.Array]:
        """Mix `x`, `[R, T, width]`, with what came before; returns the cache and the outcome.

        Args:
          cache: which the ubatch has been applied to.
          ubatch: the tokens.
          x: what there is of them.
          added: to logits, a bias as `jaxkv.attend` takes it; None for nothing.
        """
        c = self.config
        group, token = c.heads // c.kv_heads, x.shape[:2]
        qkv = self.qkv(x).reshape(*token, c.kv_heads, group + 2, c.head_dim)
        qk, v = jnp.split(qkv, [group + 1], axis=3)
        if self.norms:
            q, k = jnp.split(qk, [group], axis=3)
            qk = jnp.concatenate([self.q_norm(q), self.k_norm(k)], axis=3)
        turned = qk.reshape(*token, -1, c.head_dim)
        if self.rope:
            turned = self.rope.rotate(turned, ubatch.positions)
        turned = turned.reshape(qk.shape)
        q, k = jnp.split(turned, [group], axis=3)
        cache, out = jaxkv.attend(
            cache,
            self.layer,
            ubatch,
            *(part.reshape(*token, -1, c.head_dim) for part in (q, k, v)),
            scale=self.scale,
            softcap=self.softcap,
            bias=added,
            implementation=c.implementation,
        )
        return cache, self.output(out.reshape(*token, -1))


class GatedFeed(nnx.Module):
    """A feed-forward part: what goes up is multiplied by a gate, and goes down again.

    The gate and what goes up are one product, `[2, hidden, width]`.

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
        inside = partial(Split, axis=1, parts=hidden, of="numbers inside", with_cells=True)
        self.gate_up = Linear(width, (2, hidden), dtype, rngs, bias=bias, split=inside())
        self.down = Linear(hidden, width, dtype, rngs, bias=bias, split=inside())

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `x`, `[R, T, width]`, token by token."""
        gate, up = jnp.unstack(self.gate_up(x), axis=-2)
        return self.down(self.activation(gate) * up)


def gelu(x: jax.Array) -> jax.Array:
    """The approximate GELU, by tanh, that Gemma's gates are trained with."""
    return jax.nn.gelu(x, approximate=True)
