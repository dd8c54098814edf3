"""Types that annotations name. Type checkers and the tests import this module, and nothing else.

Letters are those of `jaxkv`.
"""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import ArrayLike, Bool, Integer, PyTree

Id = Integer[ArrayLike, ""]
"""A sequence id, a position, or another single integer."""

Ids = Integer[ArrayLike, "..."] | Sequence[int] | Sequence[Integer[ArrayLike, ""]]
"""One integer or many."""

Tokens = PyTree[Integer[ArrayLike, "..."] | range]  # None too, an empty tree
"""Token ids: an array, a list, or a list of lists."""

Flags = Bool[ArrayLike, "..."] | Sequence[bool]
"""One flag or many."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or its axes alone."""
