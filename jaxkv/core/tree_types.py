"""Pytrees with static node types; JAX does not compare the classes of dataclass nodes."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax

from jaxkv.core.pytree import pytree_dataclass, static_field

X = TypeVar("X")


@pytree_dataclass
class TreeWithTypes(Generic[X]):
    """A pytree and its static node types; a compiled program is reused only for equal types."""

    value: X
    types: tuple[type, ...] = static_field()


def attach_node_types(value: X) -> TreeWithTypes[X]:
    """Return a tree with the types of its nodes."""
    return TreeWithTypes(value=value, types=(*_iterate_node_types(jax.tree.structure(value)),))


# `node` is a `PyTreeDef`, which has no type stubs.
def _iterate_node_types(node: Any) -> Iterator[type]:
    if (data := node.node_data()) is not None:  # None for a leaf
        yield data[0]
        for child in node.children():
            yield from _iterate_node_types(child)
