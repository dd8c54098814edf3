"""Room for copies between streams: whether there is, asked before anything is changed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.facts import Facts
from jaxkv.memory import Need
from jaxkv.places import is_concrete
from jaxkv.plan import NoRoomError
from jaxkv.tables import program


def within_streams(facts: Facts, ids: Any, others: Any) -> bool:
    """Return whether sequences are known to lie in the streams of others, so that all is shared."""
    if facts.streams == 1:
        return True
    if not is_concrete(ids, others):
        return False
    one, other = (np.asarray(x) // facts.sharing for x in (ids, others))
    return bool(np.all(one == other))


@program
def need_to_copy(table: Any, *args: jax.Array) -> Need:
    """Return the cells that `seq_cp` takes of other streams; see `Table.need_to_copy`."""
    return table.need_to_copy(*args)


@program
def need_to_select(table: Any, parents: jax.Array, ids: jax.Array) -> Need:
    """Return the cells that `seq_select`, of `[n]` int32 each, takes of other streams."""
    return table.need_to_select(*changes_of(table.facts, parents, ids))


def changes_of(facts: Facts, parents: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return parents and targets, `[n]` int32 as given, a target of Q where nothing changes.

    Nothing does for a sequence that is its own parent, nor where one of the two is no sequence. Of
    a sequence that comes twice, which only a traced one can, the last counts.
    """
    count = facts.sequences
    known = (parents >= 0) & (parents < count) & (ids >= 0) & (ids < count)
    targets = jnp.where(known & (parents != ids), ids, count)
    turn = jnp.arange(ids.size, dtype=jnp.int32)
    last = jnp.full(count, -1, jnp.int32).at[targets].max(turn, mode="drop")
    counts = last.at[targets].get(mode="fill", fill_value=-1) == turn
    return jnp.where(known, parents, 0), jnp.where(counts, targets, count)


def check_room(need: Need) -> None:
    """Raise a NoRoomError if a stream lacks the cells for a copy."""
    wanted, found = np.asarray(need.wanted), np.asarray(need.found)
    for stream in np.flatnonzero(wanted > found):
        raise NoRoomError(
            f"wanted {wanted[stream]} cells of stream {stream} for a copy from another one, got "
            f"{found[stream]}, and nothing was changed: remove a sequence there (seq_rm), copy to "
            f"one of the same stream, which takes none, or where cells must be neighbours close "
            f"the gaps (defrag_plan)"
        )
