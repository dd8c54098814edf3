"""Signal handlers of Ctrl-C.

Python drops an exception that a signal handler raises inside a callback of the garbage collector or
of a weak reference. Each handler therefore also records the signal, so that the program can raise
KeyboardInterrupt at the next piece of text.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watch_interrupts() -> Iterator[Callable[[], None]]:
    """Record interrupts; yield a function that raises KeyboardInterrupt if one occurred."""
    with defer_interrupts(raises=True) as interrupted:

        def check() -> None:
            if interrupted():
                raise KeyboardInterrupt

        yield check


@contextmanager
def defer_interrupts(*, raises: bool = False) -> Iterator[Callable[[], bool]]:
    """Record interrupts; yield a function that returns whether one occurred.

    If `raises` is True, an interrupt also raises KeyboardInterrupt, and Python prints no message if
    it drops this exception. Steps that must complete, such as steps that donate a cache, run in a
    context where `raises` is False.
    """
    interrupted = False

    def note(signum: int, frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        if raises:
            raise KeyboardInterrupt

    def quiet(dropped: Any) -> None:
        if dropped.exc_type is not KeyboardInterrupt:
            hook(dropped)

    if threading.current_thread() is not threading.main_thread():  # only that one receives signals
        yield lambda: False
        return
    before, hook = signal.signal(signal.SIGINT, note), sys.unraisablehook
    if raises:
        sys.unraisablehook = quiet
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook
