"""Recurrences over the tokens of a row, in parallel over time.

The recurrence of a row starts from the state before the first token of the row. The results include
the states after some of the last tokens of the row, for the cache. All sums are float32.

Additional letters in this package:

  C  channels, or elements of a diagonal state     G  groups of heads
  F  tokens of a filter                            J  heads of a group
  M  state elements for each dimension of a head   t  tokens of a chunk
"""

from jaxkv.ops.scans.convolution import convolve
from jaxkv.ops.scans.diagonal import scan_diagonal
from jaxkv.ops.scans.ssd import scan_ssd

__all__ = ["convolve", "scan_diagonal", "scan_ssd"]
