"""Scheduling, on the host: which request has which sequence, which wait, and which gives way."""

from bisect import insort

import numpy as np

from jaxkv.loops.requests import Limits, Progress
from jaxkv.memory import Table


class Schedule:
    """Gives the Q sequences of a memory to requests, first come first served.

    Args:
      table: the table of the memory, of which only sizes are looked at.
      limits: of the engine.
      reserve: whether the cells of a request's prompt and limit are promised to it.
    """

    def __init__(self, table: Table, *, limits: Limits, reserve: bool):
        self._table, self._steps, self.reserves = table, limits.steps, reserve
        self._sharing = table.facts.sequences // table.facts.streams
        self._at_once = max(limits.chunk, self._sharing)
        self._waiting: list[Progress] = []
        self._placed: list[Progress | None] = [None] * table.facts.sequences

    @property
    def all(self) -> list[Progress]:
        """The requests that wait or have a sequence."""
        return [*self._waiting, *filter(None, self._placed)]

    @property
    def any_waits(self) -> bool:
        """Whether a request waits for a sequence."""
        return bool(self._waiting)

    @property
    def feeding(self) -> list[Progress]:
        """The texts whose prompts are not in the memory yet, the oldest first."""
        return _by_age([text for text in self._placed if text and not text.runs])

    @property
    def running(self) -> list[Progress]:
        """The texts that tokens are generated for."""
        return [text for text in self._placed if text and text.runs]

    def stream_of(self, text: Progress) -> int:
        """Return the stream that a text has its cells in."""
        return text.sequence // self._sharing

    def beside(self, stream: int) -> list[Progress]:
        """Return the texts in a stream, the oldest first."""
        first = stream * self._sharing
        return _by_age([*filter(None, self._placed[first : first + self._sharing])])

    def add(self, text: Progress) -> None:
        """Let a request wait for its turn.

        Raises:
          ValueError: when the memory would never have the cells for it.
        """
        request = text.request
        wanted = text.most if self.reserves else len(request.prompt)
        if not self._holds({0: wanted})[0]:
            limit = f" and a limit of {request.limit} less the last" if self.reserves else ""
            raise ValueError(
                f"wanted cells for {wanted} tokens, of a prompt of {len(request.prompt)}{limit}, "
                f"which this memory never has: ask for less, or make a larger one"
            )
        self._waiting.append(text)

    def admit(self) -> None:
        """Give waiting requests sequences, in their order, as long as there is room."""
        while self._waiting:
            text = self._waiting[0]
            sequence = next((q for q in range(len(self._placed)) if self._has_room(q, text)), None)
            if sequence is None:
                return
            self._waiting.pop(0)
            text.sequence, text.placed = sequence, 0
            text.wanted = len(text.request.prompt) + len(text.tokens)
            self._placed[sequence] = text

    def take_out(self, text: Progress) -> None:
        """Forget a request, wherever it is."""
        if text.sequence >= 0:
            self._placed[text.sequence], text.sequence = None, -1
        else:
            self._waiting.remove(text)

    def put_back(self, text: Progress) -> None:
        """Let a text that has a sequence wait again, before the requests that came after it."""
        self.take_out(text)
        insort(self._waiting, text, key=lambda text: text.id)

    def _has_room(self, sequence: int, text: Progress) -> bool:
        """Return whether a sequence is free, and its stream has the cells that a text needs."""
        if self._placed[sequence]:
            return False
        stream = sequence // self._sharing
        beside = self.beside(stream)
        lengths = {one.sequence: self._needs(one) for one in beside}
        # Alone it has what there is, which is enough for its prompt.
        return not beside or bool(self._holds(lengths | {sequence: self._needs(text)})[stream])

    def _needs(self, text: Progress) -> int:
        """Return the cells that are counted for a text: all that it may take, or those of soon."""
        if self.reserves:
            return text.most
        soon = len(text.request.prompt) + len(text.tokens) + self._steps
        return min(soon, text.most)

    def _holds(self, lengths: dict[int, int]) -> np.ndarray:
        """Return whether texts of so many tokens, by sequence, fit; by stream, `[S]` bool."""
        tokens = np.zeros(len(self._placed), np.int64)
        tokens[[*lengths]] = [*lengths.values()]
        return self._table.can_hold(tokens, self._at_once)


def _by_age(texts: list[Progress]) -> list[Progress]:
    return sorted(texts, key=lambda text: text.id)
