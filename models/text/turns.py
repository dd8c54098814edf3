"""Tokens of a conversation turn by turn, so that each token is computed once.

A template renders a whole conversation. The tokens of a turn are those of its text after the last
answer, which are the end of that answer, the message, and the beginning of the next answer. Answers
keep the tokens that were generated. The result equals the tokens of the whole text, except if:

- the tokenizer merges the beginning of an answer with the text before it, or splits the text of an
  answer into other tokens than those generated;
- the template changes earlier answers, for example strips them or removes thoughts;
- the vocabulary adds a space before each piece of text (`Tokenizer.space_first`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.errors import ModelError
from models.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]
"""Each with "role" and "content"."""

_MARK = "\ue000mark\ue001"
"""Placeholder for a text in a template, made of private-use characters."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Numbers of tokens that a template adds.

    keep: before the text of the first message: `bos`, instructions.
    closing: between an answer and the text of the next message.
    """

    keep: int
    closing: int


def frame_of(tokenizer: Tokenizer, instructions: Messages) -> Frame:
    """Return the `Frame` of a tokenizer's template for these instructions.

    Args:
      tokenizer: with a chat template.
      instructions: a system message, or nothing.

    Raises:
      ModelError: If there is no template, or it rejects the messages.
    """
    first, second = _MARK + "1", _MARK + "2"
    asked = [*instructions, {"role": "user", "content": first}]
    before, _, _ = _split_at(tokenizer.chat(asked), first)
    text = tokenizer.chat(_with_answer(asked, second))
    between, _, _ = _split_at(_split_at(text, _MARK + "answer")[2], second)
    # A letter is added and cut off again, since spaces at the end may be other tokens.
    head = tokenizer.prompt(before + "A", special=True)[:-1]
    later = tokenizer.encode(between + "A", special=True)[:-1]
    common = 0
    while common < min(len(head), len(later)) and head[-1 - common] == later[-1 - common]:
        common += 1
    return Frame(keep=len(head) - common, closing=len(later) - common)


def tokens_of_turn(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Return the tokens that a new message adds, up to the beginning of its answer.

    Args:
      tokenizer: with a chat template.
      messages: the conversation, with the new message last. If an answer precedes it, the tokens
        begin with the end of that answer, in place of the model's stop token.

    Raises:
      ModelError: If there is no template, or it rejects the messages.
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
