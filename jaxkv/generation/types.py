"""Types of loop arguments, for type checkers and tests only.

Letters are those of `jaxkv`; here T counts sequences, and n the tokens of one sequence.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, ArrayLike, Integer, Num

from jaxkv.core.types import Ids, Tokens

Prompts = Integer[Array | np.ndarray, "T n"] | Sequence[Ids]
"""The tokens of each sequence: an array, or a list of lists or of arrays."""

StopTokens = Tokens | set[int] | frozenset[int]
"""Tokens that end a sequence, for all sequences or for each."""

Seeds = Integer[ArrayLike, "..."] | Sequence[int]
"""One seed for all sequences, or one for each."""

Numbers = Num[ArrayLike, "..."] | Sequence[float]
"""One number for all sequences, or one for each."""
