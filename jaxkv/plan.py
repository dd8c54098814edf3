"""Plans: slots for the tokens of a batch, chosen before the cache changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete, is_traced, take_rows
from jaxkv.core.constants import NO_SLOT
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.repr import FEW, format_value, to_numpy_or_none, with_fallback_repr
from jaxkv.ubatch import Ubatch

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, PyTree, Shaped


class Reason(IntEnum):
    """Reason why a sequence of a batch or an edit is refused, or OK.

    advice: Message for a sequence of a refused plan, with `{expected}` and `{actual}`.
    edit_advice: Message for a refused edit.
    """

    advice: str
    edit_advice: str

    def __new__(cls, value: int, advice: str = "", edit_advice: str = "") -> Reason:
        """Make a member from its number and its messages."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.advice = advice or edit_advice
        member.edit_advice = edit_advice or (
            "expected a batch that fits, got another; init_batch(cache, batch).check() has details"
        )
        return member

    @classmethod
    def _missing_(cls, value: object) -> Reason | None:
        """Return the member of an array of one number, such as `plan.reason[0]`."""
        if isinstance(value, jax.Array | np.ndarray) and not value.ndim:
            return cls(int(value))
        return None

    OK = 0
    OUT_OF_CELLS = (
        1,
        "expected {expected} free cells, got {actual}; remove a sequence (seq_rm), plan the "
        "sequences that fit (batch.keep_sequences(plan.fits)), make the cache larger (cells=), "
        "or, with a window, plan fewer tokens at once (ubatch_size=)",
        "expected enough free cells, got fewer; remove a sequence of the stream (seq_rm), or make "
        "the cache larger (cells=)",
    )
    NOT_CONTIGUOUS = (
        2,
        "expected its first token at position {expected}, one past the last, got {actual}; pass "
        "positions=None, or remove the tokens from there on (seq_rm)",
    )
    POSITION_GAP = (
        3,
        "expected a token at position {expected}, one past the one before, got {actual}; pass "
        "positions without gaps",
    )
    DUPLICATE_POSITION = (
        4,
        "expected a token at position {expected}, got a second one at {actual}; pass one token "
        "for each position",
        "expected one token at each position from `grouped` on, got several; pass the field "
        "`grouped` of the last result",
    )
    DECREASING_POSITION = (
        5,
        "expected a token at position {expected}, got the lower {actual}; sort the tokens of a "
        "sequence by position",
    )
    SHIFT_PENDING = (
        6,
        "expected rotated keys, got shifted ones; cache = apply(cache, init_update(cache))",
    )
    UNKNOWN_SEQUENCE = (
        7,
        "expected sequence ids of the cache, got another one in the batch; pass ids from 0 to Q "
        "- 1",
    )
    CONTEXT_EVICTED = (
        8,
        "expected the cells that the token at {actual} attends to, got evicted ones; remove the "
        "sequence (seq_rm) and compute it again, or make the cache with more cells",
        "expected the cells that the next token attends to, got evicted ones; remove the whole "
        "sequence (seq_rm), or make the cache with a larger cells= or max_rollback=",
    )
    MIXED_ROW = (
        9,
        "expected one sequence in each row, got several in a row, or one in several rows; give "
        "each sequence one row",
    )
    DIVERGED = (
        10,
        "expected its token at {actual} to share all earlier tokens with sequence {expected}, "
        "got different ones; fork one from the other (seq_cp), or give each a token",
    )
    ENCODER_ALREADY_WRITTEN = (
        11,
        "expected no encoder source, got one of {expected} tokens; pass append=True, or remove "
        "the sequence (seq_rm), and its source with it",
    )
    NONFINITE_LOGITS = (
        12,
        "expected finite logits, got NaN or +inf; check the params and `forward`",
    )
    NEGATIVE_TOKEN = (
        13,
        "expected tokens of at least 0, got a negative one at {actual}; pass valid=False for "
        "padding",
    )
    EDITED = (
        14,
        "expected the last tokens of the state, got others after an edit of the cache; compute "
        "the logits again, and call generation.init_decode",
    )
    ARGUMENT_OUT_OF_RANGE = (
        15,
        "",
        "expected arguments in their documented ranges, got another; check them before the call",
    )
    STATE_NOT_STORED = (
        16,
        "",
        "expected a stored state of exactly the tokens to keep or to copy, got none; edit the "
        "whole sequence, or make the cache with a larger max_rollback=",
    )
    PARTS_DIFFER = (
        17,
        "",
        "expected one last position in all parts of the hybrid cache, got several; edit the whole "
        "sequence",
    )
    POSITION_OUT_OF_RANGE = (
        18,
        "",
        "expected positions from 0 to 2**31 - 2 after the edit, got another; pass a smaller number",
    )
    SHARED_CELL = (
        19,
        "",
        "expected one owner of each cell to move, got several; remove the other owners (seq_keep), "
        "or shift a copy in another stream",
    )
    TOO_FEW_TOKENS = (
        20,
        "",
        "expected num_keep + num_discard positions, got fewer; pass a smaller num_discard=",
    )
    OVERWRITTEN = (
        21,
        "",
        "expected unchanged cells of the earlier table, got overwritten or rotated ones; keep the "
        "earlier cache, not only its table",
    )
    LAYER_NOT_WRITTEN = (
        22,
        "",
        "expected every layer to have all tokens of the sequences, got layers that were not "
        "written after an apply; go back to the cache before it (rewind)",
    )


class PlanRefusedError(RuntimeError):
    """Error for a refused plan or edit, or for a snapshot or samples that do not fit.

    No cache changes.
    """


