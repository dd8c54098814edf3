"""What is said of texts when they are there: objects, notes and the summary."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax

from models.cli.screen import axes_of, megabytes, note, plural
from models.costs import whole_bytes
from models.model import Model
from models.texts import Text


def print_json(prompt: str, text: Text, **more: Any) -> None:
    """Print a text as an object."""
    print(json.dumps({"prompt": prompt, **more, **vars(text)}), flush=True)


def note_full(texts: Sequence[Text], how: str = "") -> None:
    """Say how many texts ended because no cell was left, if any did."""
    early = sum(text.finish == "full" for text in texts)
    if early:
        note(
            f"note: the cache is full: {how}{plural(early, 'text')} would go on; give more --cells"
        )


def note_interrupted(done: int, count: int) -> None:
    """Say how many prompts an interrupt left done."""
    note(f"note: interrupted with {done} of {plural(count, 'prompt')} done")


def note_summary(parts: Sequence[str], nbytes: int, compiles: int) -> None:
    """Say in one line what a run took; compiling and loading are no part of its speeds."""
    ends = f"cache: {megabytes(nbytes)}", f"compiles after warm-up: {compiles}"
    note(" | ".join((*parts, *ends)))


def note_shares(model: Model) -> None:
    """Say how many bytes of weights a device of the mesh has, and which of them all have, why."""
    share = sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(model.params)
    )
    parts = [f"{megabytes(size)} on all ({reason})" for reason, size in whole_bytes(model).items()]
    note(
        " | ".join(
            (
                f"mesh {axes_of(model.mesh.shape)}: {megabytes(share)} of weights on each device",
                *parts,
            )
        )
    )


def tokens_of(texts: Sequence[Text]) -> tuple[int, int]:
    """Count the tokens of prompts, and those of the texts after them."""
    return sum(len(text.prompt_tokens) for text in texts), sum(len(text.tokens) for text in texts)


def rate(tokens: int, seconds: float) -> str:
    """Write how many tokens there are, and how many come in a second."""
    return f"{plural(tokens, 'token')}, {tokens / max(seconds, 1e-9):.1f}/s"
