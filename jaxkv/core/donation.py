"""Errors for the use of a donated cache, and of a cache in memory without computations."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import jax

from jaxkv.core.array_utils import is_traced

if TYPE_CHECKING:
    from jaxtyping import PyTree

T = TypeVar("T")
A = ParamSpec("A")


def is_donated(*trees: PyTree) -> bool:
    """Return whether any array of the trees was donated."""
    leaves = jax.tree.leaves(trees)
    return any(isinstance(x, jax.Array) and not is_traced(x) and x.is_deleted() for x in leaves)


def check_not_donated(*trees: PyTree, name: str = "a cache") -> None:
    """Raise a ValueError that mentions `name` if any array of the trees was donated."""
    if is_donated(*trees):
        raise ValueError(
            f"expected {name} with its buffers, got one whose buffers were donated; use the "
            f"cache that the step or loop returned, or do not donate"
        ) from None


def _check_in_memory_of_computations(*trees: PyTree) -> None:
    """Raise a ValueError if any array is in memory such as "pinned_host"."""
    for x in jax.tree.leaves(trees):
        if not isinstance(x, jax.Array) or is_traced(x):
            continue
        kind, (device, *_) = x.sharding.memory_kind, x.sharding.device_set
        if kind not in (None, device.default_memory().kind):
            raise ValueError(
                f"expected a cache in the memory in which its devices compute, got one in "
                f"{kind!r}; move it there (sharding.move), or insert its sequences into a cache"
            ) from None


def explain_donation_errors(fun: Callable[A, T]) -> Callable[A, T]:
    """Decorate a function to raise one sentence for donated arguments, and for other memory."""
    # Arguments are checked only after an error of JAX, so that other calls have no overhead.

    @wraps(fun)
    def call(*args: A.args, **kwargs: A.kwargs) -> T:
        try:
            return fun(*args, **kwargs)
        except (RuntimeError, ValueError):  # A program that runs at once raises a ValueError.
            trees = [x for x in (*args, *kwargs.values()) if not isinstance(x, jax.Array)]
            check_not_donated(trees)
            _check_in_memory_of_computations(trees)
            raise

    return call
