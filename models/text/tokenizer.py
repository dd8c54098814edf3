"""Tokenizers, which convert text to token ids and token ids to text.

Each token is a string of bytes. Decoding joins the bytes of tokens and reads them as UTF-8. A
character may extend over several tokens, so decoding token by token requires a `Stream`.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import ModelError, first_line

# Names of tokens that end a turn or a text. GGUF files often declare only one of several.
ENDS = {
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|return|>",
    "<|call|>",
    "<|tool_response>",
    "<turn|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Tokenizer:
    """A vocabulary with rules for splitting text into tokens.

    to_ids: function that splits a text into token ids. If the second argument of the function is
      True, names of control tokens in the text become control tokens.
    to_bytes: function that returns the bytes of a token id; empty for an unknown id.
    size: number of token ids.
    control: ids of control tokens, by name; control tokens have no text.
    eos: id of the token that ends a sequence, or None.
    prefix: ids that begin a prompt.
    suffix: ids that end a prompt, such as "</s>" for T5.
    space_first: whether encoding adds a space before the text; `decode` removes this space.
    render: function that renders the chat template for a list of messages, with the variables of
      the template as keywords; None if the model has no template.
    """

    to_ids: Callable[[str, bool], list[int]]
    to_bytes: Callable[[int], bytes]
    size: int
    control: Mapping[str, int]
    eos: int | None = None
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    space_first: bool = False
    render: Callable[..., str] | None = None

    def __repr__(self) -> str:
        return f"Tokenizer({self.size} tokens, {len(self.control)} of them control tokens)"

    @property
    def named_ends(self) -> frozenset[int]:
        """Ids of control tokens whose names say that they end a turn or a text ("<|im_end|>")."""
        names = ENDS & self.control.keys()
        if names & {"<|return|>", "<|call|>"}:  # of gpt-oss, whose messages end with "<|end|>"
            names -= {"<|end|>"}
        return frozenset(self.control[name] for name in names)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text, without `prefix` and `suffix`, see `prompt`.

        Args:
          text: any string.
          special: whether names of control tokens ("<|im_start|>") become control tokens. Use False
            for text that is not trusted.
        """
        return self.to_ids(text, special)

    def prompt(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text that begins a sequence, with `prefix` and `suffix`.

        If the text begins with `prefix`, as the text of a chat template may, it is not repeated.
        With `special=True`, `suffix` is not added, since templates end with the tokens that they
        require.
        """
        ids, prefix = self.encode(text, special=special), list(self.prefix)
        ids = ids if ids[: len(prefix)] == prefix else prefix + ids
        return ids if special else ids + list(self.suffix)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become replacement characters.

        Args:
          ids: token ids.
          special: whether the text includes the names of control tokens.
        """
        stream = self.stream(special=special)
        text = "".join(map(stream.feed, ids)) + stream.end()
        return text.removeprefix(" ") if self.space_first else text

    def stream(self, *, special: bool = False) -> "Stream":
        """Return a decoder that decodes token ids one at a time.

        The decoder does not remove a space at the beginning, since the text may follow other text.
        """
        return Stream(self, special)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt of a conversation, up to the beginning of the answer.

        The prompt contains names of control tokens, so encode the prompt with `special=True`.

        Args:
          messages: dicts with "role" and "content".
          **variables: variables of the template, such as `tools` or `enable_thinking`.
        """
        if self.render is None:
            raise ModelError("This model has no chat template; give it a text to continue.")
        try:
            return self.render(list(messages), **variables)
        except Exception as error:  # a template can raise any exception
            raise ModelError(
                f"These messages do not fit the model's chat template: {first_line(error)}."
            ) from error


class Stream:
    """Decoder of token ids, one at a time, into whole characters."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._to_bytes = tokenizer.to_bytes
        self._hidden = frozenset() if special else frozenset(tokenizer.control.values())
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """Return the characters that a token id completes; "" if it completes no character."""
        id = int(id)  # arrays of one number are accepted
        return "" if id in self._hidden else self._decoder.decode(self._to_bytes(id))

    def end(self) -> str:
        """Return a replacement character if the last character is incomplete; otherwise ""."""
        return self._decoder.decode(b"", final=True)
