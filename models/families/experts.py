"""Mixture-of-experts layers."""

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
        """Select experts for tokens; return float32 factors and expert ids, `[n, chosen]` each."""
        ...


class SoftmaxRouter(nnx.Module):
    """Selector of the experts with the largest logits.

    The factors are a softmax of the logits of the selected experts if `normalised`, or else of all
    logits.
    """

    def __init__(
        self,
        width: int,
        count: int,
        chosen: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        *,
        normalised: bool = True,
    ):
        self.weight = matrix(rngs, (count, width), dtype)
        self.chosen, self.normalised = chosen, normalised

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select experts for tokens `[n, width]`; return factors and ids, `[n, chosen]` each."""
        logits = linear(tokens, self.weight[...]).astype(jnp.float32)
        best, chosen = jax.lax.top_k(logits, self.chosen)
        shared = best if self.normalised else logits
        return jnp.exp(best - jax.nn.logsumexp(shared, axis=-1, keepdims=True)), chosen


class Experts(nnx.Module):
    """Feed-forward parts (experts), of which a token uses a few."""

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        router: Router,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.width, self.count, self.router = width, count, router
        inside = partial(Split, parts=hidden, of="numbers inside an expert", with_cells=True)
        up = partial(_matrices, rngs, (count, width, hidden), dtype)
        # Gate and up projection are separate products: `ragged_dot` takes one matrix for each
        # expert, and a split of a joint matrix would separate gates from their products.
        self.gate, self.up = up(split=inside(axis=2)), up(split=inside(axis=2))
        self.down = _matrices(rngs, (count, hidden, width), dtype, split=inside(axis=1))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the sum of the outputs of each token's experts, multiplied by factors."""
        tokens = x.reshape(-1, self.width)
        share, chosen = self.router(tokens)
        share = share.astype(x.dtype)
        if chosen.size <= self.count:  # with few tokens, fewer weights are read
            gate, up = (
                jnp.einsum("nd,nkdh->nkh", tokens, weight[...][chosen])
                for weight in (self.gate, self.up)
            )
            out = jnp.einsum(
                "nkh,nkhd,nk->nd", jax.nn.silu(gate) * up, self.down[...][chosen], share
            )
            return out.reshape(x.shape)
        # With many tokens, each expert has one product with all of its tokens, which are sorted.
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=self.count)
        sent = tokens[order // chosen.shape[1]]
        gate, up = (jax.lax.ragged_dot(sent, weight[...], sizes) for weight in (self.gate, self.up))
        out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.down[...], sizes)
        out = out * share.reshape(-1)[order][:, None]
        return jnp.zeros_like(tokens).at[order // chosen.shape[1]].add(out).reshape(x.shape)


def _matrices(
    rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, *, split: Split
) -> nnx.Param:
    # `ragged_dot` requires `[count, rows, columns]`, from rows to columns.
    values = jax.random.normal(rngs.params(), shape, dtype) * shape[1] ** -0.5
    return nnx.Param(values, split=split)
