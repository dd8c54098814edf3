"""Which cells each token of a ubatch may see."""

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.cells import Cells, home


def visible(cells: Cells, ubatch: Ubatch) -> jax.Array:
    """Say which cells each token sees: those of its sequence, up to its own position.

    The table decides, nobody else: an empty cell has no owner, and a token sees the tokens of its
    own ubatch because they already stand in the table.

    Args:
      cells: the table, with the ubatch applied.
      ubatch: the tokens that look.

    Returns:
      `[R, T, N]` bool. Nothing is visible to a padding token.

    llama.cpp: `set_input_kq_mask`.
    """
    _, word, bit = home(cells, ubatch.sequences)
    owners = cells.owners[ubatch.streams]  # [R, W, N]
    owner = owners[:, 0][:, None]
    for w in range(1, owners.shape[1]):  # a choice among few words, where a gather would be stored
        owner = jnp.where((word == w)[..., None], owners[:, w][:, None], owner)
    owned = (owner >> bit[..., None]) & 1 == 1
    earlier = cells.position[ubatch.streams][:, None] <= ubatch.positions[..., None]
    return owned & earlier & ubatch.valid[..., None]
