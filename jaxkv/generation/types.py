"""Types of what loops are given. Type checkers and the tests import this module, and nothing else.

Letters are those of `jaxkv`; here T counts texts, and n the tokens of one.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, ArrayLike, Integer, Num

from jaxkv.core.types import Ids, Tokens

Prompts = Integer[Array | np.ndarray, "T n"] | Sequence[Ids]
"""The tokens of each text: an array, or a list of lists or of arrays."""

StopTokens = Tokens | set[int] | frozenset[int]
"""The tokens that end texts, of all or of each."""

Seeds = Integer[ArrayLike, "..."] | Sequence[int]
"""One seed for all texts, or one for each."""

Numbers = Num[ArrayLike, "..."] | Sequence[float]
"""One number for all texts, or one for each."""
