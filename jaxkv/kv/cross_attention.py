"""Cache for sources: what an encoder read for a sequence, for all tokens of its text to look at.

A source is written once, whole, and then only looked at. Its cells have positions of their own, 0
and so on, which no verb of positions reaches: a text may be cut, moved and slid, and its source
stays. What copies or forgets a sequence takes its source along.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Ubatch
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.array_utils import out_of_range_slots, resolve_range_end
from jaxkv.core.constants import EMPTY
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.table import CellTable
from jaxkv.spec import TableSpec, mask_unchanged_targets
from jaxkv.table import KVView

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

    from jaxkv.core.types import Tokens


class CrossAttentionSlots(NamedTuple):
    """What a part for sources has as slots of a ubatch of text: who looks.

    looks: 0 for a token that looks; past the last cell for padding and for a refused plan, which
      see nothing.
    """

    looks: Int32[Array, "R T"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class CrossAttentionTable(CellTable):
    """The table of a cache for sources: that of attention, but what asks about a text passes by.

    Sources go in as a batch does (`init_batch(encoder=True)`). A ubatch of text is a reader: it
    takes no cells, and each of its tokens sees all cells of its sequence. Arrays have the shapes
    that `CacheTable` says.

    of_sources: True, static. JAX compares the fields of dataclasses and not their types, so that
      without it a program compiled for a `CellTable` could be found for this one.
    """

    of_sources: bool = field(default=True, metadata={"static": True})

    @property
    def spec(self) -> TableSpec:
        """What is fixed when the cache is made."""
        return replace(super().spec, kind="source")

    def cache_spec(self, buffers: Buffers) -> CacheSpec:
        """Return what the weights fixed of the cache."""
        return replace(super().cache_spec(buffers), kind="cross_attention")

    def can_allocate(
        self, lengths: Int[np.ndarray, " Q"], at_once: int, num_shared_cells: Int[np.ndarray, " S"]
    ) -> Bool[np.ndarray, " S"]:
        """Return that texts of any length can be held, `[S]` bool: they take no cells here."""
        del lengths, at_once, num_shared_cells
        return np.ones(self.streams, bool)

    def slots_when_skipped(self, ubatch: Ubatch) -> CrossAttentionSlots:
        """Return that all tokens of a text look."""
        looks = out_of_range_slots(ubatch.positions)
        return CrossAttentionSlots(jnp.where(ubatch.valid, 0, looks))

    def occupy(self, ubatch: Ubatch) -> Self:
        """Mark the slots of a source; a text has none."""
        return self if isinstance(ubatch.slots, CrossAttentionSlots) else super().occupy(ubatch)

    def stream_hash_after(self, ubatch: Ubatch, occupied: CellTable) -> UInt32[Array, " S"]:
        """Return the digest; text changes nothing here."""
        if isinstance(ubatch.slots, CrossAttentionSlots):
            return ubatch.hash_before
        return super().stream_hash_after(ubatch, occupied)

    def seq_rm(
        self, seq: Int32[Array, ""], start: Int32[Array, ""], stop: Int32[Array, ""]
    ) -> tuple[CellTable, Bool[Array, ""]]:
        """Forget a source where all of its text is forgotten; a part of a text leaves it alone."""
        return super().seq_rm(seq, start, jnp.where((start <= 0) & (stop < 0), -1, 0))

    def seq_cp(
        self,
        buffers: Buffers | None,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[CellTable, Buffers | None]:
        """Give the targets the source in place of their own, whatever range of the text it is."""
        return self.seq_select(buffers, *self._parents_of_copy(src, dst, start, stop))

    def can_seq_cp(
        self,
        src: Int32[Array, ""],
        dst: Int32[Array, "*n"],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
    ) -> tuple[Bool[Array, ""], Int32[Array, " m"]]:
        """Return whether `copy` can; the ends are those of no text, -1."""
        ok = self.can_seq_select(*self._parents_of_copy(src, dst, start, stop))
        return ok, jnp.full(jnp.atleast_1d(dst).shape, EMPTY)

    def _parents_of_copy(
        self, src: jax.Array, dst: jax.Array, start: jax.Array, stop: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the parents and targets of a copy, `[n]`; a target of Q where nothing changes."""
        targets = jnp.atleast_1d(dst)
        parent = jnp.where(
            jnp.maximum(start, 0) < resolve_range_end(stop), src, -1
        )  # none for an empty range
        return mask_unchanged_targets(self.spec, jnp.broadcast_to(parent, targets.shape), targets)

    def seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
        gap: Int32[Array, ""] | None = None,
    ) -> tuple[CrossAttentionTable, Bool[Array, ""]]:
        """Return the table as it is: the positions of a text move, and not those of its source."""
        del seq, start, stop, delta, gap
        return self, jnp.array(True)

    def can_seq_add(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        delta: Int32[Array, ""],
    ) -> Bool[Array, ""]:
        """Return True, since nothing moves."""
        del seq, start, stop, delta
        return jnp.array(True)

    def seq_div(
        self,
        seq: Int32[Array, ""],
        start: Int32[Array, ""],
        stop: Int32[Array, ""],
        divisor: Int32[Array, ""],
    ) -> tuple[CrossAttentionTable, Bool[Array, ""]]:
        """Return the table as it is: positions of a source are not divided."""
        del seq, start, stop, divisor
        return self, jnp.array(True)

    def can_resume(self, seq: Int32[Array, ""], pos: Int32[Array, ""]) -> Bool[Array, ""]:
        """Return True: a source is there for every position."""
        del seq, pos
        return jnp.array(True)

    def attend(
        self,
        buffers: Buffers,
        layer: int,
        ubatch: Ubatch,
        q: Float[Array, "R T H D"],
        k: Float[Array, "R T K D"] | None = None,
        v: Float[Array, "R T K Dv"] | None = None,
        *,
        visible_until: Tokens | None = None,
        **options: Any,
    ) -> tuple[CellTable, Buffers, Float[Array, "R T H Dv"]]:
        """Look at the sources, all of them; a ubatch of sources attends as `jaxkv.attend` says."""
        if not isinstance(ubatch.slots, CrossAttentionSlots):
            return super().attend(
                buffers, layer, ubatch, q, k, v, visible_until=visible_until, **options
            )
        if k is not None or v is not None:
            _refuse_to_write()
        _refuse_visible_until(visible_until)
        return super().attend(
            buffers,
            layer,
            _as_attention_ubatch(ubatch),
            q,
            None,
            None,
            **options | {"causal": False},
        )

    def write_kv(
        self,
        buffers: Buffers,
        layer: int,
        ubatch: Ubatch,
        k: Float[Array, "R T K D"],
        v: Float[Array, "R T K Dv"] | None = None,
    ) -> tuple[CellTable, Buffers]:
        """Write the keys and values of sources."""
        if isinstance(ubatch.slots, CrossAttentionSlots):
            _refuse_to_write()
        return super().write_kv(buffers, layer, ubatch, k, v)

    def read_kv(self, buffers: Buffers, layer: int, ubatch: Ubatch, **options: Any) -> KVView:
        """Return the sources, all of which are seen."""
        if not isinstance(ubatch.slots, CrossAttentionSlots):
            return super().read_kv(buffers, layer, ubatch, **options)
        _refuse_visible_until(options.get("visible_until"))
        return super().read_kv(buffers, layer, _as_attention_ubatch(ubatch), causal=False)


def as_source_table(table: CellTable) -> CrossAttentionTable:
    """Return a table of cells as one for sources."""
    return CrossAttentionTable(**{f.name: getattr(table, f.name) for f in fields(table)})


def _as_attention_ubatch(ubatch: Ubatch) -> Ubatch:
    """Return a reader as attention knows ubatches.

    Sequences that share a token own the same source, or the plan was refused: one looks for all.
    """
    no_more = jnp.zeros_like(ubatch.more)  # the source is whole, however the text is cut
    return replace(ubatch, slots=ubatch.slots.looks, shared_with=None, more=no_more)


def _refuse_visible_until(visible_until: Tokens | None) -> None:
    if visible_until is not None:
        raise ValueError(
            "expected no visible_until for a source, all of which is seen: leave it out"
        )


def _refuse_to_write() -> NoReturn:
    raise ValueError(
        "expected queries alone for a layer of sources, which a text only looks at: keys and "
        "values are written for the ubatch of init_batch(encoder=True)"
    )
