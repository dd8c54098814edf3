"""`pytree_dataclass`, the decorator of the values of this library."""

from dataclasses import MISSING, dataclass, field, fields
from inspect import get_annotations
from typing import Any, TypeVar, dataclass_transform

import jax

from jaxkv.core.repr import fields_repr

C = TypeVar("C", bound=type)


def static_field(*, default: Any = MISSING) -> Any:
    """Return a dataclass field that is part of the tree structure, not a leaf; it must be hashable.

    A program that `jax.jit` compiled is reused only for equal static fields.
    """
    return field(default=default, metadata={"static": True})


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    eq_default=False,
    field_specifiers=(field, static_field),
)
def pytree_dataclass(cls: C) -> C:
    """Make a class a frozen dataclass with keyword-only fields, and register it as a pytree.

    Examples:
      >>> @pytree_dataclass
      ... class Line:
      ...     start: jax.Array
      ...     step: int = static_field(default=1)
      >>> jax.tree.leaves(Line(start=3, step=2))
      [3]
      >>> jax.tree.map(lambda x: x + 1, Line(start=3))
      Line(start=4, step=1)
    """
    # JAX compares the names of fields, not classes: it would reuse a program of another class with
    # equal fields. The qualified name is therefore a static field of every instance.
    cls.__annotations__ = {**get_annotations(cls), "_class": str}
    cls._class = field(default=cls.__qualname__, repr=False, metadata={"static": True})
    if cls.__repr__ is object.__repr__:
        cls.__repr__ = fields_repr
    cls = dataclass(frozen=True, kw_only=True, eq=False, repr=False)(cls)
    return jax.tree_util.register_dataclass(cls)


def field_values(value: Any) -> dict[str, Any]:
    """Return the fields of a `pytree_dataclass` by name, to make a value of a subclass."""
    return {x.name: getattr(value, x.name) for x in fields(value) if x.name != "_class"}
