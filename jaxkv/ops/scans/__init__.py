"""Recurrences over the tokens of a row, in parallel over time.

A row of a ubatch goes on from the state before its first token, and leaves the states after some
of its last tokens, for the cache to keep. All sums are float32.

Letters beside those of the package: C channels, or numbers of a state that decay by themselves; F
tokens that a filter sees; G groups of heads; M numbers of a state for each of the D numbers of a
head.
"""

from jaxkv.ops.scans.convolution import convolve
from jaxkv.ops.scans.diagonal import scan_diagonal
from jaxkv.ops.scans.ssd import scan_ssd

__all__ = ["convolve", "scan_diagonal", "scan_ssd"]
