"""How far a prompt agrees with a text that is held, and how far it can go on from there."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.hybrid import HybridTable
from jaxkv.memory import Memory, split
from jaxkv.prefix.store import Found, Miss, Store, Text, beside
from jaxkv.tables import program

BLOCK = 1024
"""Positions that are asked about at once, so that texts of all lengths share a program."""


def longest(
    memory: Memory, store: Store, tokens: np.ndarray, seq: int
) -> tuple[Text | None, Found]:
    """Return the text that a prompt can go on from furthest, and how far; None for none."""
    own = beside(store, seq)
    agreeing = [(agreement(text.tokens, tokens[:-1]), text) for text in reversed(store.texts)]
    agreeing = [(common, text) for common, text in agreeing if common]
    agreeing.sort(key=lambda one: (one[0], one[1].holder in own), reverse=True)
    source, best, miss = None, 0, Miss.UNKNOWN
    for i, (common, text) in enumerate(agreeing):
        if common <= best:
            break
        there, why = resumable(memory, text.holder, common)
        miss = why if i == 0 else miss  # of the one that agrees furthest
        if (furthest := int(np.flatnonzero(there)[-1])) > best:
            source, best = text, furthest
    most = agreeing[0][0] if agreeing else 0
    if best == most > 0:
        miss = Miss.NONE
    once = max((agreement(text, tokens[:-1]) for text in store.evicted), default=0)
    if once > most:
        miss = Miss.EVICTED
    return source, Found(best, miss)


def agreement(one: np.ndarray, other: np.ndarray) -> int:
    """Return how many tokens two texts begin with alike."""
    size = min(one.size, other.size)
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if apart.size else size


def resumable(memory: Memory, seq: int, last: int) -> tuple[np.ndarray, Miss]:
    """Return at which positions a sequence can go on, and why it cannot at the last one.

    Returns:
      `[last + 1]` bool, True for 0, where nothing is needed.
    """
    starts = np.arange(0, last + 1, BLOCK, dtype=np.int32)
    all_parts, miss = np.ones(last + 1, bool), Miss.NONE
    for table in _tables(split(memory)[0]):
        blocks = [_can_go_on(table, np.int32(seq), start) for start in starts]
        there = np.concatenate(jax.device_get(blocks))[: last + 1]
        if not there[last] and miss is Miss.NONE:
            miss = Miss.LOST if table.facts.rollback is None else Miss.NO_STATE
        all_parts &= there
    return all_parts, miss


def _tables(table: Any) -> Iterator[Any]:
    """Yield the tables of the parts of a memory."""
    yield from table.parts if isinstance(table, HybridTable) else [table]


@program
def _can_go_on(table: Any, seq: jax.Array, start: jax.Array) -> jax.Array:
    """Return at which positions of a block a sequence can go on; `[BLOCK]` bool."""
    positions = start + jnp.arange(BLOCK, dtype=jnp.int32)
    holds = positions <= table.last(seq) + 1
    there = jax.vmap(table.can_resume, in_axes=(None, 0))(seq, positions)
    return (positions == 0) | (holds & there)
