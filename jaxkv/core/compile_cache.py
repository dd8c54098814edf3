"""Programs made for functions that callers pass: compiled once, kept for as long as those live."""

import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

P = TypeVar("P")

_kept: dict[tuple, tuple[list[weakref.ref], object]] = {}


def cached_program(build: Callable[..., P], *functions: Callable) -> P:
    """Build a program for functions, or find the one that was built for the same ones before.

    A bound method is a new object each time that it is looked up, so it counts as the same where
    its function and its object are. Anything else, a `functools.partial` or a lambda too, is the
    same only as itself.

    Args:
      build: gets a reference for each function, which gives it when called, and returns the
        program. It must not hold the functions themselves: a program that did would keep them
        alive, and they it.
      functions: what the program is made of. The caller holds them while it runs.

    Raises:
      TypeError: when it is no function, or of a type that cannot be referenced weakly.
    """
    for function in functions:
        if not callable(function):
            raise TypeError(f"expected a function, got {type(function)}: pass forward first")
    parts = [
        (function.__func__, function.__self__)
        if isinstance(function, types.MethodType)
        else (function,)
        for function in functions
    ]
    key = (build, *(tuple(map(id, part)) for part in parts))
    if key not in _kept:
        # The first function that dies removes the program, so an id in a key is never reused by
        # another object.
        deaths = [
            _weak_reference(referent, partial(_drop_program, key))
            for part in parts
            for referent in part
        ]
        _kept[key] = deaths, build(*map(_make_live_getter, functions))
    return cast(P, _kept[key][1])


def _weak_reference(referent: object, tell: Callable[[weakref.ref], None]) -> weakref.ref:
    try:
        return weakref.ref(referent, tell)
    except TypeError:
        raise TypeError(
            f"expected a function, a method or an object that can be referenced weakly, got "
            f"{type(referent)}: wrap it in a function, and pass the same one every time"
        ) from None


def _make_live_getter(function: Callable) -> Callable[[], Callable]:
    weakly = weakref.WeakMethod if isinstance(function, types.MethodType) else weakref.ref
    reference = weakly(function)

    def live_function() -> Callable:
        if (function := reference()) is None:
            raise ReferenceError("the function that this program was made for is gone: keep it")
        return function

    return live_function


def _drop_program(key: tuple, _: weakref.ref) -> None:
    _kept.pop(key, None)
