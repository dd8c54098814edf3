"""The command `generate`: continue texts, or answer messages."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from time import perf_counter

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.loops.sampling import make_sampler
from models.cli.arguments import SAMPLING, InputError
from models.cli.screen import Screen, compiling, loading, megabytes, note, plural, put
from models.generate import Generated, cells_for, generate_texts
from models.model import Model, load
from models.several import search_texts, serve_texts


def run(args: argparse.Namespace, check_interrupt: Callable[[], None]) -> int:
    """Run the command `generate`; at each piece of text it looks for an interrupt.

    Returns:
      The exit code: 130 if it was interrupted, and what there was of the texts is shown.
    """
    written = read_prompts(args)
    check_prompts(written)
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    if given and args.temperature == 0:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        note(f"note: {names} has no effect at temperature 0: give --temperature 0.8 or so")
    options = SAMPLING | given
    seed = options.pop("seed")
    sampler = make_sampler(temperature=args.temperature, **options)

    model = load_with_progress(args.model, args.dtype)
    prompts = [encode(model, prompt, args.chat) for prompt in written]
    warn_of_control(model, written, args.chat)
    if args.file:
        return show_served(model, written, prompts, args, options, seed)
    if args.beams:
        return show_beams(model, written, prompts, args)
    shown = [prompt for prompt in written for _ in range(args.samples)]
    screen = None if args.json else Screen(shown, chat=args.chat)

    def show(which: int, text: str, ended: bool) -> None:
        check_interrupt()
        if screen:
            screen(which, text, ended)

    with compiling() as progress:
        try:
            made = generate_texts(
                model,
                prompts,
                sampler=sampler,
                seed=seed,
                samples=args.samples,
                tries=args.speculate,
                max_tokens=args.max_tokens,
                cells=args.cells,
                ubatch_size=args.ubatch_size,
                streams=args.streams,
                on_text=show,
                on_compile=progress,
            )
        except jaxkv.RefusedError:
            raise InputError(too_long(prompts, args)) from None
    if args.json:
        for prompt, text in zip(shown, made.texts, strict=True):
            print(json.dumps({"prompt": prompt, **vars(text)}))
    elif made.interrupted:
        note("")  # the text that was being written has no end of line
    early = sum(text.finish == "full" for text in made.texts)
    if early:
        note(
            f"note: the cache is full: {made.used} of its {made.cells} cells are used and "
            f"{plural(early, 'text')} would go on; give more --cells"
        )
    note(summary(made))
    return 130 if made.interrupted else 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts: arguments, stdin where one is a dash, or the lines of a file.

    Raises:
      InputError: when there are none, both kinds are given, or options do not go together.
    """
    for name in ("samples", "speculate"):
        if (args.file or args.beams) and getattr(args, name) not in (0, 1):
            raise InputError(f"--{name} does not go with --file or --beams.")
    if args.file and (args.prompts or args.beams):
        raise InputError("--file goes with neither PROMPT nor --beams.")
    if args.beams and args.temperature:
        raise InputError("--beams takes the most probable texts: leave --temperature out.")
    if args.file:
        try:
            with open(args.file, encoding="utf-8") as lines:
                return [line.rstrip("\n") for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{args.file} cannot be read: {error}.") from None
    if not args.prompts:
        raise InputError("give a PROMPT, - to read it from stdin, or --file FILE.")
    return [sys.stdin.read() if prompt == "-" else prompt for prompt in args.prompts]


def show_served(
    model: Model,
    written: Sequence[str],
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
    options: dict,
    seed: int,
) -> int:
    """Run the prompts of a file through few sequences, and show each text when it has ended."""
    sampling = {"temperature": args.temperature, **options} if args.temperature else {}
    began, tokens = perf_counter(), 0
    note(f"running {plural(len(prompts), 'prompt')} in {args.sequences} sequences ...")
    given = {"sequences": args.sequences, "max_tokens": args.max_tokens, "cells": args.cells}
    try:
        for i, text in serve_texts(model, prompts, sampling=sampling, seed=seed, **given):
            tokens += len(text.tokens)
            if args.json:
                print(json.dumps({"prompt": written[i], "index": i, **vars(text)}), flush=True)
            else:
                put(f"=== {i + 1} of {len(prompts)}\n{written[i]}{text.text}\n\n")
                sys.stdout.flush()
    except ValueError as error:
        raise InputError(f"a prompt does not fit: {error}; give more --cells.") from None
    took = perf_counter() - began
    note(f"generation: {tokens} tokens in {took:.1f} s, compiling included")
    return 0


def show_beams(
    model: Model,
    written: Sequence[str],
    prompts: Sequence[Sequence[int]],
    args: argparse.Namespace,
) -> int:
    """Search for the most probable texts of each prompt, and show the best."""
    for prompt, tokens in zip(written, prompts, strict=True):
        note(f"searching with {plural(args.beams, 'beam')} ...")
        given = {"max_tokens": args.max_tokens, "cells": args.cells}
        try:
            found = search_texts(
                model, tokens, width=args.beams, ubatch_size=args.ubatch_size, **given
            )
        except jaxkv.RefusedError:
            raise InputError(too_long([tokens], args)) from None
        if args.json:
            for text, rank in found:
                print(json.dumps({"prompt": prompt, "logprob": rank, **vars(text)}))
        else:
            put(f"{'' if args.chat else prompt}{found[0][0].text}\n")
        sys.stdout.flush()
    return 0


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


def warn_of_control(model: Model, prompts: Sequence[str], chat: bool) -> None:
    """Say which prompts hold names of control tokens, and how those are read."""
    how = "as a control token, as in a template" if chat else "as plain text"
    for i, prompt in enumerate(prompts, 1):
        names = sorted(name for name in model.tokenizer.control if name in prompt)
        if names:
            which = "the prompt" if len(prompts) == 1 else f"prompt {i}"
            note(f"note: {which} holds {', '.join(names)}, which is read {how}")


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
    try:
        with loading() as progress:
            model = load(name, dtype=jnp.dtype(dtype), progress=progress)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror or error}.") from error
    jax.block_until_ready(model.weights)
    size = sum(leaf.size for leaf in jax.tree.leaves(model.weights)) / 1e6
    kind = f"{model.checkpoint.architecture}, {size:.1f}M weights in {dtype}"
    note(
        f"loaded {name} ({kind}, {megabytes(jaxkv.nbytes(model.weights))}) "
        f"in {perf_counter() - began:.1f} s"
    )
    return model


def too_long(prompts: Sequence[Sequence[int]], args: argparse.Namespace) -> str:
    """Say that the prompts do not fit, and what would help."""
    cells = cells_for(prompts, args.max_tokens, args.streams, samples=args.beams or args.samples)
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
    tokens = made.prompt_tokens
    parts = [f"prompt: {plural(tokens, 'token')}, {tokens / made.prompt_seconds:.1f}/s"]
    if made.decoded:
        parts.append(
            f"generation: {made.decoded} tokens, {made.decoded / made.decode_seconds:.1f}/s"
        )
    if made.tried:
        parts.append(f"guesses: {made.accepted} of {made.tried} held")
    parts += [
        f"cells: {made.used} of {made.cells} used",
        f"cache: {megabytes(made.nbytes)}",
        f"compiles after warm-up: {made.compiles}",
    ]
    return " | ".join(parts)
