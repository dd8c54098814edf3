"""What decides which cells each token sees, and what is added to the logits of these cells.

Implementations that want a mask, or a bias of all pairs, make it from this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.bias import BiasOfLists, PositionBias
from jaxkv.ops.layer_stack import gather_streams
from jaxkv.window import Window, can_see, first_seen, last_seen

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Visibility:
    """Positions and owners of the cells of S streams, and of P lists of T tokens that look.

    A token sees the cells of its stream that have its owner, up to its own position, as far back as
    the window reaches. A sight is small; an implementation makes a mask of it only if it needs one.

    position: the position of each cell.
    owners: one bit for each sequence that owns the cell.
    streams: the stream of each list of tokens.
    at: the position of each token.
    word: in which of the W words the token's owner stands.
    bit: the bit of that word, set; 0 for padding, which sees nothing.
    window: how far back tokens look, static.
    causal: False lets tokens see what comes after them too, static.
    all_streams: whether P is S and list p is that of stream p, static. Shapes alone cannot tell.
    visible_until: the last position that each token sees; None for the token's own.
    bias: what is added to logits, `[P, T, H or 1, N]` or a function; None for nothing.
    tile: the cells of a tile of a sequence, where sequences have tiles for themselves as far as
      there is room, static; None where they have none. It does not change what is seen, only which
      way of computing is fast.
    """

    position: Int32[Array, "S N"]
    owners: UInt32[Array, "S W N"]
    streams: Int32[Array, " P"]
    at: Int32[Array, "P T"]
    word: Int32[Array, "P T"]
    bit: UInt32[Array, "P T"]
    window: Window | None = field(metadata={"static": True})
    causal: bool = field(metadata={"static": True})
    all_streams: bool = field(metadata={"static": True})
    visible_until: Int32[Array, "P T"] | None = None
    bias: BiasOfLists | None = None
    tile: int | None = field(default=None, metadata={"static": True})

    def slice_cells(self, first: Int32[Array, ""], count: int) -> Visibility:
        """Return the sight of `count` cells from `first` on, an int32 number."""

        def cut(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, first, count, axis=-1)

        return replace(
            self,
            position=cut(self.position),
            owners=cut(self.owners),
            bias=cut(self.bias) if isinstance(self.bias, jax.Array) else self.bias,
        )

    def slice_tokens(self, cut: Callable[[jax.Array], jax.Array]) -> Visibility:
        """Return the sight of other tokens; `cut` takes them out of arrays `[P, T, ...]`."""
        return replace(
            self,
            at=cut(self.at),
            word=cut(self.word),
            bit=cut(self.bit),
            visible_until=None if self.visible_until is None else cut(self.visible_until),
            bias=cut(self.bias) if isinstance(self.bias, jax.Array) else self.bias,
        )

    def gather_list_streams(self, x: PyTree) -> PyTree:
        """Return the part of each list's stream, `[P, ...]`, of arrays `[S, ...]`."""
        return gather_streams(x, None if self.all_streams else self.streams)


@jax.jit
def compute_mask(visibility: Visibility) -> Bool[Array, "P T N"]:
    """Return which cells of its stream each token sees.

    Each layer calls this; the compiler computes it once for all layers that share a sight.

    llama.cpp: `set_input_kq_mask`.
    """
    owners = visibility.gather_list_streams(visibility.owners)  # [P, W, N]
    owner = owners[:, 0][:, None]
    for w in range(1, owners.shape[1]):  # a choice among few words, where a gather would be stored
        owner = jnp.where((visibility.word == w)[..., None], owners[:, w][:, None], owner)
    owned = owner & visibility.bit[..., None] != 0
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
    """Return what is added to the logits of all pairs, for H heads or for one; None for nothing.

    Args:
      visibility: the tokens and the cells.
      seen: for derivatives: a cell that a token does not see is taken to stand where the token
        stands, so that the derivative of a function is a number there.
    """
    if not isinstance(visibility.bias, PositionBias):
        return None if visibility.bias is None else visibility.bias.swapaxes(1, 2)
    position = visibility.gather_list_streams(visibility.position)[:, None]
    if seen is not None:
        position = jnp.where(seen, position, visibility.at[..., None])
    return visibility.bias.compute_bias(visibility.at, position)


def with_bias_array(visibility: Visibility) -> Visibility:
    """Return a sight whose bias, if it has one, is an array `[P, T, H or 1, N]`."""
    bias = compute_bias(visibility)
    return replace(visibility, bias=None if bias is None else bias.swapaxes(1, 2))


class QueryBounds(NamedTuple):
    """What decides which cells a query sees, in the numbers that a kernel compares.

    The rule of a window becomes the first and the last position that is seen. All arrays are int32
    and of one shape: `[P, T]` for tokens, `[X, 1]` for the X queries of a kernel.

    first: the first position that the query sees.
    last: the last position.
    word: in which word its owner stands.
    bit: the bit of that word, set; 0 for padding.
    """

    first: Int32[Array, "*_"]
    last: Int32[Array, "*_"]
    word: Int32[Array, "*_"]
    bit: Int32[Array, "*_"]

    def can_see(
        self, position: Int32[Array, "*#n"], owners: Sequence[Int32[Array, "*#n"]]
    ) -> Bool[Array, "*_"]:
        """Return which cells are seen, bool, given int32 positions and W words of owners.

        All arrays broadcast together: `[X, 1]` and `[1, C]`, for C cells, give `[X, C]`.
        """
        owner = owners[0]
        for w, others in enumerate(owners[1:], 1):
            owner = jnp.where(self.word == w, others, owner)
        return (owner & self.bit != 0) & (position >= self.first) & (position <= self.last)


def query_bounds_of(visibility: Visibility) -> QueryBounds:
    """Return how each token looks, four arrays `[P, T]` int32."""
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
