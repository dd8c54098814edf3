"""Softmax attention over streams of cells.

Additional letters: b blocks of a list of tokens, t tokens of a block, C cells of a tile or part, G
query heads of a key head, X queries that share a key (G * T or G * t).
"""

from jaxkv.ops.attention.dispatch import Implementation, attention

__all__ = ["Implementation", "attention"]
