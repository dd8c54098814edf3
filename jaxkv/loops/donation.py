"""Buffers that a loop may give to its program, which donates them: a memory's own, or copies."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.memory import Memory, split
from jaxkv.places import is_traced


def given(memory: Memory, donate: bool) -> tuple[Any, Any]:
    """Return a table, and buffers that a program may have: those of the memory, or copies.

    Raises:
      ValueError: when the buffers were given up before.
    """
    table, buffers = split(memory)
    check_there(memory)
    return table, buffers if donate else copied(buffers)


def check_there(memory: Memory, what: str = "a memory") -> None:
    """Raise a ValueError if a memory's buffers were donated; `what` is its name there."""
    first = next(iter(jax.tree.leaves(split(memory)[1])), None)
    if isinstance(first, jax.Array) and not is_traced(first) and first.is_deleted():
        raise ValueError(
            f"wanted {what} with its buffers, got one whose buffers were donated: go on with the "
            f"memory that the step or loop returned, or do not donate them"
        )


@jax.jit
def copied(tree: Any) -> Any:
    """Copy arrays, so that the copies may be donated."""
    return jax.tree.map(jnp.copy, tree)
