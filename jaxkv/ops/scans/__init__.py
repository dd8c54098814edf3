"""Recurrences over the tokens of a row, computed in parallel over tokens, with float32 sums.

Further letters in array shapes: C channels; F tokens that a filter spans; t tokens of a chunk;
M state elements for each dimension of a head; G groups of heads; J heads of a group.
"""

from jaxkv.ops.scans.convolution import convolve
from jaxkv.ops.scans.diagonal import scan_diagonal
from jaxkv.ops.scans.ssd import scan_ssd

__all__ = ["convolve", "scan_diagonal", "scan_ssd"]
