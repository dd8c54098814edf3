"""Which cells each token of a ubatch may see."""

import jax
import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.kv.cells import Cells, home
from jaxkv.kv.slots import streams
from jaxkv.window import sees


def visible(cells: Cells, ubatch: Ubatch, *, causal: bool = True) -> jax.Array:
    """Say which cells each token sees: those of its sequence, up to its own position.

    With a window, those inside of it alone; see `jaxkv.window` for the rules.

    The table decides, nobody else: an empty cell has no owner, and a token sees the tokens of its
    own ubatch because they already stand in the table.

    Args:
      cells: the table, with the ubatch applied.
      ubatch: the tokens that look.
      causal: False lets them see what comes after them too.

    Returns:
      `[R, T, N]` bool. Nothing is visible to a padding token.

    llama.cpp: `set_input_kq_mask`.
    """
    _, word, bit = home(cells, ubatch.sequences)
    stream = streams(cells, ubatch)
    owners = cells.owners[stream]  # [R, W, N]
    owner = owners[:, 0][:, None]
    for w in range(1, owners.shape[1]):  # a choice among few words, where a gather would be stored
        owner = jnp.where((word == w)[..., None], owners[:, w][:, None], owner)
    owned = (owner >> bit[..., None]) & 1 == 1
    position = cells.position[stream][:, None]
    seen = sees(cells.window, ubatch.positions[..., None], position, causal=causal)
    return owned & seen & ubatch.valid[..., None]
