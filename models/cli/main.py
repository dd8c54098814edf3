"""The command line: `python -m models generate "prompt" ...`, and `chat`, `plan`, `inspect`.

Texts, answers, plans, or the objects of `--json`, go to stdout and all else to stderr, so that
stdout can be piped. It ends with 0 when there is a text, or a plan that fits; with 2 when it was
asked for something it cannot do; and with 130 when it was interrupted.
"""

import os
import sys
from collections.abc import Sequence

import jax

from models.chat.conversation import ChatError
from models.cli import chat, generate, inspect, plan
from models.cli.arguments import InputError, parser
from models.cli.interrupts import watch_interrupts
from models.cli.screen import note
from models.errors import ModelError

COMMANDS = {
    "generate": generate.run,
    "chat": chat.run,
    "plan": plan.run,
    "inspect": inspect.run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: the arguments, by default those of the process.

    Returns:
      The exit code.
    """
    open_streams()
    try:
        args = parser().parse_args(argv)
        with watch_interrupts() as check_interrupt:
            status = COMMANDS[args.command](args, check_interrupt)
        sys.stdout.flush()
    except (InputError, ModelError, ChatError) as error:
        note(f"error: {error}")
        return 2
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "error: the device has not enough memory for this model and cache; give fewer --cells, "
            "a smaller --ubatch-size, --cache-dtype int8, or --dtype bfloat16.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout has seen enough, as `head` does
        drop_output()
        return 1
    except OSError as error:
        if error.filename is not None:  # not what is printed, but a file
            raise
        note(f"error: the output cannot be written: {error}.")
        drop_output()
        return 2
    return status


def open_streams() -> None:
    """Let a standard stream that was closed read nothing, or lose what is written."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the end)


def drop_output() -> None:
    """Lose what stdout still holds, which Python would write when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
