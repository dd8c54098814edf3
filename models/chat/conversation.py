"""A conversation as an immutable value: its turns and tokens.

The cache contains a prefix of the tokens and is the only record of its length. The rest is computed
with the next turn, each token once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from models.text.turns import Frame
from models.texts import Finish


class ChatError(Exception):
    """An edit or turn that is not possible; the conversation is unchanged."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message and its answer.

    start: number of tokens of the conversation before the turn.
    asked: number of tokens before the answer.
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

    system: instructions at the beginning; None for those of the template.
    tokens: of all turns, without the model's stop tokens.
    gap: number of tokens removed after the first `frame.keep`, see `models.chat.room.slide`.
    """

    sequence: int
    frame: Frame
    system: str | None = None
    tokens: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    gap: int = 0

    def messages(self, *new: str) -> list[dict[str, str]]:
        """Return the messages for a template, `new` at the end."""
        found = instructions(self.system)
        for turn in self.turns:
            found.append({"role": "user", "content": turn.message})
            found.append({"role": "assistant", "content": turn.answer})
        return found + [{"role": "user", "content": message} for message in new]

    def ask(self, message: str, tokens: Sequence[int]) -> Self:
        """Return it with a new turn; `tokens` as from `models.text.turns.tokens_of_turn`.

        >>> one = Conversation(sequence=0, frame=Frame(keep=1, closing=0)).ask("Hi", [1, 2, 3])
        >>> one.tokens, one.turns[0].start, one.turns[0].asked
        ((1, 2, 3), 0, 3)
        """
        start = len(self.tokens)
        turn = Turn(message=message, start=start, asked=start + len(tokens))
        return replace(self, tokens=(*self.tokens, *tokens), turns=(*self.turns, turn))

    def answered(self, tokens: Sequence[int], text: str, finish: Finish) -> Self:
        """Return it with this answer in the last turn, replacing an earlier one."""
        turn = self.turns[-1]
        said = (*self.tokens[: turn.asked], *map(int, tokens))
        turn = replace(turn, answer=text, finish=finish)
        return replace(self, tokens=said, turns=(*self.turns[:-1], turn))

    def undone(self) -> Self:
        """Return it without its last turn.

        >>> one = Conversation(sequence=0, frame=Frame(keep=1, closing=0))
        >>> one.ask("Hi", [1, 2, 3]).answered([4], "Ho", "stop").undone() == one
        True
        """
        start = self.turns[-1].start
        gap = self._gap_before(start)
        return replace(self, tokens=self.tokens[:start], turns=self.turns[:-1], gap=gap)

    def unanswered(self) -> Self:
        """Return it without its last answer; the message's last token is computed again."""
        gap = self._gap_before(self.turns[-1].asked - 1)
        return replace(self.answered((), "", "interrupted"), gap=gap)

    def _gap_before(self, index: int) -> int:
        """Return the gap if it ends before a token, else 0 (the gap is computed again)."""
        return self.gap if index >= self.frame.keep + self.gap else 0

    def place(self, index: int) -> int:
        """Return the position of a token in the cache, or of the next one.

        >>> Conversation(sequence=0, frame=Frame(keep=2, closing=0), gap=10).place(15)
        5
        """
        return index if index < self.frame.keep else max(index - self.gap, self.frame.keep)

    def gapless(self, length: int) -> int:
        """Return how many of the first tokens have no removed token before them.

        >>> Conversation(sequence=0, frame=Frame(keep=2, closing=0), gap=10).gapless(15)
        2
        """
        return min(length, self.frame.keep) if self.gap else length

    def index(self, place: int) -> int:
        """Return the number of tokens before a position, removed ones included."""
        return place if place < self.frame.keep else place + self.gap


def instructions(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the first one of the user."""
    return [] if system is None else [{"role": "system", "content": system}]
