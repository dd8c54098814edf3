"""Output about finished texts: JSON, notes and a summary."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax

from models.cli.screen import megabytes, note, plural
from models.costs import whole_bytes
from models.meshes import axes_of
from models.model import Model
from models.texts import Text


def print_json(prompt: str, text: Text, **more: Any) -> None:
    """Print a text as a JSON object."""
    print(json.dumps({"prompt": prompt, **more, **vars(text)}), flush=True)


def longest_of(model: Model) -> float:
    """Return the number of tokens of the longest text of a model; infinity if it is unknown."""
    return model.checkpoint.config.get("max_position_embeddings", math.inf)


def note_ends(model: Model, texts: Sequence[Text], used: str = "") -> None:
    """For each cause, print the number of texts that the cache or the logits ended.

    Also print the number of texts that are too long for the model. `used` is a clause about the
    used cells.
    """
    causes = {
        "full": (f"the cache is full: {used}", "give more --cells"),
        "nonfinite logits": ("the logits contain NaN or infinity: ", "check the weights"),
        "no token": ("every next token has probability 0: ", "check the weights"),
    }
    for finish, (cause, remedy) in causes.items():
        early = sum(text.finish == finish for text in texts)
        if early:
            note(f"note: {cause}{plural(early, 'text')} ended early; {remedy}")
    longest = longest_of(model)
    late = sum(len(text.prompt_tokens) + len(text.tokens) > longest for text in texts)
    if late:
        which = f"the longest text of the model has {longest:,} tokens"
        note(f"note: {which}: {plural(late, 'text')} ended later; give fewer --max-tokens")


def note_interrupted(done: int, count: int) -> None:
    """Print the number of prompts that were finished before an interrupt."""
    note(f"note: interrupted with {done} of {plural(count, 'prompt')} done")


def note_summary(parts: Sequence[str], nbytes: int, compiles: int) -> None:
    """Print the statistics of a run in one line."""
    ends = f"cache: {megabytes(nbytes)}", f"compiles after warm-up: {compiles}"
    note(" | ".join((*parts, *ends)))


def note_shares(model: Model) -> None:
    """Print the bytes of params on each device, and the bytes of replicated params by reason."""
    share = sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in jax.tree.leaves(model.params)
    )
    parts = [f"mesh {axes_of(model.mesh.shape)}: {megabytes(share)} of weights on each device"]
    parts += [f"{megabytes(size)} on all ({reason})" for reason, size in whole_bytes(model).items()]
    note(" | ".join(parts))


def tokens_of(texts: Sequence[Text]) -> tuple[int, int]:
    """Return two numbers of tokens: in all prompts, and in all generated texts."""
    return sum(len(text.prompt_tokens) for text in texts), sum(len(text.tokens) for text in texts)


def rate(tokens: int, seconds: float) -> str:
    """Format a number of tokens and the tokens per second."""
    return f"{plural(tokens, 'token')}, {tokens / max(seconds, 1e-9):.1f}/s"
