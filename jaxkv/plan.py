"""Plans: where the tokens of a batch go, decided before the cache changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Ubatch
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.constants import NO_SLOT

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree, Shaped


class Reason(IntEnum):
    """Why a sequence of a batch was refused; OK if it was not. `advice` is the error text."""

    advice: str

    def __new__(cls, value: int, advice: str = "") -> Reason:
        """Make a member of a number and its advice."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.advice = advice
        return member

    OK = 0
    OUT_OF_CELLS = (
        1,
        "free cells: expected {expected}, got {actual}: remove a sequence (seq_rm), go on with "
        "those that fit (batch.keep_sequences(plan.fits)), make a larger cache, or, with a "
        "window, plan fewer tokens at once (ubatch_size=)",
    )
    NOT_CONTIGUOUS = (
        2,
        "its first token must stand at {expected}, one past the last, but stands at {actual}: pass "
        "positions=None, or remove what lies from there on (seq_rm)",
    )
    POSITION_GAP = (
        3,
        "a token must stand at {expected}, one past the token before it, but stands at {actual}: "
        "positions of a batch have no gaps",
    )
    DUPLICATE_POSITION = (
        4,
        "a token must stand at {expected}, but stands at {actual}, where another token of the "
        "batch does: one position holds one token",
    )
    DECREASING_POSITION = (
        5,
        "a token must stand at {expected}, but stands at {actual}, before the one that comes "
        "before it: put the tokens of a sequence in the order of their positions",
    )
    SHIFT_PENDING = (
        6,
        "keys that it would see were moved and are not rotated yet: "
        "cache = apply(cache, init_update(cache))",
    )
    FRAGMENTED = (
        7,
        "it brings {expected} tokens and enough cells are free, but not in one run: "
        "cache = apply(cache, defrag_plan(cache)), or cache, ok = compact(cache, batch=batch)",
    )
    UNKNOWN_SEQUENCE = (8, "the batch names a sequence that the cache does not have")
    CONTEXT_EVICTED = (
        9,
        "its next token stands at {actual} and would need what a window has given up: "
        "forget the sequence (seq_rm) and compute it again, or keep more",
    )
    MIXED_ROW = (
        10,
        "each row of a ubatch belongs to one sequence here, but the batch has a row of several, or "
        "several rows of one: give each sequence one row",
    )
    DIVERGED = (
        11,
        "its token at {actual} belongs to sequence {expected} too, but they do not share all that "
        "comes before it: fork one from the other (seq_cp), or give each a token of its own",
    )
    ENCODER_ALREADY_WRITTEN = (
        12,
        "it has a source of {expected} tokens already, and one is written once: forget the "
        "sequence (seq_rm), which takes its source along",
    )
    NONFINITE_LOGITS = (
        13,
        "its logits hold NaN or +inf, so that no token can be picked: look at the weights, and at "
        "what `forward` computes",
    )
    NEGATIVE_TOKEN = (
        14,
        "its token at {actual} is negative, which JAX would count from the end of the vocabulary: "
        "pass ids from 0, and valid=False for padding",
    )
    EDITED = (
        15,
        "its last tokens were removed or replaced since the state was made, so that the next token "
        "does not follow them: compute the logits again, and begin anew (generation.init_decode)",
    )


class PlanRefusedError(RuntimeError):
    """Raised for a refused plan, or by a snapshot that does not fit. The cache is unchanged."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Where the tokens of a batch go, or why the batch is refused.

    ubatches: parts to compute, in order. In a refused plan all slots are past the last cell, so
      that `apply` and `attend` leave the cache unchanged.
    ok: whether every token of the batch has a cell.
    reason: a `Reason` for each sequence; OK for a sequence that is not in the batch. If a traced
      batch has an unknown sequence id, UNKNOWN_SEQUENCE for all sequences that would fit.
    fits: sequences that fit together if the others are left out, chosen smallest first.
    expected: the position, or number of free cells, that the batch needs.
    actual: the position, or number of free cells, found instead.

    llama.cpp: `llama_memory_context_i`.
    """

    ubatches: tuple[Ubatch, ...]
    ok: Bool[Array, ""]
    reason: Int32[Array, " Q"]
    fits: Bool[Array, " Q"]
    expected: Int32[Array, " Q"]
    actual: Int32[Array, " Q"]

    @property
    def ubatch(self) -> Ubatch:
        """The only ubatch of a plan, as of `plan_step`.

        Raises:
          ValueError: If there are several.
        """
        if len(self.ubatches) != 1:
            raise ValueError(
                f"expected a plan of one ubatch, got {len(self.ubatches)}; take each of "
                f"plan.ubatches"
            )
        return self.ubatches[0]

    def check(self) -> Plan:
        """Return the plan, or raise if it was refused.

        Raises:
          PlanRefusedError: If the plan was refused. The message has the advice for each sequence.
          TypeError: If the plan is traced; use `ok` there.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> init_batch(cache, make_batch([1, 2, 3, 4, 5])).check()
          Traceback (most recent call last):
          ...
          jaxkv.plan.PlanRefusedError: the batch was refused, and nothing was changed.
          sequence 0: OUT_OF_CELLS, free cells: expected 5, got 4: remove a sequence (seq_rm), \
go on with those that fit (batch.keep_sequences(plan.fits)), make a larger cache, or, with a \
window, plan fewer tokens at once (ubatch_size=)
        """
        if not is_concrete(self.ok):
            raise TypeError("expected a concrete plan to check, got a traced one; use plan.ok")
        if self.ok:
            return self
        lines = ["the batch was refused, and nothing was changed."]
        expected, actual = np.asarray(self.expected), np.asarray(self.actual)
        for seq, code in enumerate(np.asarray(self.reason)):
            if code != Reason.OK:
                advice = Reason(code).advice.format(expected=expected[seq], actual=actual[seq])
                lines.append(f"sequence {seq}: {Reason(code).name}, {advice}")
        raise PlanRefusedError("\n".join(lines))

    def gather_outputs(
        self, logits: Sequence[Shaped[Array | np.ndarray, "*_"]]
    ) -> PyTree[Shaped[Array | np.ndarray, "*_"]]:
        """Concatenate the logits of all ubatches in the order of the batch.

        Args:
          logits: `[O, V]` for each ubatch, a row for each of its `outputs`.

        Returns:
          `[n, V]`, a row for each token of the batch with `outputs`. In a traced plan, where n is
          unknown, rows of padding come last.
        """
        order = [ubatch.output_index for ubatch in self.ubatches]
        if len(logits) != len(order):
            raise ValueError(
                f"expected a list of logits [O, V], one of each of the {len(order)} ubatches, got "
                f"{len(logits)}; pass the logits of each ubatch"
            )
        if not is_concrete(order):
            take = jnp.argsort(jnp.concatenate(order), stable=True)
            return jnp.concatenate(logits)[take]
        # Leaving out ubatches without outputs means that few shapes are concatenated.
        pairs = list(zip(map(np.asarray, order), logits, strict=True))
        some = [pair for pair in pairs if np.any(pair[0] != NO_SLOT)] or pairs[:1]
        order = np.concatenate([index for index, _ in some])
        take = np.argsort(order, stable=True)[: np.sum(order != NO_SLOT)]
        rows = [row for _, row in some]
        return (rows[0] if len(rows) == 1 else jnp.concatenate(rows))[take]
