"""Types that annotations name. Type checkers and the tests import this module, and nothing else.

Letters are those of `jaxkv`.
"""

from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, ArrayLike, Bool, Int

AnyArray = Array | np.ndarray
"""An array, of NumPy where the host knows it."""

Id = Int[ArrayLike, ""]
"""A sequence id, a position, or another single integer."""

Ids = Int[ArrayLike, "..."] | Sequence[int]
"""One integer or many."""

Tokens = Int[ArrayLike, "..."] | Sequence[int] | Sequence[Sequence[int]]
"""Token ids: an array, a list, or a list of lists."""

Flags = Bool[ArrayLike, "..."] | Sequence[bool]
"""One flag or many."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or its axes alone."""
