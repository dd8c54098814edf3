"""The tokens of a conversation turn by turn, so that what was computed is never told again.

A template writes a whole conversation. Of that a new turn is what stands behind the last answer:
the end of the answer, the message, and the beginning of the next answer. The tokens of an answer
stay those that were generated.

All of it together is what the tokenizer makes of the whole text wherever it cuts texts at the names
of control tokens and a template writes one at each end of an answer. It is not where

- an answer begins with spaces or a line break that the tokenizer joins with what stands before it,
  or was drawn in tokens that the tokenizer would not choose for the same text;
- a template changes earlier answers: strips them, or leaves out what was thought;
- a vocabulary puts a space before each piece of text (`Tokenizer.space_first`).

The model then goes on from what it said, which is what it would see without a template.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.errors import ModelError
from models.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]
"""Each with "role" and "content"."""

_MARK = "\ue000mark\ue001"
"""What stands for a text to find its place in a template: letters that no text has."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What a template writes around messages, in tokens.

    keep: those before the first message's own part: what begins a text, instructions.
    closing: those of a later turn before its message's own part, which close the answer before it.
    """

    keep: int
    closing: int


def frame_of(tokenizer: Tokenizer, instructions: Messages) -> Frame:
    """Return what a template writes around the messages of a conversation.

    Args:
      tokenizer: with a chat template.
      instructions: what comes before the first message: a system message, or nothing.

    Raises:
      ModelError: when there is no template, or it does not take these messages.
    """
    first, second = _MARK + "1", _MARK + "2"
    asked = [*instructions, {"role": "user", "content": first}]
    before, _, _ = _split_at(tokenizer.chat(asked), first)
    text = tokenizer.chat(_with_answer(asked, second))
    between, _, _ = _split_at(_split_at(text, _MARK + "answer")[2], second)
    # With a letter behind, which is cut off again: spaces at an end may be other tokens there.
    head = tokenizer.prompt(before + "A", special=True)[:-1]
    later = tokenizer.encode(between + "A", special=True)[:-1]
    common = 0
    while common < min(len(head), len(later)) and head[-1 - common] == later[-1 - common]:
        common += 1
    return Frame(keep=len(head) - common, closing=len(later) - common)


def tokens_of_turn(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Return the tokens that a new message adds, up to where its answer begins.

    Args:
      tokenizer: with a chat template.
      messages: the conversation, the new message last. Where an answer comes before it, they begin
        with what closes that answer, in place of the stop token that the model said.

    Raises:
      ModelError: when there is no template, or it does not take these messages.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return tokenizer.prompt(tokenizer.chat(messages), special=True)
    marked = [*messages]
    marked[answers[-1]] = {"role": "assistant", "content": _MARK}
    return tokenizer.encode(_split_at(tokenizer.chat(marked), _MARK)[2], special=True)


def _with_answer(asked: Messages, message: str) -> list[Mapping[str, str]]:
    answer = {"role": "assistant", "content": _MARK + "answer"}
    return [*asked, answer, {"role": "user", "content": message}]


def _split_at(text: str, mark: str) -> tuple[str, str, str]:
    before, found, after = text.partition(mark)
    if not found:
        raise ModelError(
            "The model's chat template leaves out messages of a conversation, so it can answer one "
            "at a time: use generate --chat."
        )
    return before, found, after
