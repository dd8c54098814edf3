"""Views of a cache: text, one-line `repr`, HTML for notebooks, and plots.

The function `show` returns text; functions in `plot` use matplotlib. Caches, plans, batches and
results have a one-line `repr`. Caches have the methods `cells`, `to_text` and `to_html`.

Examples:
  >>> make_cache(CacheSpec.attention(layers=2, kv_heads=1, head_dim=4), cells=8, sequences=3)
  Cache(attention, layers=2, cells=8, sequences=3, kv_heads=1, float32, 688 bytes: 0 used)
"""

from collections.abc import Callable

from jaxkv import plot
from jaxkv.api.edits import EditResult
from jaxkv.batch import Batch
from jaxkv.cache import Cache
from jaxkv.draw.cell_view import view_cells
from jaxkv.draw.html import html_of
from jaxkv.draw.repr import cache_repr, fields_repr, plan_repr, result_repr, ubatch_repr
from jaxkv.draw.text import show
from jaxkv.hybrid import HybridMaintenancePlan, HybridTable
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cross_attention import CrossAttentionTable
from jaxkv.kv.defrag import DefragPlan
from jaxkv.kv.shift import ShiftPlan
from jaxkv.kv.table import CellTable
from jaxkv.plan import Plan
from jaxkv.recurrent.slots import StateSlots
from jaxkv.recurrent.table import EmptyPlan, StateTable
from jaxkv.ubatch import Ubatch

__all__ = ["plot", "show"]


def _attach_repr(line: Callable[..., str], *kinds: type) -> None:
    for kind in kinds:
        kind.__repr__ = line


_attach_repr(cache_repr, Cache)
_attach_repr(plan_repr, Plan)
_attach_repr(ubatch_repr, Ubatch)
_attach_repr(result_repr, EditResult)
_attach_repr(
    fields_repr,
    Batch,
    Buffers,
    CellTable,
    DefragPlan,
    HybridMaintenancePlan,
    HybridTable,
    EmptyPlan,
)
_attach_repr(fields_repr, CrossAttentionTable, StateSlots, StateTable, ShiftPlan)
Cache.cells = view_cells
Cache.to_text = show
Cache.to_html = html_of
Cache._repr_html_ = html_of  # type: ignore[attr-defined]  # the name that notebooks look for
