"""Tokens of a conversation turn by turn, so that each token is computed once.

A template renders a whole conversation. The tokens of a turn are the tokens of the rendered text
after the last answer: the end of this answer, the message, and the beginning of the next answer.
The tokens of an answer are the generated tokens; the text of an answer is not tokenized again. The
tokens of all turns and answers together are the tokens of the whole text, except if:

- the tokenizer merges the beginning of an answer with the text before it, or splits the text of an
  answer into other tokens than the generated tokens;
- the template changes earlier answers, for example strips spaces or removes thoughts;
- the vocabulary adds a space before each piece of text (`Tokenizer.space_first`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.errors import ModelError
from models.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, str]]
"""Messages, each a dict with "role" and "content"."""

_MARK = "\ue000mark\ue001"
"""Placeholder for a text in a template, with private-use characters."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Numbers of tokens that a template adds to a conversation.

    The template adds tokens A before the text of the first user message, and tokens B between an
    answer and the text of the next user message. The longest common ending of A and B, such as
    `<|im_start|>user`, is not included in the numbers.

    keep: number of tokens of A before this ending: `bos` and instructions.
    closing: number of tokens of B before this ending: the end of the answer.
    """

    keep: int
    closing: int


def frame_of(tokenizer: Tokenizer, instructions: Messages) -> Frame:
    """Return the `Frame` of a tokenizer's template for the given instructions.

    Args:
      tokenizer: tokenizer with a chat template.
      instructions: a list with a system message, or an empty list.

    Raises:
      ModelError: If the tokenizer has no template, or the template rejects the messages.
    """
    first, second = _MARK + "1", _MARK + "2"
    asked = [*instructions, {"role": "user", "content": first}]
    before, _, _ = _split_at(tokenizer.chat(asked), first)
    answer = {"role": "assistant", "content": _MARK + "answer"}
    text = tokenizer.chat([*asked, answer, {"role": "user", "content": second}])
    between, _, _ = _split_at(_split_at(text, _MARK + "answer")[2], second)
    # A letter is added and cut off again, since spaces at the end may be other tokens.
    head = tokenizer.prompt(before + "A", special=True)[:-1]
    later = tokenizer.encode(between + "A", special=True)[:-1]
    common = 0
    while common < min(len(head), len(later)) and head[-1 - common] == later[-1 - common]:
        common += 1
    return Frame(keep=len(head) - common, closing=len(later) - common)


def tokens_of_turn(tokenizer: Tokenizer, messages: Messages) -> list[int]:
    """Return the tokens that a new message adds, up to the beginning of the answer.

    Args:
      tokenizer: tokenizer with a chat template.
      messages: messages of the conversation, with the new message last. If an answer precedes the
        new message, the tokens begin with those that the template adds after that answer.

    Raises:
      ModelError: If the tokenizer has no template, or the template rejects the messages.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return tokenizer.prompt(tokenizer.chat(messages), special=True)
    marked = [*messages]
    marked[answers[-1]] = {"role": "assistant", "content": _MARK}
    return tokenizer.encode(_split_at(tokenizer.chat(marked), _MARK)[2], special=True)


def _split_at(text: str, mark: str) -> tuple[str, str, str]:
    before, found, after = text.partition(mark)
    if not found:
        raise ModelError(
            "The model's chat template leaves out messages of a conversation, so it can answer one "
            "at a time: use generate --chat."
        )
    return before, found, after
