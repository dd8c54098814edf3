"""`python -m models`."""

import gc
import os
import signal
import sys
from typing import Any


def leave(signum: int, frame: Any) -> None:
    """End the process at once, without an exception.

    An extension module that is being imported could catch an exception, and the
    process would continue.
    """
    os.write(2, b"\n")
    os._exit(130)


def run() -> int:
    """Run the command line; handle Ctrl-C also during the imports, which take seconds."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, leave)
    # Imports and traces make many objects that stay. A search for cycles takes 7 % of a start.
    gc.set_threshold(100_000)
    from models.cli.main import main

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()


if __name__ == "__main__":
    sys.exit(run())
