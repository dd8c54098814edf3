"""Mixture-of-experts layers."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.families.linear import linear, matrix
from models.meshes import Split


class Router(Protocol):
    """Module of a model family that selects experts."""

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select k experts for each of n tokens; return the factors and the ids, `[n, k]` each.

        The factors are float32.
        """
        ...


class SoftmaxRouter(nnx.Module):
    """Selector of the experts with the largest logits.

    The factors are results of a softmax. If `normalised`, the softmax is over the logits of the
    selected experts; otherwise it is over all logits.
    """

    def __init__(
        self,
        width: int,
        count: int,
        experts_per_token: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        bias: bool = False,
        normalised: bool = True,
    ):
        self.weight = matrix(rngs, (count, width), dtype)
        self.experts_per_token, self.biased, self.normalised = experts_per_token, bias, normalised
        if bias:
            self.bias = nnx.Param(jnp.zeros(count, dtype))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select k experts for each token `[n, width]`; return factors and ids, `[n, k]` each."""
        logits = linear(tokens, self.weight[...]).astype(jnp.float32)
        if self.biased:
            logits = logits + self.bias[...][None]
        best, expert_ids = jax.lax.top_k(logits, self.experts_per_token)
        shared = best if self.normalised else logits
        return jnp.exp(best - jax.nn.logsumexp(shared, axis=-1, keepdims=True)), expert_ids


class SigmoidRouter(nnx.Module):
    """Selector of the experts with the largest logits; a factor is the sigmoid of the logit."""

    def __init__(
        self, width: int, count: int, experts_per_token: int, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.weight, self.experts_per_token = matrix(rngs, (count, width), dtype), experts_per_token

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select k experts for each token `[n, width]`; return factors and ids, `[n, k]` each."""
        logits = linear(tokens, self.weight[...]).astype(jnp.float32)
        best, expert_ids = jax.lax.top_k(logits, self.experts_per_token)
        return jax.nn.sigmoid(best), expert_ids


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return `silu(gate) * up`, the inputs of the down projection."""
    return jax.nn.silu(gate) * up


class Experts(nnx.Module):
    """Feed-forward parts (experts), of which a token uses a few.

    activation: function of gates and up projections that returns the inputs of the down projection.
    gated: whether there are gates; otherwise, `activation` is a function of up projections alone.
    bias: whether the three projections have biases.
    scales_inputs: whether a factor multiplies the input of its expert, not the output.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        router: Router,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        activation: Callable[..., jax.Array] = swiglu,
        gated: bool = True,
        bias: bool = False,
        scales_inputs: bool = False,
    ):
        self.width, self.count, self.router = width, count, router
        self.activation, self.gated, self.biased = activation, gated, bias
        self.scales_inputs = scales_inputs
        inside = partial(Split, parts=hidden, of="numbers inside an expert", with_cells=True)
        # `ragged_dot` requires `[count, rows, columns]`, from rows to columns.
        matrices = partial(matrix, rngs, dtype=dtype, inputs=1)
        up = partial(matrices, (count, width, hidden))
        # Gate and up projection are separate products: `ragged_dot` takes one matrix for each
        # expert, and a split of a joint matrix would separate gates from their products.
        if gated:
            self.gate = up(split=inside(axis=2))
        self.up = up(split=inside(axis=2))
        self.down = matrices((count, hidden, width), split=inside(axis=1))
        if bias:
            zeros = jnp.zeros((count, hidden), dtype)
            if gated:
                self.gate_bias = nnx.Param(zeros, split=inside(axis=1))
            self.up_bias = nnx.Param(zeros, split=inside(axis=1))
            self.down_bias = nnx.Param(jnp.zeros((count, width), dtype))

    def __call__(self, x: jax.Array, routed: jax.Array | None = None) -> jax.Array:
        """Return, for each token, the sum of expert outputs, each multiplied by its factor.

        The argument `routed` has the vectors by which experts are selected; None if these are `x`.
        """
        tokens = x.reshape(-1, self.width)
        share, expert_ids = self.router(
            tokens if routed is None else routed.reshape(-1, routed.shape[-1])
        )
        share = share.astype(x.dtype)
        few = expert_ids.size <= self.count  # with few tokens, fewer weights are read
        out = (self._by_token if few else self._by_expert)(tokens, share, expert_ids)
        if self.biased:
            out = out + jnp.einsum("nk,nkd->nd", share, self.down_bias[...][expert_ids])
        return out.reshape(x.shape)

    @property
    def _ups(self) -> tuple[nnx.Param, ...]:
        return (self.gate, self.up) if self.gated else (self.up,)

    def _by_token(self, tokens: jax.Array, share: jax.Array, expert_ids: jax.Array) -> jax.Array:
        """Multiply each token by the matrices of its experts."""
        ups = [jnp.einsum("nd,nkdh->nkh", tokens, weight[...][expert_ids]) for weight in self._ups]
        inner, share = self._inner(ups, share, expert_ids)
        return jnp.einsum("nkh,nkhd,nk->nd", inner, self.down[...][expert_ids], share)

    def _by_expert(self, tokens: jax.Array, share: jax.Array, expert_ids: jax.Array) -> jax.Array:
        """Sort tokens by expert, then multiply all tokens of an expert by its matrices."""
        order = jnp.argsort(expert_ids.reshape(-1))
        sizes = jnp.bincount(expert_ids.reshape(-1), length=self.count)
        sent = tokens[order // expert_ids.shape[1]]
        ups = [jax.lax.ragged_dot(sent, weight[...], sizes) for weight in self._ups]
        ids = expert_ids.reshape(-1)[order]
        inner, share = self._inner(ups, share.reshape(-1)[order], ids)
        out = jax.lax.ragged_dot(inner, self.down[...], sizes) * share[:, None]
        return jnp.zeros_like(tokens).at[order // expert_ids.shape[1]].add(out)

    def _inner(
        self, ups: list[jax.Array], share: jax.Array, experts: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the inputs of the down projection, and the factors of its outputs.

        The arguments `share` and `experts` have the factor and the expert id of each vector.
        """
        if self.scales_inputs:  # a product with a scaled input is the scaled product
            ups, share = [x * share[..., None] for x in ups], jnp.ones_like(share)
        if self.biased:
            biases = (self.gate_bias, self.up_bias) if self.gated else (self.up_bias,)
            ups = [x + bias[...][experts] for x, bias in zip(ups, biases, strict=True)]
        return self.activation(*ups), share
