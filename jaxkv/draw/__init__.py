"""Memories to look at: as text, as a line, as a table in a notebook, and as plots.

`show` draws with characters. `cells_of` returns what stands in the cells as NumPy arrays. `plot`
draws with matplotlib. The line that is the `repr` of a memory, a plan or a batch, and the table
that a notebook displays for a memory, are attached to their classes here.
"""

from jaxkv.draw.look import CellView, cells_of
from jaxkv.draw.text import show

__all__ = ["CellView", "cells_of", "show"]
