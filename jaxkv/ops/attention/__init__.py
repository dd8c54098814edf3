"""Softmax attention over streams of cells.

Additional letters in this package:

  b  blocks of a list of tokens        G  query heads of a key head
  t  tokens of a block                 X  queries that share a key, G * T or G * t
  C  cells of a tile or part
"""

from jaxkv.ops.attention.dispatch import Implementation, attention

__all__ = ["Implementation", "attention"]
