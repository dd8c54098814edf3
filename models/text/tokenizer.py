"""Text to token ids and back.

A token stands for some bytes. Decoding joins the bytes and reads them as UTF-8, whatever kind of
vocabulary they come from; a character may be spread over several tokens, which is why streaming
needs an object of its own.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.errors import ModelError

# Names that chat models give to the token which ends a turn or a text. Files often declare only
# one of several.
_ENDS = {
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|im_end|>",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Tokenizer:
    """A vocabulary and its rules.

    Attributes:
        to_ids: splits a text into ids; its second argument says whether the names of control
            tokens in the text stand for those tokens.
        to_bytes: the bytes one id stands for; none at all for an id without a token.
        size: how many ids there are.
        control: the control tokens, name to id. They stand for no text.
        bos: the id that begins a sequence, if there is one.
        eos: the id that ends a sequence, if there is one.
        add_bos: whether the model expects `bos` at the start of a prompt.
        space_first: whether encoding puts a space before the text, so that decoding drops one.
        template: the chat template, if there is one.
    """

    to_ids: Callable[[str, bool], list[int]]
    to_bytes: Callable[[int], bytes]
    size: int
    control: Mapping[str, int]
    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    space_first: bool = False
    template: str | None = None

    def __repr__(self) -> str:
        return f"Tokenizer({self.size} tokens, {len(self.control)} of them control tokens)"

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The ids that end a turn or a text, known by declaration or by name."""
        ids = {self.control[name] for name in _ENDS & self.control.keys()}
        return frozenset(ids if self.eos is None else ids | {self.eos})

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text and nothing else; `prompt` adds what begins a sequence.

        Args:
            text: any text.
            special: read the names of control tokens ("<|im_start|>") as those tokens. Leave it
                off for text that others wrote.
        """
        return self.to_ids(text, special)

    def prompt(self, text: str, *, special: bool = False) -> list[int]:
        """The ids that begin a sequence: those of `encode`, after `bos` where the model wants it.

        A chat template may write `bos` itself; it is not put there twice.
        """
        ids = self.encode(text, special=special)
        needs_bos = self.add_bos and self.bos is not None and ids[:1] != [self.bos]
        return [self.bos, *ids] if needs_bos else ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of some ids; bytes that are not UTF-8 become replacement characters.

        Args:
            ids: token ids.
            special: write control tokens by name instead of leaving them out.
        """
        stream = self.stream(special=special)
        text = "".join(map(stream.feed, ids)) + stream.end()
        return text.removeprefix(" ") if self.space_first else text

    def stream(self, *, special: bool = False) -> "Stream":
        """A decoder that takes ids one at a time, to go on from a text that is already there."""
        return Stream(self, special)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for a conversation, up to where the answer begins.

        The result names control tokens, so encode it with `special=True`.

        Args:
            messages: dicts with "role" and "content".
            **variables: more for the template, such as `tools` or `enable_thinking`.
        """
        if self.template is None:
            raise ModelError(
                "This model has no chat template, so it is not one to chat with; "
                "give it a text to continue."
            )
        from models.text.chat import render

        names = {id: name for name, id in self.control.items()}
        tokens = {"bos_token": names.get(self.bos, ""), "eos_token": names.get(self.eos, "")}
        return render(self.template, messages, **{**tokens, **variables})


class Stream:
    """Decodes ids as they come, and gives out whole characters only."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._to_bytes = tokenizer.to_bytes
        self._hidden = frozenset() if special else frozenset(tokenizer.control.values())
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """The text that this id completes; empty while a character is still unfinished."""
        id = int(id)  # an array of one number will do
        return "" if id in self._hidden else self._decoder.decode(self._to_bytes(id))

    def end(self) -> str:
        """What is left when no more ids come: a replacement character, or nothing."""
        return self._decoder.decode(b"", final=True)
