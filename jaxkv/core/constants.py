"""Numbers that stand for no position, no slot and no token."""

import numpy as np

EMPTY = -1
"""Position of a cell that holds no token, and of a sequence that holds none."""

END = np.iinfo(np.int32).max
"""One past every position: what an open range ends with."""

NO_SLOT = np.iinfo(np.int32).max
"""Batch index of a token that pads a row: it stands for nothing."""

MAX_CELLS = 1 << 30
"""The first slot that is past the last cell of any table."""
