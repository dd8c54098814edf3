"""Experts: feed-forward parts, a few of which each token goes through."""

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.meshes import Split


class Router(Protocol):
    """Says where tokens go: a module of a family, with weights of its own."""

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose for tokens `[n, width]`.

        Returns:
          How much each of the chosen experts counts, `[n, chosen]` float32, and which these are,
          `[n, chosen]` int32.
        """
        ...


class Experts(nnx.Module):
    """Feed-forward parts, a few of which each token goes through.

    width: numbers of a token between the layers.
    hidden: numbers of a token inside an expert.
    count: how many experts there are.
    router: chooses among them.
    """

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
        # Two products, since `ragged_dot` takes one matrix for each expert, which a mesh could not
        # split without cutting through gates and what goes up.
        self.gate, self.up = up(split=inside(axis=2)), up(split=inside(axis=2))
        self.down = _matrices(rngs, (count, hidden, width), dtype, split=inside(axis=1))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Send each token of `x`, `[R, T, width]`, through its experts, and add up their shares."""
        tokens = x.reshape(-1, self.width)
        share, chosen = self.router(tokens)
        share = share.astype(x.dtype)
        if chosen.size <= self.count:  # few tokens: reading the chosen weights alone is less work
            gate, up = (
                jnp.einsum("nd,nkdh->nkh", tokens, weight[...][chosen])
                for weight in (self.gate, self.up)
            )
            out = jnp.einsum(
                "nkh,nkhd,nk->nd", jax.nn.silu(gate) * up, self.down[...][chosen], share
            )
            return out.reshape(x.shape)
        # Many: each expert has one product with all of its tokens, which lie side by side.
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
    # `[count, rows, columns]`: from rows to columns, as `ragged_dot` wants them.
    values = jax.random.normal(rngs.params(), shape, dtype) * shape[1] ** -0.5
    return nnx.Param(values, split=split)
