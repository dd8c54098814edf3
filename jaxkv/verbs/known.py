"""Whether the host can look at what a memory holds; asked before it is drawn or saved."""

from typing import Any

import jax
import numpy as np

from jaxkv.donation import check_there
from jaxkv.tables import check_single


def check_known(table: Any, buffers: Any = ()) -> None:
    """Raise unless this is the table of one memory whose arrays have values; the same of buffers.

    Raises:
      TypeError: when there are shapes alone.
      ValueError: when an array was donated, or the table is that of a batch of memories, as `vmap`
        makes them.

    >>> memory = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
    >>> check_known(jax.tree.map(lambda x: x[None], memory.table))
    Traceback (most recent call last):
    ...
    ValueError: wanted one memory, got a batch of them: go over it with jax.vmap, or take each by \
itself, such as jax.tree.map(lambda x: x[0], memory)
    """
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves((table, buffers))):
        raise TypeError("wanted a memory with values, got the shapes of one: make it first")
    check_there(table, buffers)
    check_single(table)
