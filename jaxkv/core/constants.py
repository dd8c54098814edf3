"""Sentinels for positions, slots and tokens."""

import numpy as np

EMPTY = -1
"""Position of an empty cell, and last position of an empty sequence."""

END = np.iinfo(np.int32).max
"""One past the largest position; also the end of an unlimited range of positions."""

NO_SLOT = np.iinfo(np.int32).max
"""Batch index of padding in a row."""

MAX_CELLS = 1 << 30
"""Smallest slot that is past the last cell of every table."""

WORD = 32
"""Number of sequences in one word of the array `owners` of a table."""
