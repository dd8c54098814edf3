"""Types for annotations. For the letters of shapes, see the docstring of `jaxkv`."""

from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import ArrayLike, Bool, Integer, PyTree

Id = Integer[ArrayLike, ""]
"""A sequence id, a position, or another integer."""

Ids = Integer[ArrayLike, "..."] | Sequence[int] | Sequence[Integer[ArrayLike, ""]]
"""One integer or several."""

Tokens = PyTree[Integer[ArrayLike, "..."] | range]  # None too, an empty tree
"""Token ids: an array, a list, or a list of lists."""

Flags = Bool[ArrayLike, "..."] | Sequence[bool]
"""One flag or several."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of devices, or an abstract mesh."""
