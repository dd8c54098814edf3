"""Buffers that a loop may give to its program, which donates them: a cache's own, or copies."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, split
from jaxkv.donation import check_there


def donatable_buffers(cache: Cache, donate: bool) -> tuple[Any, Any]:
    """Return a table, and buffers that a program may have: those of the cache, or copies.

    Raises:
      ValueError: when the buffers were given up before.
    """
    table, buffers = split(cache)
    check_there(buffers)
    return table, buffers if donate else copied(buffers)


@jax.jit
def copied(tree: Any) -> Any:
    """Copy arrays, so that the copies may be donated."""
    return jax.tree.map(jnp.copy, tree)
