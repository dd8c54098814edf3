"""Texts during and after generation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import jaxkv
from models.text.tokenizer import Tokenizer

Finish = Literal["stop", "length", "full", "no token", "nonfinite logits", "interrupted"]
"""Reason why a text ended: a stop token, `max_tokens`, a full cache, no allowed next token, logits
with NaN or +inf, or an interrupt."""


def finish_of(reason: int) -> Finish:
    """Return why a text ended, from the text's value in the field `reason` of `DecodeState`.

    The result is wrong for a text that ended with a stop token or at the limit of tokens: the field
    does not contain these reasons.
    """
    others: dict[int, Finish] = {
        jaxkv.Reason.OK: "no token",
        jaxkv.Reason.NONFINITE_LOGITS: "nonfinite logits",
    }
    return others.get(reason, "full")


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError if there is no prompt, or if a prompt has no tokens."""
    short = [i for i, prompt in enumerate(prompts, 1) if not len(prompt)]
    if short or not len(prompts):
        problem = f"none in prompt {short[0]}" if short else "no prompts"
        raise ValueError(
            f"expected prompts of at least one token each, got {problem}; leave empty ones out"
        )


OnText = Callable[[int, str, bool], None]
"""Function of the number of a text, a new piece of the text, and whether the piece is the last."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """A generated text; the field `tokens` excludes the prompt and the stop token."""

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish: Finish

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        tokens: Sequence[int],
        finish: Finish,
        *,
        tokenizer: Tokenizer,
        stop_tokens: frozenset[int],
    ) -> Self:
        """Return the `Text` of generated tokens; if the last token is a stop token, remove it."""
        tokens = [int(token) for token in tokens]
        if tokens and tokens[-1] in stop_tokens:
            tokens, finish = tokens[:-1], "stop"
        return cls(
            prompt_tokens=[int(token) for token in prompt],
            tokens=tokens,
            text=tokenizer.decode(tokens),
            finish=finish,
        )


@dataclass
class Writer:
    """A text during generation.

    index: number of the text, passed to `on_text`.
    on_text: called with each new piece of the text.
    tokens: generated tokens without the stop token; `pieces` contains the text of these tokens.
    finish: why the text ended; None while the text is growing.
    """

    index: int
    tokenizer: Tokenizer
    stop_tokens: frozenset[int]
    max_tokens: int
    on_text: OnText | None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: Finish | None = None

    def __post_init__(self):
        self.stream = self.tokenizer.stream()

    def write(self, tokens: Sequence[int]) -> int:
        """Append tokens until the text ends; return how many were used, including a stop token."""
        if self.finish is not None:
            return 0
        piece, num_taken = "", 0
        finish = None
        for token in map(int, tokens):
            num_taken += 1
            if token in self.stop_tokens:
                finish = "stop"
                break
            self.tokens.append(token)
            piece += self.stream.feed(token)
            if len(self.tokens) == self.max_tokens:
                finish = "length"
                break
        if finish is not None:
            self.end(finish, piece)
        elif piece:
            self._emit(piece, False)
        return num_taken

    def end(self, finish: Finish, piece: str = "") -> None:
        """End the text with a last piece.

        The last piece is `piece`, and a replacement character if the last character is incomplete.
        """
        self.finish = finish
        self._emit(piece + self.stream.end(), True)

    def outcome(self, prompt_tokens: list[int]) -> Text:
        """Return the result as a `Text`; call this method after the text has ended."""
        return Text(
            prompt_tokens=prompt_tokens,
            tokens=self.tokens,
            text="".join(self.pieces),
            finish=self.finish,
        )

    def _emit(self, piece: str, done: bool) -> None:
        self.pieces.append(piece)
        if self.on_text is not None:
            self.on_text(self.index, piece, done)
