"""Ctrl-C, noticed also where Python drops it.

What a signal raises while a callback of the garbage collector or of a weak reference runs is
dropped, and the work would go on to its end. So it is noted too, and raised again at the next piece
of text.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watch_interrupts() -> Iterator[Callable[[], None]]:
    """Note an interrupt; gives a function that raises KeyboardInterrupt where there was one."""
    came = False

    def note(signum: int, frame: Any) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    def quiet(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            hook(dropped)

    if threading.current_thread() is not threading.main_thread():  # signals come to that one alone
        yield check
        return
    before, hook = signal.signal(signal.SIGINT, note), sys.unraisablehook
    sys.unraisablehook = quiet
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


@contextmanager
def defer_interrupts() -> Iterator[Callable[[], bool]]:
    """Note an interrupt and raise nothing; gives a function that tells whether there was one.

    For work that must end between two of its steps, such as one that has donated a cache.
    """
    came = False

    def note(signum: int, frame: Any) -> None:
        nonlocal came
        came = True

    if threading.current_thread() is not threading.main_thread():  # signals come to that one alone
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
