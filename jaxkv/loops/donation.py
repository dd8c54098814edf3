"""Buffers that a loop may give to its program, which donates them: a memory's own, or copies."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.donation import check_there
from jaxkv.memory import Memory, split


def given(memory: Memory, donate: bool) -> tuple[Any, Any]:
    """Return a table, and buffers that a program may have: those of the memory, or copies.

    Raises:
      ValueError: when the buffers were given up before.
    """
    table, buffers = split(memory)
    check_there(buffers)
    return table, buffers if donate else copied(buffers)


@jax.jit
def copied(tree: Any) -> Any:
    """Copy arrays, so that the copies may be donated."""
    return jax.tree.map(jnp.copy, tree)
