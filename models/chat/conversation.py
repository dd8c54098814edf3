"""A conversation as an immutable value: turns and tokens.

The cache stores the first tokens of a conversation. The number of these tokens is stored only in
the cache. The remaining tokens are computed in the next turn. Cached tokens are not computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from models.text.turns import Frame
from models.texts import Finish


class ChatError(Exception):
    """An edit or a turn that is not possible; the conversation is unchanged."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message of the user and the answer of the model.

    start: number of tokens of the conversation before the turn.
    asked: number of tokens of the conversation before the answer.
    finish: why the answer ended.
    """

    message: str
    start: int
    asked: int
    answer: str = ""
    finish: Finish = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns in one sequence of a cache.

    system: instructions at the beginning; None for the instructions of the template.
    tokens: tokens of all turns. A stop token that ended an answer is not included.
    gap: number of tokens that `models.chat.room.slide` removed from the cache. The removed tokens
      follow the first `frame.keep` tokens.
    """

    sequence: int
    frame: Frame
    system: str | None = None
    tokens: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    gap: int = 0

    def messages(self, *new: str) -> list[dict[str, str]]:
        """Return instructions, all turns and the messages `new`, as input of a chat template."""
        found = instructions(self.system)
        for turn in self.turns:
            found.append({"role": "user", "content": turn.message})
            found.append({"role": "assistant", "content": turn.answer})
        return found + [{"role": "user", "content": message} for message in new]

    def ask(self, message: str, tokens: Sequence[int]) -> Self:
        """Return the conversation with a new turn; `tokens` is the result of `tokens_of_turn`.

        >>> one = Conversation(sequence=0, frame=Frame(keep=1, closing=0)).ask("Hi", [1, 2, 3])
        >>> one.tokens, one.turns[0].start, one.turns[0].asked
        ((1, 2, 3), 0, 3)
        """
        start = len(self.tokens)
        turn = Turn(message=message, start=start, asked=start + len(tokens))
        return replace(self, tokens=(*self.tokens, *tokens), turns=(*self.turns, turn))

    def answered(self, tokens: Sequence[int], text: str, finish: Finish) -> Self:
        """Return the conversation with a new or replaced answer in the last turn."""
        turn = self.turns[-1]
        said = (*self.tokens[: turn.asked], *map(int, tokens))
        turn = replace(turn, answer=text, finish=finish)
        return replace(self, tokens=said, turns=(*self.turns[:-1], turn))

    def undone(self) -> Self:
        """Return the conversation without the last turn.

        >>> one = Conversation(sequence=0, frame=Frame(keep=1, closing=0))
        >>> one.ask("Hi", [1, 2, 3]).answered([4], "Ho", "stop").undone() == one
        True
        """
        start = self.turns[-1].start
        gap = self._gap_before(start)
        return replace(self, tokens=self.tokens[:start], turns=self.turns[:-1], gap=gap)

    def unanswered(self) -> Self:
        """Return the conversation without the last answer, ready for another answer."""
        gap = self._gap_before(self.turns[-1].asked - 1)
        return replace(self.answered((), "", "interrupted"), gap=gap)

    def _gap_before(self, index: int) -> int:
        """Return `gap` if the token at `index` comes after all removed tokens, otherwise 0."""
        return self.gap if index >= self.frame.keep + self.gap else 0

    def place(self, index: int) -> int:
        """Return the cache position of the token at `index` in `tokens`.

        >>> Conversation(sequence=0, frame=Frame(keep=2, closing=0), gap=10).place(15)
        5
        """
        return index if index < self.frame.keep else max(index - self.gap, self.frame.keep)

    def gapless(self, length: int) -> int:
        """Return how many of the first `length` tokens come before the first removed token.

        >>> Conversation(sequence=0, frame=Frame(keep=2, closing=0), gap=10).gapless(15)
        2
        """
        return min(length, self.frame.keep) if self.gap else length

    def index(self, place: int) -> int:
        """Return the index in `tokens` of the token at the cache position `place`."""
        return place if place < self.frame.keep else place + self.gap


def instructions(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the first message of the user."""
    return [] if system is None else [{"role": "system", "content": system}]
