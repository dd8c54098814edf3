"""Layers that several families share: vocabulary, norm, linear, attention, feed-forward."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from models.families.linear import linear, matrix
from models.meshes import WHOLE, Split


class RMSNorm(nnx.Module):
    """RMS normalisation in float32.

    groups: number of parts of a vector that are normalised separately.
    less_one: whether the stored weight is the factor minus 1, as in Gemma.
    weighted: whether there is a weight. If not, all factors are 1.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: jnp.dtype,
        *,
        groups: int = 1,
        less_one: bool = False,
        weighted: bool = True,
    ):
        if weighted:
            self.weight = nnx.Param(jnp.full(size, 0 if less_one else 1, dtype))
        self.size, self.eps, self.groups, self.less_one = size, eps, groups, less_one
        self.weighted, self.dtype = weighted, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dimension of `x`; the result has the dtype of the weight."""
        weight = self.weight[...] if self.weighted else jnp.ones(self.size, self.dtype)
        return _rms_norm(x, weight, eps=self.eps, groups=self.groups, less_one=self.less_one)


@partial(jax.jit, static_argnames=("eps", "groups", "less_one"))
def _rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, groups: int, less_one: bool
) -> jax.Array:
    """Normalise the last dimension of `x`, as described for `RMSNorm`.

    Due to `jax.jit`, a program of many layers contains the code of this function once for each
    shape, not once for each layer.
    """
    y = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    factor = weight.astype(jnp.float32) + less_one
    y = y.reshape(x.shape) * factor.reshape((1,) * (x.ndim - 1) + (-1,))
    return y.astype(weight.dtype)


class LayerNorm(nnx.Module):
    """Normalisation to mean 0 and variance 1 in float32, then a factor and a bias."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype):
        self.weight, self.bias = nnx.Param(jnp.ones(size, dtype)), nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise the last dimension of `x`; the result has the dtype of the weight."""
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight, bias = (
            p[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
            for p in (self.weight, self.bias)
        )
        return (y * weight + bias).astype(self.weight.dtype)


class Linear(nnx.Module):
    """A linear map to one or several dimensions, with an optional bias.

    The argument `split` is for the matrix, `[outputs, inputs]`; the bias is split like the outputs.
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
        """Map the last dimension of `x`, of size `inputs`, to the size or shape `outputs`."""
        y = linear(x, self.weight[...])
        if not self.biased:
            return y
        bias = self.bias[...]
        return y + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


class Vocabulary(nnx.Module):
    """The embedding and the head of a model; both use one matrix if `tied`."""

    def __init__(self, size: int, width: int, dtype: jnp.dtype, rngs: nnx.Rngs, *, tied: bool):
        self.tied = tied
        make = partial(matrix, rngs, (size, width), dtype)
        split = Split(axis=0, parts=size, of="tokens of the vocabulary", with_cells=True)
        self.head = make(split=split)
        if not tied:
            self.embedding = make(split=split)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as `[R, T, width]`; NaN for ids of V or more."""
        return jnp.take((self.head if self.tied else self.embedding)[...], tokens, axis=0)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map vectors `[O, width]` to logits `[O, V]`, float32."""
        return linear(x, self.head[...]).astype(jnp.float32)


