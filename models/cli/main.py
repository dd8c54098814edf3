"""The command line: `generate`, `chat`, `plan` and `inspect`.

Results (texts, answers, plans, JSON) are written to stdout, and all other output to stderr. Exit
codes:

- 0: success;
- 1: the reader of stdout closed the pipe;
- 2: the request is not possible, or the output cannot be written;
- 130: interrupt.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import jax
from platformdirs import user_cache_path

from models.chat.conversation import ChatError
from models.cli.arguments import InputError, parser
from models.cli.interrupts import watch_interrupts
from models.cli.screen import note
from models.errors import ModelError

MAX_CACHE_BYTES = 10**9
"""Maximum size of the compilation cache; the least recently used programs are deleted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, by default with the arguments in `sys.argv`; return the exit code."""
    open_streams()
    try:
        args = parser().parse_args(argv)
        with watch_interrupts() as check_interrupt:
            if getattr(args, "compilation_cache", False):
                use_compilation_cache()
            # A command imports only its own libraries, since imports are much of a start.
            command = import_module(f"models.cli.{args.command}")
            status = command.run(args, check_interrupt)
        sys.stdout.flush()
    except (InputError, ModelError, ChatError) as error:
        note(f"error: {error}")
        return 2
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "error: not enough memory on the device for this model and cache; give fewer --cells, "
            "a smaller --ubatch-size, --cache-dtype int8, or --dtype bfloat16.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
        drop_output()
        return 1
    except OSError as error:
        if error.filename is not None:  # a file, not stdout
            raise
        note(f"error: the output cannot be written: {error}.")
        drop_output()
        return 2
    return status


def open_streams() -> None:
    """Open the null device in place of each closed standard stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open until exit)


def use_compilation_cache() -> None:
    """Store compiled programs in the user's cache folder, unless JAX is set to another folder."""
    if jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return
    folder = user_cache_path("jaxkv") / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        note(f"compiled programs are not stored: {folder} cannot be made ({error.strerror}).")
        return
    if not os.access(folder, os.W_OK):
        note(f"compiled programs are not stored: {folder} is not writable.")
        return
    note(f"compiled programs are stored in {folder}")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if jax.config.jax_compilation_cache_max_size < 0:  # JAX's default, no limit
        jax.config.update("jax_compilation_cache_max_size", MAX_CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def drop_output() -> None:
    """Discard the buffered output that Python would write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
