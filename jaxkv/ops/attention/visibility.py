"""Attention mask, computed from the positions and owners of cells, and additive bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.ops.attention.bias import BiasOfLists, PositionBias
from jaxkv.ops.storage.layer_stack import gather_streams
from jaxkv.window import Window, can_see, first_seen, last_seen

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

Tree = TypeVar("Tree")


@pytree_dataclass
class Visibility:
    """Inputs of the mask: the cells of S streams, and P lists of T tokens.

    A token attends to those cells of the token's sequence whose positions are allowed by `window`,
    `causal` and `visible_until`.

    owners: For each cell, a bit mask of the sequences that own the cell.
    word: Index of the word (axis 1 of `owners`) that contains the bit of each token's sequence.
    bit: Word in which the bit of the token's sequence is set; 0 for padding, which attends to no
      cell.
    causal: False if tokens also attend to later positions. Static.
    all_streams: True if P is S and list p attends to stream p, for all p. Static.
    visible_until: Last position that each token attends to; `causal` is then ignored.
    bias: Bias of the logits, `[P, T, H or 1, N]` or a function; None if there is no bias.
    tile: Number of cells of a tile of `jaxkv.kv.tiles`; None if streams have no tiles. Static.
    """

    position: Int32[Array, "S N"]
    owners: UInt32[Array, "S W N"]
    streams: Int32[Array, " P"]
    at: Int32[Array, "P T"]
    word: Int32[Array, "P T"]
    bit: UInt32[Array, "P T"]
    window: Window | None = static_field()
    causal: bool = static_field()
    all_streams: bool = static_field()
    visible_until: Int32[Array, "P T"] | None = None
    bias: BiasOfLists | None = None
    tile: int | None = static_field(default=None)

    def slice_cells(self, first: Int32[Array, ""], count: int) -> Visibility:
        """Return the visibility of the cells with indices in `[first, first + count)`."""

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, first, count, axis=-1)

        return replace(
            self,
            position=cut(self.position),
            owners=cut(self.owners),
            bias=cut(self.bias) if isinstance(self.bias, jax.Array) else self.bias,
        )

    def slice_tokens(self, cut: Callable[[jax.Array], jax.Array]) -> Visibility:
        """Return the visibility of the tokens that `cut` selects from arrays `[P, T, ...]`."""
        return replace(
            self,
            at=cut(self.at),
            word=cut(self.word),
            bit=cut(self.bit),
            visible_until=None if self.visible_until is None else cut(self.visible_until),
            bias=cut(self.bias) if isinstance(self.bias, jax.Array) else self.bias,
        )

    def gather_list_streams(self, x: PyTree) -> PyTree:
        """Return `x[self.streams]`, `[P, ...]`, for each array `[S, ...]` of the pytree `x`."""
        return gather_streams(x, None if self.all_streams else self.streams)


@jax.jit
def compute_mask(visibility: Visibility) -> Bool[Array, "P T N"]:
    """Return which cells each token attends to (llama.cpp: `set_input_kq_mask`)."""
    # The compiler computes the mask once for all layers with the same visibility.
    owners = visibility.gather_list_streams(visibility.owners)  # [P, W, N]
    owner = owners[:, 0][:, None]
    for w in range(1, owners.shape[1]):  # Selecting one of few words avoids a stored gather.
        owner = jnp.where((visibility.word == w)[..., None], owners[:, w][:, None], owner)
    owned = owner & visibility.bit[..., None] != 0
    # Axes of `position`: list, 1, cell. Axes of `at` and `visible_until`: list, token, 1.
    position = visibility.gather_list_streams(visibility.position)[:, None]
    visible_until = (
        None if visibility.visible_until is None else visibility.visible_until[..., None]
    )
    at = visibility.at[..., None]
    return owned & can_see(
        visibility.window, at, position, causal=visibility.causal, visible_until=visible_until
    )


def compute_bias(
    visibility: Visibility, seen: Bool[Array, "P T N"] | None = None
) -> Float[Array, "P _ T N"] | None:
    """Return the bias of each token and cell, `[P, H or 1, T, N]`; None if there is no bias."""
    # With a mask `seen`, hidden cells get the position of the token, so that derivatives of a bias
    # function are finite.
    if not isinstance(visibility.bias, PositionBias):
        return None if visibility.bias is None else visibility.bias.swapaxes(1, 2)
    position = visibility.gather_list_streams(visibility.position)[:, None]
    if seen is not None:
        position = jnp.where(seen, position, visibility.at[..., None])
    return visibility.bias.compute_bias(visibility.at, position)


def with_bias_array(visibility: Visibility) -> Visibility:
    """Replace a bias function by its result, an array `[P, T, H or 1, N]`."""
    bias = compute_bias(visibility)
    return replace(visibility, bias=None if bias is None else bias.swapaxes(1, 2))


class QueryBounds(NamedTuple):
    """Sequence and visible positions of each query; fields are `[P, T]`, or `[X, 1]` in kernels."""

    first: Int32[Array, "*_"]
    last: Int32[Array, "*_"]
    word: Int32[Array, "*_"]
    bit: Int32[Array, "*_"]

    def can_see(
        self, position: Int32[Array, "*#n"], owners: Sequence[Int32[Array, "*#n"]]
    ) -> Bool[Array, "*_"]:
        """Return which cells with the given positions and owners are visible to each query."""
        owner = owners[0]
        for w, others in enumerate(owners[1:], 1):
            owner = jnp.where(self.word == w, others, owner)
        return (owner & self.bit != 0) & (position >= self.first) & (position <= self.last)


def query_bounds_of(visibility: Visibility) -> QueryBounds:
    """Return the bounds of each token, four arrays `[P, T]` int32."""
    return QueryBounds(
        first_seen(visibility.window, visibility.at),
        last_seen(
            visibility.window,
            visibility.at,
            causal=visibility.causal,
            visible_until=visibility.visible_until,
        ),
        visibility.word,
        jax.lax.bitcast_convert_type(visibility.bit, jnp.int32),
    )
