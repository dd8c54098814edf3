"""The command `chat`: conversations in a terminal or through a pipe."""

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext

import jax
from jax.sharding import Mesh

from jaxkv.generation.filters import make_sampler
from models.chat.conversation import ChatError
from models.chat.speaker import Speaker
from models.cli.arguments import InputError, read_sampling
from models.cli.generate import load_with_progress
from models.cli.interrupts import defer_interrupts
from models.cli.screen import compiling, note, put
from models.cli.talk import COMMANDS, Talk
from models.cli.terminal import Pipe, Terminal, hide_keys
from models.errors import ModelError
from models.meshes import make_mesh

CELLS = 4096
"""Largest default for the number of cells; a model with shorter texts has fewer cells."""


def run(args: argparse.Namespace, check_interrupt: Callable[[], None]) -> int:
    """Run the command `chat`; return the exit code (see `converse`).

    Raises `InputError` for options that cannot be combined. `ChatError` and `ModelError` are raised
    if they occur before the first line of input. For errors of later lines, see `converse`.
    """
    if args.load and args.system:
        raise InputError("use --load without --system, which is for new conversations.")
    if args.load and args.mesh:
        raise InputError("use --load without --mesh: a file is loaded on one device.")
    mesh = make_mesh(args.mesh) if args.mesh else None
    with jax.set_mesh(mesh) if mesh else nullcontext():
        return run_on_mesh(args, check_interrupt, mesh)


def run_on_mesh(
    args: argparse.Namespace, check_interrupt: Callable[[], None], mesh: Mesh | None
) -> int:
    """Run the chat on a mesh or the default device."""
    sampling, seed = read_sampling(args)
    model = load_with_progress(args, mesh)
    speaker = Speaker(
        model=model,
        sampler=make_sampler(**sampling),
        seed=seed,
        max_tokens=args.max_tokens,
        ubatch_size=args.ubatch_size,
        on_full=args.on_full,
    )
    longest = model.checkpoint.config.get("max_position_embeddings") or CELLS
    chat = speaker.begin(
        conversations=args.conversations,
        cells=args.cells or min(CELLS, longest),
        holders=args.holders,
        system=args.system,
    )
    with compiling() as progress:
        talk = Talk(speaker, speaker.compile(chat, progress))
    check_interrupt()
    if args.load:
        talk.take(f"/load {args.load}")
    if sys.stdin.isatty() and sys.stdout.isatty():
        note("Enter sends, Alt+Enter begins a line; Ctrl-C ends an answer, Ctrl-D the chat.")
        note("/help lists the commands.")
        talk.answering = hide_keys
        terminal = Terminal({word: completions_of(talk, word) for word in COMMANDS})
        with defer_interrupts():  # a second Ctrl-C must not end the chat
            return converse(talk, terminal)
    return converse(talk, Pipe())


def converse(talk: Talk, source: Pipe | Terminal) -> int:
    """Handle lines until the input ends; return the exit code.

    If the input is a pipe, `ChatError` and `ModelError` are raised, and an interrupt during an
    answer ends the chat with exit code 130. If the input is a terminal, these errors are printed,
    and the chat continues after an interrupt.
    """
    while True:
        try:
            line = source.read(talk.chat.current)
        except EOFError:
            return 0
        if not line.strip():
            continue
        try:
            talk.take(line)
        except (ChatError, ModelError) as error:
            if not source.interactive:
                raise
            note(f"error: {error}")
        if talk.interrupted and not source.interactive:
            return 130
        if source.interactive:
            put("\n", flush=True)


def completions_of(talk: Talk, word: str) -> Callable[[], list[str]] | None:
    """Return a function that lists the possible arguments of the command `word`.

    Returns None if the argument of the command is a file name.
    """
    takes = COMMANDS[word].takes
    if "FILE" in takes:
        return None
    return lambda: [*talk.chat.conversations] if "NAME" in takes else []
