"""A conversation as a value: its turns, and the tokens of all of them.

A cache holds the first of these tokens, and how many it holds is asked of it and stored nowhere.
What it does not hold is computed with the next turn, each token once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from models.text.turns import Frame
from models.texts import Finish


class ChatError(Exception):
    """A conversation cannot go on as asked, and is as it was; the message is a sentence."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A message and its answer.

    message: what was said to the model.
    start: the tokens of the conversation before the turn.
    asked: those up to where the answer begins.
    answer: the text of the answer.
    finish: why it ended.
    """

    message: str
    start: int
    asked: int
    answer: str = ""
    finish: Finish = "interrupted"


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns one after another, in one sequence of a cache.

    sequence: where its tokens are held.
    frame: what the template writes around messages.
    system: the instructions that it began with, None for those of the template.
    tokens: all of its tokens, without the stop tokens that the model said.
    turns: in their order.
    gap: how many tokens right after the first `frame.keep` were forgotten, see
      `models.chat.room.context_shift`.
    """

    sequence: int
    frame: Frame
    system: str | None = None
    tokens: tuple[int, ...] = ()
    turns: tuple[Turn, ...] = ()
    gap: int = 0

    def messages(self, *new: str) -> list[dict[str, str]]:
        """Return the conversation as a template takes it, with a new message at its end."""
        found = instructions(self.system)
        for turn in self.turns:
            found.append({"role": "user", "content": turn.message})
            found.append({"role": "assistant", "content": turn.answer})
        return found + [{"role": "user", "content": message} for message in new]

    def ask(self, message: str, tokens: Sequence[int]) -> Self:
        """Return it with a new turn, whose answer has not begun.

        Args:
          message: what is said.
          tokens: those of `models.text.turns.tokens_of_turn`.

        >>> one = Conversation(sequence=0, frame=Frame(keep=1, closing=0)).ask("Hi", [1, 2, 3])
        >>> one.tokens, one.turns[0].start, one.turns[0].asked
        ((1, 2, 3), 0, 3)
        """
        start = len(self.tokens)
        turn = Turn(message=message, start=start, asked=start + len(tokens))
        return replace(self, tokens=(*self.tokens, *tokens), turns=(*self.turns, turn))

    def answered(self, tokens: Sequence[int], text: str, finish: Finish) -> Self:
        """Return it with the last turn's answer, whatever that was before."""
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
        """Return it without the answer of its last turn, whose last token is computed again."""
        gap = self._gap_before(self.turns[-1].asked - 1)
        return replace(self.answered((), "", "interrupted"), gap=gap)

    def _gap_before(self, index: int) -> int:
        """Return the gap if it ends before a token; one that is gone back into is closed.

        What was forgotten has to be computed again then.
        """
        return self.gap if index >= self.frame.keep + self.gap else 0

    def place(self, index: int) -> int:
        """Return the position that a token stands at, or one past the last would.

        >>> Conversation(sequence=0, frame=Frame(keep=2, closing=0), gap=10).place(15)
        5
        """
        return index if index < self.frame.keep else max(index - self.gap, self.frame.keep)

    def gapless(self, length: int) -> int:
        """Return how many of the first tokens have nothing forgotten before them.

        >>> Conversation(sequence=0, frame=Frame(keep=2, closing=0), gap=10).gapless(15)
        2
        """
        return min(length, self.frame.keep) if self.gap else length

    def index(self, place: int) -> int:
        """Return how many tokens there are before a position, forgotten ones too."""
        return place if place < self.frame.keep else place + self.gap


def instructions(system: str | None) -> list[dict[str, str]]:
    """Return what comes before the first message."""
    return [] if system is None else [{"role": "system", "content": system}]
