"""Prompts: sources, checks and tokens."""

import argparse
import sys
from collections.abc import Sequence

from models.cli.arguments import InputError
from models.cli.screen import brief, note
from models.model import Model


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts: the lines of the file `--file`, or the arguments.

    The argument "-" is replaced by the text of stdin.

    Raises `InputError` if there is no prompt, if a prompt is empty, or if a file or stdin
    cannot be read.
    """
    if args.file:
        prompts = read_file(args.file)
    else:
        if not args.prompts:
            raise InputError("give a PROMPT, - to read it from stdin, or --file FILE.")
        if args.prompts.count("-") > 1:
            raise InputError("give - once: stdin is one prompt.")
        prompts = [read_stdin() if prompt == "-" else prompt for prompt in args.prompts]
    check_prompts(prompts)
    return prompts


def read_file(name: str) -> list[str]:
    """Return the lines of a file, without blank lines."""
    try:
        with open(name, encoding="utf-8") as lines:
            prompts = [line.removesuffix("\n") for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name} cannot be read: {error}.") from None
    if not prompts:
        raise InputError(f"{name} has no prompts: write one on each line.")
    return prompts


def read_stdin() -> str:
    """Return the text of stdin, without the final line end."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"stdin cannot be read: {error}.") from None


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise `InputError` for a prompt that is empty or not UTF-8."""
    for i, prompt in enumerate(prompts, 1):
        which = "the prompt" if len(prompts) == 1 else f"prompt {i} of {len(prompts)}"
        if not prompt.strip():
            raise InputError(f"{which} is empty; give it some text.")
        try:
            prompt.encode()
        except UnicodeEncodeError:  # arguments with bytes that are not UTF-8
            raise InputError(f"{which} is not valid UTF-8; give a text that is.") from None


def encode(model: Model, prompt: str, chat: bool) -> list[int]:
    """Return the tokens of a prompt; raise `InputError` if the prompt has no tokens."""
    text = prompt
    if chat:
        text = model.tokenizer.chat([{"role": "user", "content": prompt}])
    # Templates contain names of control tokens; names in a message become tokens too.
    tokens = model.tokenizer.prompt(text, special=chat)
    if not tokens:
        raise InputError(f"the model has no tokens for the prompt {brief(prompt)!r}; give another.")
    return tokens


def warn_of_control(model: Model, prompts: Sequence[str], chat: bool) -> None:
    """Print names of control tokens in prompts, and whether they become tokens or plain text."""
    how = "as a control token" if chat else "as plain text"
    for i, prompt in enumerate(prompts, 1):
        names = sorted(name for name in model.tokenizer.control if name in prompt)
        if names:
            which = "the prompt" if len(prompts) == 1 else f"prompt {i}"
            note(f"note: {which} contains {', '.join(names)}, which is read {how}")
