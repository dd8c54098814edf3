"""Drawing which token stands in which cell."""

from typing import Any

import numpy as np

from jaxkv.hybrid import HybridTable
from jaxkv.kv.cells import WORD, Cells
from jaxkv.memory import Memory, split
from jaxkv.places import EMPTY, fetched
from jaxkv.recurrent.states import States

__all__ = ["show"]


def show(memory: Memory) -> str:
    """Draw the table of a cache: a column a cell, its owner above its position.

    Args:
      memory: any memory. Of one that is split over processes each must call this.

    Returns:
      Two lines for each stream. `.` is an empty cell, a number the only owner, `+` several owners.
      A third line, `owed`, appears when keys wait for a rotation. For a recurrent memory a line for
      each sequence, with the positions of the states that are kept, the current one last. For a
      hybrid one its parts, one after another.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, kv_heads=1, head_dim=2, sequences=12)
      >>> batch = make_batch([[1, 2, 3], [4]], sequences=[0, 11])
      >>> memory = apply(memory, init_batch(memory, batch))
      >>> print(show(seq_cp(memory, 0, 5, 0, 1)))
      owner    + 0 0 11 . .
      position 0 1 2  0 . .

      >>> memory = make_recurrent_cache(
      ...     layers=1, states={"x": ((), jnp.float32)}, sequences=2, rollback=2
      ... )
      >>> memory = apply(memory, init_batch(memory, make_batch([[1, 2], [3, 4]])))
      >>> memory = apply(memory, init_batch(memory, make_batch([5, 6])))
      >>> print(show(seq_cp(memory, 1, 0, 0, 1)))
      sequence 0 . . 0
      sequence 1 . 0 1

    llama.cpp: the debug drawing of `find_slot`.
    """
    table, _ = split(memory)
    return _drawn(fetched(table))


def _drawn(table: Any) -> str:
    if isinstance(table, HybridTable):
        names = [", ".join(map(str, layers)) for layers in table.layers]
        return "\n".join(
            f"part {i}, layers {name}\n{_drawn(part)}"
            for i, (part, name) in enumerate(zip(table.parts, names, strict=True))
        )
    return _drawn_states(table) if isinstance(table, States) else _drawn_cells(table)


def _drawn_states(table: States) -> str:
    position, dead = table.position, table.dead_until
    marks = np.where(position == EMPTY, ".", position.astype(str))
    ids = [f"sequence {seq}" for seq in range(table.sequences)]
    width = [max(map(len, column)) for column in marks.T]
    lines = []
    for seq, row in enumerate(marks):
        line = " ".join([ids[seq].ljust(len(ids[-1])), *map(str.rjust, row, width)])
        lines.append(line + (f", dead until {dead[seq]}" if dead[seq] else ""))
    return "\n".join(lines)


def _drawn_cells(table: Cells) -> str:
    drawn = []
    for stream, (position, owners, shift) in enumerate(
        zip(table.position, table.owners, table.shift, strict=True)
    ):
        bits = (owners[:, None] >> np.arange(WORD, dtype=np.uint32)[:, None]) & 1  # [W, 32, N]
        bits = bits.reshape(-1, table.num_cells)
        mark = np.where(bits.sum(0) > 1, "+", (bits.argmax(0) + stream * table.sharing).astype(str))
        lines = {
            "owner": np.where(position == EMPTY, ".", mark),
            "position": np.where(position == EMPTY, ".", position.astype(str)),
        }
        if shift.any():
            lines["owed"] = np.where(position == EMPTY, ".", shift.astype(str))
        width = [max(map(len, column)) for column in zip(*lines.values(), strict=True)]
        drawn += [
            " ".join([name.ljust(8), *map(str.rjust, row, width)]) for name, row in lines.items()
        ]
    return "\n".join(drawn)
