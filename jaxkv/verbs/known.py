"""Whether the host can look at what a cache holds; asked before it is drawn or saved."""

from typing import Any

import jax
import numpy as np

from jaxkv.donation import check_there
from jaxkv.tables import check_single


def check_known(table: Any, buffers: Any = ()) -> None:
    """Raise unless this is the table of one cache whose arrays have values; the same of buffers.

    Raises:
      TypeError: when there are shapes alone.
      ValueError: when an array was donated, or the table is that of a batch of caches, as `vmap`
        makes them.

    >>> cache = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
    >>> check_known(jax.tree.map(lambda x: x[None], cache.table))
    Traceback (most recent call last):
    ...
    ValueError: wanted one cache, got a batch of them: go over it with jax.vmap, or take each by \
itself, such as jax.tree.map(lambda x: x[0], cache)
    """
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves((table, buffers))):
        raise TypeError("wanted a cache with values, got the shapes of one: make it first")
    check_there(table, buffers)
    check_single(table)
