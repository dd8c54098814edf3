"""Recurrences over the tokens of a row, in parallel over time.

A row of a ubatch goes on from the state before its first token, and leaves the states after some
of its last tokens, for the memory to keep. All sums are float32.
"""

from jaxkv.ops.scans.convolution import convolve
from jaxkv.ops.scans.diagonal import scan_diagonal
from jaxkv.ops.scans.ssd import scan_ssd

__all__ = ["convolve", "scan_diagonal", "scan_ssd"]
