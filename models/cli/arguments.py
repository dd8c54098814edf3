"""Arguments of the command line."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn, get_args

from jaxkv.ops.storage.forms import ENCODED_DTYPES
from models.chat.speaker import HOLDERS, OnFull
from models.cli.help_texts import ARGUMENTS, COMMANDS
from models.cli.numbers import MOST_CELLS, bytes_of, mesh_sizes, number, whole
from models.cli.screen import note
from models.room import Streams

SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0}
"""Default sampling options at temperatures above 0; filters have the defaults of llama.cpp."""

WARMER = "give --temperature 0.8 or so"
"""Advice for different texts."""

DTYPES = ["float32", "bfloat16", "float16"]


class InputError(Exception):
    """Error for a request that is not possible; the message is a whole sentence."""


class Parser(argparse.ArgumentParser):
    """A parser with one-line error messages."""

    def error(self, message: str) -> NoReturn:
        """Raise `InputError`, which the function `main` prints, instead of exiting."""
        raise InputError(message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = Parser(
        prog="python -m models",
        description="Run a model whose keys and values are in a jaxkv cache.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_generate(add_command(commands, "generate"))
    add_chat(add_command(commands, "chat"))
    add_plan(add_command(commands, "plan"))
    add_inspect(add_command(commands, "inspect"))
    return top


Add = Callable[..., None]
"""Function that adds an argument to a command, as `add_argument`, with its text in `ARGUMENTS`."""


def add_command(commands: Any, name: str) -> Add:
    """Add a command without arguments; return a function that adds arguments."""
    command = commands.add_parser(name, **COMMANDS[name])
    command.set_defaults(command=name)

    def add(argument: str, **options: Any) -> None:
        command.add_argument(argument, help=ARGUMENTS[name][argument], **options)

    return add


def add_generate(add: Add) -> None:
    """Add the arguments of `generate`; each mode has its own default for an absent cache option."""
    add("prompts", nargs="*", metavar="PROMPT")
    add("--file", metavar="FILE")
    add("--chat", action="store_true")
    add("--json", action="store_true")
    add("--model", default="smollm2", metavar="MODEL")
    add("--max-tokens", type=whole(1, 2**30), default=128, metavar="N")
    add("--samples", type=whole(1, 2**20), default=1, metavar="N")
    add("--beams", type=whole(1, 2**12), metavar="N")
    add("--speculate", action="store_const", const=3, default=0)
    add_sampling(add, temperature=0.0)
    add("--sequences", type=whole(1, 2**16), metavar="N")
    add("--cells", type=whole(1, MOST_CELLS), metavar="N")
    add("--streams", choices=get_args(Streams))
    add("--ubatch-size", type=whole(1, 2**20), metavar="N")
    add_devices(add)
    add("--no-compilation-cache", dest="compilation_cache", action="store_false")


def add_chat(add: Add) -> None:
    """Add the arguments of `chat`."""
    add("--model", default="smollm2", metavar="MODEL")
    add("--system", metavar="TEXT")
    add("--load", metavar="FILE")
    add("--max-tokens", type=whole(1, 2**30), default=512, metavar="N")
    add("--cells", type=whole(1, MOST_CELLS), metavar="N")
    add("--conversations", type=whole(1, 2**10), default=4, metavar="N")
    add("--holders", type=whole(1, 2**10), default=HOLDERS, metavar="N")
    add("--on-full", choices=get_args(OnFull), default="stop")
    add("--ubatch-size", type=whole(1, 2**20), default=128, metavar="N")
    add_sampling(add, temperature=0.8)
    add_devices(add)
    add("--no-compilation-cache", dest="compilation_cache", action="store_false")


def add_plan(add: Add) -> None:
    """Add the arguments of `plan`."""
    add("--model", default="smollm2", metavar="MODEL")
    add("--sequences", type=whole(1, 2**20), metavar="Q")
    add("--streams", type=whole(1, 2**20), metavar="S")
    add("--cells", type=whole(1, MOST_CELLS), metavar="N")
    add("--ubatch-size", type=whole(1, 2**20), default=512, metavar="N")
    add("--room", type=bytes_of, metavar="BYTES")
    add("--length", type=whole(1, 2**30), metavar="N")
    add("--json", action="store_true")
    add_devices(add)


def add_inspect(add: Add) -> None:
    """Add the arguments of `inspect`."""
    add("file", metavar="FILE")
    add("--json", action="store_true")


def add_sampling(add: Add, *, temperature: float) -> None:
    """Add the sampling options, with a default temperature."""
    add("--temperature", type=number(0, math.inf), default=temperature, metavar="X")
    add("--top-k", type=whole(0, 2**30), metavar="N")
    add("--top-p", type=number(0, 1, above=True), metavar="X")
    add("--min-p", type=number(0, 1), metavar="X")
    add("--seed", type=whole(0, 2**32 - 1), metavar="N")


def add_devices(add: Add) -> None:
    """Add the options for the dtypes and the mesh of params and cache."""
    add("--dtype", choices=DTYPES, default="float32")
    add("--cache-dtype", choices=[*DTYPES, *ENCODED_DTYPES])
    add("--rotate", action="store_true")
    add("--mesh", type=mesh_sizes, metavar="NAME=N,...")


def read_sampling(args: argparse.Namespace, *, beams: bool = False) -> tuple[dict[str, Any], int]:
    """Return the options of `make_sampler` (empty for greedy sampling) and the seed.

    At temperature 0, sampling options have no effect, and a note names the options that are given.
    The note gives `--beams` as the reason if `beams` is True, otherwise the temperature.
    """
    choices = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    options = SAMPLING | choices
    seed = options.pop("seed")
    if args.temperature:
        return {"temperature": args.temperature, **options}, seed
    if choices:
        names = ", ".join("--" + name.replace("_", "-") for name in choices)
        where = "with --beams" if beams else f"at temperature 0: {WARMER}"
        note(f"note: {names} has no effect {where}")
    return {}, seed


def check_together(args: argparse.Namespace) -> None:
    """Raise `InputError` for options that cannot be combined."""
    for name in ("samples", "speculate"):
        if (args.file or args.beams) and getattr(args, name) not in (0, 1):
            raise InputError(f"use --{name} without --file and --beams.")
    if args.file and (args.prompts or args.beams):
        raise InputError("use --file without PROMPT and --beams.")
    if args.sequences and not args.file:
        raise InputError("use --sequences only with --file.")
    if args.beams and args.streams:
        raise InputError("use --beams without --streams: beams share the cells of the prompt.")
    if args.beams and args.temperature:
        raise InputError("use --beams without --temperature: beams are not sampled.")
