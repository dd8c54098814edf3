"""One text: while it grows, and what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import jaxkv
from models.text.tokenizer import Tokenizer

Finish = Literal["stop", "length", "full", "no token", "nonfinite logits", "interrupted"]
"""Why a text ends: a stop token came, it has all the tokens asked for, the cache is full, no token
was allowed to come next, its logits hold NaN or +inf, or the run was interrupted."""


def finish_of(reason: int) -> Finish:
    """Return why a text ended that has neither a stop token nor all of its tokens.

    reason: of its `DecodeState`.
    """
    others: dict[int, Finish] = {
        jaxkv.Reason.OK: "no token",
        jaxkv.Reason.NONFINITE_LOGITS: "nonfinite logits",
    }
    return others.get(reason, "full")


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError unless there are prompts, of at least one token each."""
    short = [i for i, prompt in enumerate(prompts, 1) if not len(prompt)]
    if short or not len(prompts):
        problem = f"none in prompt {short[0]}" if short else "no prompts"
        raise ValueError(
            f"expected prompts of at least one token each, got {problem}; leave empty ones out"
        )


OnText = Callable[[int, str, bool], None]
"""`(which text, what is new of it, whether it ends there)`."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """What came of one prompt.

    prompt_tokens: what it began with.
    tokens: what was generated, without the stop token.
    text: those tokens in characters.
    finish: why it ends.
    """

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
        """Return the text of all that was generated; a stop token at its end is none of it."""
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
    """One text while it grows.

    index: which text, for `on_text`.
    tokenizer: turns tokens into characters.
    stop_tokens: the tokens that end it.
    max_tokens: the most tokens of it.
    on_text: called with what is new of it.
    tokens: what was generated, without the stop token.
    pieces: those tokens in characters, piece by piece.
    finish: why it ends, None as long as it does not.
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
        """Take what was generated, up to the end of the text; returns how many tokens that is."""
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
            self._tell(piece, False)
        return num_taken

    def end(self, finish: Finish, piece: str = "") -> None:
        """End the text, after a last piece of it."""
        self.finish = finish
        self._tell(piece + self.stream.end(), True)

    def outcome(self, prompt_tokens: list[int]) -> Text:
        """Returns the text, once it has ended."""
        return Text(
            prompt_tokens=prompt_tokens,
            tokens=self.tokens,
            text="".join(self.pieces),
            finish=self.finish,
        )

    def _tell(self, piece: str, done: bool) -> None:
        self.pieces.append(piece)
        if self.on_text is not None:
            self.on_text(self.index, piece, done)
