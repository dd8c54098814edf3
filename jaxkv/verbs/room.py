"""Room for copies between streams: whether there is, asked before anything is changed."""

from typing import Any

import jax
import numpy as np

from jaxkv.facts import Facts, changes_of
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
