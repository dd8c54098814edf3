"""Weak cache of programs that are built from functions, such as a model's `forward`."""

import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

P = TypeVar("P")

_kept: dict[tuple, tuple[list[weakref.ref], object]] = {}


def cached_program(build: Callable[..., P], forward: Callable, edit: Callable | None = None) -> P:
    """Build a program for the given functions, or return the program that was built earlier.

    Two bound methods with the same function and object have the same program. `build` is called
    with a getter of `forward`, and of `edit` if there is one; a getter returns its function.
    Getters have only weak references, so the caller must keep the functions alive while the program
    runs.
    """
    functions = [forward] if edit is None else [forward, edit]
    for function in functions:
        if not callable(function):
            raise TypeError(f"expected a function, got {type(function)}; pass forward first")
    parts = [
        (function.__func__, function.__self__)
        if isinstance(function, types.MethodType)
        else (function,)
        for function in functions
    ]
    key = (build, *(tuple(map(id, part)) for part in parts))
    if key not in _kept:
        # Deleting any of the functions removes the program, so an id in a key is never reused by
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
            f"{type(referent)}; wrap it in a function, and pass the same one every time"
        ) from None


def _make_live_getter(function: Callable) -> Callable[[], Callable]:
    weakly = weakref.WeakMethod if isinstance(function, types.MethodType) else weakref.ref
    reference = weakly(function)

    def live_function() -> Callable:
        if (function := reference()) is None:
            raise ReferenceError(
                "expected the function of this program, got none since it was deleted; keep a "
                "reference"
            )
        return function

    return live_function


def _drop_program(key: tuple, _: weakref.ref) -> None:
    _kept.pop(key, None)
