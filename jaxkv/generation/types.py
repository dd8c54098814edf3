"""Types for the annotations of generation loops."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, ArrayLike, Integer, Key, Num

from jaxkv.core.types import Ids, Tokens

Prompts = Integer[Array | np.ndarray, "Z n"] | Sequence[Ids]
"""Tokens of each sequence: an array `[Z, n]`, or a list of token lists or arrays."""

SharedPrompts = Integer[Array | np.ndarray, "P k"] | Sequence[Ids]
"""Tokens of P prompts, each shared by several sequences: an array, or a list of lists."""

StopTokens = Tokens | set[int] | frozenset[int]
"""Tokens that end a sequence: one list for all sequences, or one list for each sequence."""

Seeds = Integer[ArrayLike, "..."] | Key[Array, "..."] | Sequence[int] | Sequence[Key[Array, ""]]
"""One seed for all sequences, or one seed for each sequence."""

Numbers = Num[ArrayLike, "..."] | Sequence[float]
"""One number for all sequences, or one number for each sequence."""