class Heads(Protocol):
    """Config fields that `Attention` reads, see `models.families.language_model`."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    implementation: jaxkv.ops.attention.Implementation | None
    return_mass: bool


class Attention(nnx.Module):
    """Attention over the cache, with projections of queries, keys, values and outputs.

    Weights are grouped by key/value head, so that a mesh can split them. The weights `qkv` are
    `[K, (G + 2) * D, width]`, with G = H / K. For each key/value head, they have D rows for each of
    its G query heads, then D rows for the key, then D rows for the value. The weights of the output
    projection are `[width, H * D]`, with query heads in the order of `qkv`.

    layer: layer number in the cache.
    writes: whether the layer writes keys and values. If not, it attends to those that an earlier
      layer wrote under the same layer number, and `qkv` has rows for query heads alone.
    keys_are_values: whether the projections of keys are also those of values, before norms and
      rotation. If so, `qkv` has no rows for values.
    rope: rotary embedding of queries and keys; None for no rotation.
    axes: for a rope with positions on several axes, the axis of each pair, see `Rope.rotate`. The
      positions are those of the step plus `step.extra["rope_offsets"]`, `[R, T, axes]`, if given.
    bias: whether `qkv` has biases.
    output_bias: whether `output` has a bias; None for the value of `bias`.
    norm: function that makes a norm with an attribute `size`, given the size of a vector. The
      function is called once for queries and once for keys. None for no norms.
    joint_norms: whether all query heads of a token are normalised as one vector, and all key heads
      of the token as another.
    value_norm: norm of each value; None for no norm.
    scale: factor of query-key products; None for 1 / sqrt(D).
    gated: whether the output of each query head is multiplied by the sigmoid of a gate of size D.
      If so, `qkv` is `[K, (2 * G + 2) * D, width]`: the rows for G gates follow the rows for the
      value.
    sinks: whether each query head has a sink: one more logit in the softmax, to which no value
      belongs.
    query_factor: function from positions `[R, T]` to factors of queries; None for no factors.
    """

    def __init__(
        self,
        config: Heads,
        layer: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        rope: Rope | None,
        axes: tuple[int, ...] | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        norm: Callable[[int], Any] | None = None,
        joint_norms: bool = False,
        value_norm: RMSNorm | None = None,
        scale: float | None = None,
        gated: bool = False,
        sinks: bool = False,
        query_factor: Callable[[jax.Array], jax.Array] | None = None,
        writes: bool = True,
        keys_are_values: bool = False,
    ):
        c = self.config = config
        self.layer, self.rope, self.axes, self.scale = layer, rope, axes, scale
        self.gated, self.query_factor = gated, query_factor
        self.writes, self.value_rows = writes, writes and not keys_are_values
        # Queries, keys and values are one product: with few tokens most time is spent on reading
        # weights, and fewer, larger products read them faster.
        group = c.heads // c.kv_heads
        size = (group + writes + self.value_rows + group * gated) * c.head_dim
        by_head = partial(Split, parts=c.kv_heads, of="key/value heads")
        self.qkv = Linear(
            c.width, (c.kv_heads, size), dtype, rngs, bias=bias, split=by_head(axis=0)
        )
        output_bias = bias if output_bias is None else output_bias
        self.output = Linear(
            c.heads * c.head_dim, c.width, dtype, rngs, bias=output_bias, split=by_head(axis=1)
        )
        self.norms = norm is not None
        if norm is not None:
            self.q_norm = norm(c.head_dim * (c.heads if joint_norms else 1))
            if writes:
                self.k_norm = norm(c.head_dim * (c.kv_heads if joint_norms else 1))
        self.v_norm = value_norm if writes else None
        self.has_sinks = sinks
        if sinks:
            self.sinks = nnx.Param(jnp.zeros(c.heads, dtype), split=by_head(axis=0))

    def __call__(
        self, step: jaxkv.Step, x: jax.Array, added: Any = None
    ) -> tuple[jaxkv.Step, jax.Array]:
        """Attend from `x`, `[R, T, width]`, to the cache; return the step and the output.

        The argument `added` is a bias of attention logits, see `jaxkv.attend`; None for no bias.
        """
        c, writes = self.config, self.writes
        group, token = c.heads // c.kv_heads, x.shape[:2]
        qkv = self.qkv(x).reshape(*token, c.kv_heads, -1, c.head_dim)
        ends = [group + writes, group + writes + self.value_rows]
        qk, v, gate = jnp.split(qkv, ends, axis=3)
        if writes and not self.value_rows:
            v = qk[:, :, :, group:]
        if self.norms:
            norms = (self.q_norm, self.k_norm) if writes else (self.q_norm,)
            pairs = zip(norms, jnp.split(qk, [group] if writes else [], axis=3), strict=True)
            qk = jnp.concatenate(
                [norm(y.reshape(*token, -1, norm.size)).reshape(y.shape) for norm, y in pairs],
                axis=3,
            )
        if self.v_norm is not None:
            v = self.v_norm(v)
        turned = qk.reshape(*token, -1, c.head_dim)
        if self.rope and self.axes and "rope_offsets" in (step.extra or {}):
            positions = step.positions[..., None] + step.extra["rope_offsets"]
            turned = self.rope.rotate(turned, positions, self.axes)
        elif self.rope:
            turned = self.rope.rotate(turned, step.positions)
        turned = turned.reshape(qk.shape)
        q, k = jnp.split(turned, [group], axis=3)
        if self.query_factor:
            q = q * self.query_factor(step.positions).astype(q.dtype)[..., None, None, None]
        parts = [part.reshape(*token, -1, c.head_dim) for part in (q, k, v)]
        step, out, *mass = jaxkv.attend(
            step,
            self.layer,
            *(parts if writes else parts[:1]),
            scale=self.scale,
            sinks=self.sinks[...] if self.has_sinks else None,
            bias=added,
            implementation=c.implementation,
            return_mass=c.return_mass,
        )
        store_mass(self, step, mass)
        out = out.reshape(*token, -1)
        if self.gated:
            out = out * jax.nn.sigmoid(gate.reshape(out.shape))
        return step, self.output(out)


def store_mass(layer: nnx.Module, step: jaxkv.Step, mass: list[jax.Array]) -> None:
    """Store the attention mass of a layer, if there is one, for `functional` of `models.model`."""
    if mass:
        layer.mass = nnx.Intermediate(step.sum_by_stream(*mass))


class Feed(nnx.Module):
    """A feed-forward part.

    gated: whether the activation of a gate is multiplied by the up projection. If so, both are one
      matrix product with weights `[2, hidden, width]`.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        gated: bool = True,
        bias: bool = False,
    ):
        self.activation, self.gated = activation, gated
        inside = partial(Split, axis=1, parts=hidden, of="numbers inside", with_cells=True)
        if gated:
            self.gate_up = Linear(width, (2, hidden), dtype, rngs, bias=bias, split=inside())
        else:
            self.up = Linear(width, hidden, dtype, rngs, bias=bias, split=inside(axis=0))
        self.down = Linear(hidden, width, dtype, rngs, bias=bias, split=inside())

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map each token's vector in `x`, `[R, T, width]`, to a vector of the same size."""
        if not self.gated:
            return self.down(self.activation(self.up(x)))
        gate, up = jnp.unstack(self.gate_up(x), axis=-2)
        return self.down(self.activation(gate) * up)


def relu2(x: jax.Array) -> jax.Array:
    """Return the square of the positive part of each number, as in Nemotron-H."""
    return jnp.square(jax.nn.relu(x))


def gelu(x: jax.Array) -> jax.Array:
    """Return the tanh approximation of GELU, as in Gemma and T5."""
    return jax.nn.gelu(x, approximate=True)
