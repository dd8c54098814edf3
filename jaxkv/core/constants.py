"""Sentinels for positions, slots and tokens."""

import numpy as np

EMPTY = -1
"""Position of an empty cell, and last position of an empty sequence."""

END = np.iinfo(np.int32).max
"""One past the largest position; the end of an open range."""

NO_SLOT = np.iinfo(np.int32).max
"""Batch index of padding in a row."""

MAX_CELLS = 1 << 30
"""The first slot past the last cell of any table."""
