"""Draw who lives in each cell."""

from typing import Any

import numpy as np

from jaxkv.cells import EMPTY, WORD, Cells
from jaxkv.memory import split


def show(memory: Any) -> str:
    """Draw the table of a cache: a column a cell, its owner above its position.

    Args:
      memory: an attention memory.

    Returns:
      Two lines for each stream. `.` is an empty cell, a number the only owner, `+` several owners.
      A third line, `owed`, appears when keys wait for a rotation.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=6, heads=1, size=2, sequences=12)
      >>> batch = make_batch([[1, 2, 3], [4]], sequences=[0, 11])
      >>> memory = apply(memory, init_batch(memory, batch))
      >>> print(show(seq_cp(memory, 0, 5, 0, 1)))
      owner    + 0 0 11 . .
      position 0 1 2  0 . .

    llama.cpp: the debug drawing of `find_slot`.
    """
    table, _ = split(memory)
    if not isinstance(table, Cells):
        raise TypeError(f"wanted a memory with one table of cells, got {type(table).__name__}")
    drawn = []
    for stream, (position, owners, shift) in enumerate(
        zip(*map(np.asarray, (table.position, table.owners, table.shift)), strict=True)
    ):
        bits = (owners[:, None] >> np.arange(WORD, dtype=np.uint32)[:, None]) & 1  # [W, 32, N]
        bits = bits.reshape(-1, table.size)
        mark = np.where(bits.sum(0) > 1, "+", (bits.argmax(0) + stream).astype(str))
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
