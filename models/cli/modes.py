"""Modes of `models generate`: parallel prompts, queued prompts of a file, and beam search."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import jaxkv
from jaxkv.generation.filters import make_sampler
from models.cli.arguments import InputError
from models.cli.report import note_ends, note_interrupted, note_summary, print_json, rate, tokens_of
from models.cli.screen import Screen, compiling, heading, note, plural, put
from models.compiling import counting
from models.generate import generate_texts
from models.model import Model
from models.room import cells_for
from models.run import Options
from models.search import Found, Search
from models.serving import Serving, TooLongError
from models.texts import Text


@dataclass(frozen=True, kw_only=True)
class Job:
    """Argument of the modes of `models generate`.

    A mode is a function of a `Job`; it runs the job and returns the exit code.

    written: prompts as the user wrote them, before the conversion to the tokens in `prompts`.
    sampling: options of `make_sampler`; empty for greedy sampling.
    check_interrupt: function that raises KeyboardInterrupt if an interrupt occurred.
    """

    model: Model
    written: list[str]
    prompts: list[list[int]]
    sampling: dict[str, Any]
    seed: int
    args: argparse.Namespace
    check_interrupt: Callable[[], None]

    def given(self, *names: str) -> dict[str, Any]:
        """Return the arguments with these names, without those that are None."""
        values = {name: getattr(self.args, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


def continue_prompts(job: Job) -> int:
    """Continue all prompts in parallel, and print texts while they are generated."""
    args = job.args
    options = Options(
        sampler=make_sampler(**job.sampling),
        seed=job.seed,
        tries=args.speculate,
        **job.given("samples", "max_tokens", "cells", "ubatch_size", "streams"),
    )
    shown = [prompt for prompt in job.written for _ in range(args.samples)]
    screen = None if args.json else Screen(shown, chat=args.chat)

    def show(which: int, text: str, ended: bool) -> None:
        job.check_interrupt()
        if screen:
            screen(which, text, ended)

    with compiling() as progress:
        try:
            made = generate_texts(
                job.model, job.prompts, options, on_text=show, on_compile=progress
            )
        except jaxkv.PlanRefusedError:
            split = options.streams == "split"
            where = "each stream of the cache" if split else "the cache"
            cells = cells_for(job.prompts, args.max_tokens, options.streams, samples=args.samples)
            raise InputError(too_long(job, where, cells, alone=split)) from None
    if args.json:
        for prompt, text in zip(shown, made.texts, strict=True):
            print_json(prompt, text)
    elif made.interrupted:
        note("")  # the interrupted text has no line end
    note_ends(job.model, made.texts, f"{made.used} of {made.cells} cells are used and ")
    parts = [f"prompt: {rate(made.prompt_tokens, made.prompt_seconds)}"]
    if made.decoded:
        parts.append(f"generation: {rate(made.decoded, made.decode_seconds)}")
    if made.tried:
        parts.append(f"drafts: {made.accepted} of {made.tried} accepted")
    parts.append(f"cells: {made.used} of {made.cells} used")
    note_summary(parts, made.nbytes, made.compiles)
    return 130 if made.interrupted else 0


def serve_file(job: Job) -> int:
    """Generate a text for each prompt of a file, and print each text when it is finished."""
    texts, interrupted = [], False
    sizes = job.given("sequences", "max_tokens", "cells", "ubatch_size", "streams")
    try:
        serving = Serving(job.model, job.prompts, sampling=job.sampling, seed=job.seed, **sizes)
    except TooLongError as error:
        raise InputError(f"{error}; give --cells {error.enough}.") from None

    def show(i: int, text: Text) -> None:
        texts.append(text)
        show_whole(job, i, text, first=len(texts) == 1, index=i)

    with counting() as compiled:
        note("compiling ...")
        began = perf_counter()
        serving.compile()
        warm = compiled()
        note(f"compiled {plural(warm, 'program')} in {perf_counter() - began:.1f} s")
        count, sequences = len(job.prompts), plural(serving.sequences, "sequence")
        note(f"running {plural(count, 'prompt')} in {sequences} ...")
        began = perf_counter()
        try:
            for i, text in serving.texts(job.check_interrupt):
                show(i, text)
        except KeyboardInterrupt:
            interrupted = True
            for i, text in serving.rest():
                show(i, text)
        seconds, compiles = perf_counter() - began, compiled() - warm
    done = sum(text.finish != "interrupted" for text in texts)
    if interrupted:
        note_interrupted(done, count)
    note_ends(job.model, texts)
    read, made = tokens_of(texts)
    parts = [
        f"prompts: {done} of {count}, {plural(read, 'token')}",
        f"generation: {rate(made, seconds)} with the prompts",
        f"cells: {serving.cells}",
    ]
    note_summary(parts, serving.nbytes, compiles)
    return 130 if interrupted else 0


def search_beams(job: Job) -> int:
    """Search for the most probable texts of each prompt; print the best one, or all as JSON."""
    args, count, interrupted = job.args, len(job.prompts), False
    sizes = job.given("max_tokens", "cells", "ubatch_size")
    try:
        search = Search(job.model, job.prompts, width=args.beams, **sizes)
    except jaxkv.PlanRefusedError:
        needed = [
            cells_for([prompt], args.max_tokens, samples=args.beams) for prompt in job.prompts
        ]
        raise InputError(too_long(job, "the cache", max(needed), alone=True)) from None
    found: list[Found] = []
    shown = None if args.json else 1  # the best text, or all
    with counting() as compiled:
        with compiling() as progress:
            search.compile(progress)
        warm = compiled()
        note(f"searching with {plural(args.beams, 'beam')} ...")
        try:
            for i, result in enumerate(search):
                found.append(result)
                for text, logprob in zip(result.texts[:shown], result.logprobs, strict=False):
                    show_whole(job, i, text, first=i == 0, logprob=logprob)
                job.check_interrupt()
        except KeyboardInterrupt:
            interrupted = True
            note_interrupted(len(found), count)
        compiles = compiled() - warm
    best = [result.texts[0] for result in found]
    note_ends(job.model, best)
    read, made = tokens_of(best)
    parts = [
        f"prompts: {len(found)} of {count}, "
        f"{rate(read, sum(result.prompt_seconds for result in found))}",
        f"generation: {rate(made, sum(result.seconds for result in found))}",
        f"cells: {search.cells}",
    ]
    note_summary(parts, search.nbytes, compiles)
    return 130 if interrupted else 0


def show_whole(job: Job, which: int, text: Text, *, first: bool, **more: Any) -> None:
    """Print a complete text, as a JSON object with the values `more` if `--json` is given."""
    if job.args.json:
        print_json(job.written[which], text, **more)
    else:
        head = heading(job.written, which, chat=job.args.chat)
        put("\n" * (not first) + head + text.text + "\n", flush=True)


def too_long(job: Job, where: str, enough: int, *, alone: bool) -> str:
    """Return the error message for prompts that need more cells than `--cells`.

    The message says that `where` (the cache or each stream of it) has too few cells, and that
    `enough` cells are sufficient. If `alone` is True, the cells contain only one prompt at a time,
    otherwise all prompts.
    """
    lengths = [len(prompt) for prompt in job.prompts]
    if len(lengths) == 1:
        which, tokens = "the prompt has", lengths[0]
    elif alone:
        which, tokens = "the longest prompt has", max(lengths)
    else:
        which, tokens = f"the {len(lengths)} prompts together have", sum(lengths)
    return (
        f"{which} {tokens} tokens and {where} has {job.args.cells} cells; give --cells {enough} "
        "to fit the text too, or a shorter prompt."
    )