@pytree_dataclass
class Plan:
    """Slots for the tokens of a batch, or the reasons why the batch is refused.

    ubatches: parts of the batch to compute, in order. In a refused plan all slots are past the last
      cell. `apply` and `attend` with such slots leave the cache unchanged.
    ok: True if every token of the batch has a cell.
    reason: a `Reason` for each sequence; OK for a sequence that is not in the batch. If a traced
      batch has an unknown sequence id, UNKNOWN_SEQUENCE replaces every OK.
    fits: Sequences that fit together: `reason` is OK. Sequences are added one by one, fewest new
      tokens first, then lowest id. A sequence stays if the batch of the sequences that stayed is
      not refused, with the same `ubatch_size` and `split_by`. If any sequence fits alone, at least
      one fits, except that all sequences of a token with the reason DIVERGED are refused. A traced
      plan of several ubatches, for a cache with a window, has at most one such sequence.
    expected, actual: the required and the actual value for each refused sequence. The values are
      positions or numbers of cells, depending on the reason. The actual number of free cells is
      that of the stream, minus the new tokens of the sequences that fit.

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
        """The only ubatch of the plan, for example of a plan of `plan_step`.

        Raises a ValueError if the plan does not have exactly one ubatch.
        """
        if len(self.ubatches) != 1:
            raise ValueError(
                f"expected a plan of one ubatch, got {len(self.ubatches)}; take each of "
                f"plan.ubatches"
            )
        return self.ubatches[0]

    @with_fallback_repr
    def __repr__(self) -> str:
        shapes = ", ".join("{} x {}".format(*ubatch.valid.shape) for ubatch in self.ubatches)
        ubatches = f"{len(self.ubatches)} ubatch{'es' * (len(self.ubatches) != 1)}: {shapes} tokens"
        if (ok := to_numpy_or_none(self.ok)) is None:
            return f"Plan({ubatches}; {'traced' if is_traced(self) else 'values not known'})"
        if ok:
            return f"Plan(ok, {ubatches})"
        reasons = map(Reason, np.asarray(self.reason).tolist())
        refused = [(seq, reason.name) for seq, reason in enumerate(reasons) if reason]
        shown = [f"sequence {seq} {name}" for seq, name in refused[:FEW]]
        more = [f"{len(refused) - FEW} more"] if len(refused) > FEW else []
        return f"Plan(refused: {', '.join(shown + more)})"

    def check(self) -> Plan:
        """Return the plan, or raise if the plan was refused.

        Raises:
          PlanRefusedError: If the plan was refused. The message has advice for each sequence.
          TypeError: If the plan is traced; inside of `jit`, use the field `ok`.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> init_batch(cache, make_batch([1, 2, 3, 4, 5])).check()
          Traceback (most recent call last):
          ...
          jaxkv.plan.PlanRefusedError: the batch was refused, and nothing was changed.
          sequence 0: OUT_OF_CELLS, expected 5 free cells, got 4; remove a sequence (seq_rm), ...
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
          logits: `[O, V]` for each ubatch, with one row for each entry of `Ubatch.outputs`.

        Returns:
          `[n, V]`, one row for each of the n tokens of the batch that need logits. With a
          traced plan, the result has additional rows of padding at the end.

        Raises:
          ValueError: If the number of arrays is not the number of ubatches.

        Examples:
          >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=2), cells=4)
          >>> plan = init_batch(cache, make_batch([5, 6, 7], outputs=[True, False, True]))
          >>> logits = [ubatch.tokens.reshape(-1, 1)[ubatch.outputs] for ubatch in plan.ubatches]
          >>> plan.gather_outputs(logits).tolist()
          [[5], [7]]
        """
        order = [ubatch.output_index for ubatch in self.ubatches]
        if len(logits) != len(order):
            raise ValueError(
                f"expected a list of logits [O, V], one of each of the {len(order)} ubatches, got "
                f"{len(logits)}; pass the logits of each ubatch"
            )
        if not is_concrete(order):
            return take_rows(logits, jnp.argsort(jnp.concatenate(order), stable=True))
        # Without the ubatches that have no outputs, fewer different shapes are concatenated.
        pairs = list(zip(map(np.asarray, order), logits, strict=True))
        some = [pair for pair in pairs if np.any(pair[0] != NO_SLOT)] or pairs[:1]
        order = np.concatenate([index for index, _ in some])
        take = np.argsort(order, stable=True)[: np.sum(order != NO_SLOT)]
        rows = [row for _, row in some]
        if all(isinstance(row, np.ndarray) for row in rows):
            return np.concatenate(rows)[take]
        return take_rows(rows, take)


@with_fallback_repr
def result_repr(result: Any) -> str:
    """Return the fields of a result, and its reasons by name."""
    names = getattr(result, "_fields", None) or [x.name for x in fields(result) if x.repr]
    shown = {name: format_value(getattr(result, name)) for name in names}
    shown["cache"] = repr(result.cache)
    for name in ("reason", "finish_reason"):
        if hasattr(result, name):
            shown[name] = _format_reasons(getattr(result, name))
    pairs = [f"{name}={text}" for name, text in shown.items() if text != "None"]
    return f"{type(result).__name__}({', '.join(pairs)})"


def _format_reasons(codes: Any) -> str:
    """Return the names of `Reason`s; for many sequences, the number of sequences by name."""
    array = to_numpy_or_none(codes)
    if array is None:
        return format_value(codes)
    names = [Reason(code).name for code in array.reshape(-1)]
    if array.size > FEW:
        names = [f"{count} {name}" for name, count in Counter(names).most_common()]
    return f"[{', '.join(names)}]" if array.ndim else names[0]
