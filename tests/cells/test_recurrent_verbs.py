"""Random verbs on memories with states and on what they should remember, alone and in hybrids.

See `tests.histories` for the model whose states name all the tokens that they have seen.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jaxkv
from tests.cases import mostly_nightly
from tests.histories import Twin

edges = st.integers(-1, 12)
ids = st.integers(0, 10**6)
ALL = {
    "recurrent": {"kinds": "rr", "kept": 3},
    "recurrent of streams": {"kinds": "rr", "kept": 1, "streams": 3},
    "hybrid with a window": {"kinds": "ra", "kept": 1, "window": jaxkv.window.sliding(4)},
    "hybrid of streams": {"kinds": "br", "kept": 1, "streams": 3, "cells": 9},
    "recurrent in groups": {"kinds": "r", "kept": 2, "sequences": 4, "streams": 2},
    "hybrid in groups": {"kinds": "ar", "kept": 1, "sequences": 4, "streams": 2, "cells": 12},
    "hybrid in groups with a window": {
        "kinds": "ra",
        "kept": 1,
        "sequences": 4,
        "streams": 2,
        "cells": 14,
        "window": jaxkv.window.sliding(4),
    },
    "both in a layer": {"kinds": "ba", "kept": 1},
    "the current state alone": {"kinds": "ar", "kept": 0},
}
"""Memories under test, as options of `Twin`."""


class Verbs(RuleBasedStateMachine):
    """The verbs, in any order, and what must be remembered after each."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.twin = Twin(**options)
        self.past = self.twin.fork()
        self.late = None

    def seq(self, number: int) -> int:
        return number % self.twin.sequences

    @rule(counts=st.lists(st.sampled_from([0, 0, 1, 1, 2, 5]), min_size=4, max_size=4))
    def decode(self, counts: list[int]) -> None:
        """Several sequences at once, each in its row."""
        counts = counts[: self.twin.sequences]
        if any(counts):
            self.twin.decode([seq for seq, count in enumerate(counts) for _ in range(count)])

    @rule(number=ids)
    def decode_in_parts(self, number: int) -> None:
        self.twin.decode([self.seq(number)] * 7, in_parts=True)

    @rule(number=ids, in_parts=st.booleans())
    def plan(self, number: int, in_parts: bool) -> None:
        """Plan, and leave it for later."""
        one, other = self.seq(number), self.seq(number + 1)
        sequences = [one] * 7 if in_parts else [one, other]
        self.late = self.twin.plan(sequences, in_parts=in_parts)

    @precondition(lambda self: self.late is not None)
    @rule(backwards=st.booleans())
    def try_late_plan(self, backwards: bool) -> None:
        """Run an old plan, perhaps from its last ubatch: what is stale changes nothing."""
        plan, parts = self.late
        pairs = [*zip(plan.ubatches, parts, strict=True)] if plan.ok else []
        for ubatch, part in reversed(pairs) if backwards else pairs:
            self.twin.step(ubatch, part)

    @rule(number=ids, back=st.integers(0, 5))
    def cut(self, number: int, back: int) -> None:
        """Take back the last few tokens."""
        seq = self.seq(number)
        self.twin.seq_rm(seq, max(self.twin.histories.reached(seq) + 1 - back, 0))

    @rule(number=ids, p0=edges, p1=edges)
    def seq_rm(self, number: int, p0: int, p1: int) -> None:
        self.twin.seq_rm(number % (self.twin.sequences + 1) - 1, p0, p1)

    @rule(src=ids, dsts=st.lists(ids, min_size=2, max_size=2), p0=edges, p1=edges)
    def seq_cp(self, src: int, dsts: list[int], p0: int, p1: int) -> None:
        self.twin.copied("seq_cp", self.seq(src), [*map(self.seq, dsts)], p0, p1)

    @rule(src=ids, dst=ids)
    def fork(self, src: int, dst: int) -> None:
        """What callers do with `seq_cp`: a whole sequence, onto one that is forgotten first."""
        if self.seq(src) != self.seq(dst):
            self.twin.seq_rm(self.seq(dst))
            self.twin.copied("seq_cp", self.seq(src), [self.seq(dst)])

    @rule(parents=st.lists(ids, min_size=2, max_size=2), swap=st.booleans())
    def seq_select(self, parents: list[int], swap: bool) -> None:
        last = self.twin.sequences - 1
        self.twin.copied("seq_select", [*map(self.seq, parents)], [last * swap, 1])

    @rule(number=ids)
    def seq_keep(self, number: int) -> None:
        self.twin.both("seq_keep", self.seq(number))

    @rule(number=ids, p0=edges, p1=edges, delta=st.integers(-5, 5))
    def seq_add(self, number: int, p0: int, p1: int, delta: int) -> None:
        self.twin.both("seq_add", self.seq(number), p0, p1, delta)

    @rule(number=ids, p0=edges, p1=edges, divisor=st.integers(1, 3))
    def seq_div(self, number: int, p0: int, p1: int, divisor: int) -> None:
        self.twin.both("seq_div", self.seq(number), p0, p1, divisor)

    @rule()
    def update(self) -> None:
        self.twin.update()

    @rule()
    def clear(self) -> None:
        self.twin.both("clear")

    @rule()
    def remember(self) -> None:
        self.past = self.twin.fork()

    @rule()
    def go_back(self) -> None:
        self.twin.go_back(self.past)

    @rule()
    def back_to_the_value(self) -> None:
        """An old memory is a value: it is still there, states and all."""
        self.twin.return_to(self.past)

    @invariant()
    def agree(self) -> None:
        self.twin.compare()


def test_verbs():
    """The fast part: few runs, the same every time."""
    run_state_machine_as_test(
        lambda: Verbs(ALL["hybrid with a window"]),
        settings=settings(max_examples=4, stateful_step_count=25),
    )


@pytest.mark.core
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        ALL,
        few=["hybrid in groups with a window", "both in a layer"],
    ),
)
def test_verbs_at_length(name):
    """Many more of them: many longer runs."""
    run_state_machine_as_test(
        lambda: Verbs(ALL[name]),
        settings=settings(max_examples=60, stateful_step_count=40, derandomize=True),
    )
