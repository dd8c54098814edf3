"""Key/value caches for JAX as immutable values.

A cache is a pytree: a table, which maps tokens to cells, and buffers of keys and values. Every
operation is a pure function that returns the next cache. Functions raise TypeError for an argument
that does not have its annotated type.

Examples use `forward` and `params` as a model that writes zeros in each layer of any cache.

Letters in array shapes:

  S  streams, independent pools of cells         L  layers
  N  cells of a stream                           H  query heads
  B  tokens of a batch                           K  key/value heads
  R  rows of a ubatch                            D  head size, Dv of values
  T  tokens of a row                             O  outputs of a ubatch
  Q  sequences                                   V  vocabulary
  W  32-bit words of owner flags                 P  lists of tokens, each in one stream
  E  earlier recurrent states                    Z  sequences or texts of a call
                                                 n  any number, d size of an embedding
"""

from importlib import import_module
from typing import TYPE_CHECKING

from jaxkv import ops, sharding, snapshot
from jaxkv.api.apply import apply
from jaxkv.api.attention_layers import AttentionLayers
from jaxkv.api.edits import (
    EditResult,
    clear,
    seq_add,
    seq_cp,
    seq_div,
    seq_keep,
    seq_rm,
    seq_select,
)
from jaxkv.api.evict import evict
from jaxkv.api.insert import extract, insert
from jaxkv.api.layer import attend, read_kv, read_states, write_kv, write_states
from jaxkv.api.maintenance import defrag_plan, init_update, rewind
from jaxkv.batch import Batch, make_batch
from jaxkv.cache import Cache, show
from jaxkv.cache_spec import CacheSpec
from jaxkv.kv.placement import Placement
from jaxkv.make import make_cache
from jaxkv.plan import Plan, PlanRefusedError, Reason
from jaxkv.planning.planners import init_batch, init_full, plan_step
from jaxkv.rope import Rope
from jaxkv.step import Step
from jaxkv.ubatch import Ubatch
from jaxkv.window import Window

if TYPE_CHECKING:
    from jaxkv import generation, serving
    from jaxkv.generation import beam, decode, encode, generate, prefill, score, speculate

# Caches.
__all__ = ["Cache", "CacheSpec", "Placement", "Rope", "Window", "make_cache"]
__all__ += ["show"]
# Batches and plans.
__all__ += ["Batch", "Plan", "PlanRefusedError", "Reason", "Step", "Ubatch"]
__all__ += ["init_batch", "init_full", "make_batch", "plan_step"]
# Commits of plans.
__all__ += ["apply", "defrag_plan", "init_update", "rewind"]
# Edits of sequences.
__all__ += ["EditResult", "clear", "evict", "extract", "insert", "seq_add", "seq_cp", "seq_div"]
__all__ += ["seq_keep", "seq_rm", "seq_select"]
# Functions for models.
__all__ += ["AttentionLayers", "attend", "read_kv", "read_states", "write_kv", "write_states"]
# Loops.
__all__ += ["beam", "decode", "encode", "generate", "prefill", "score", "speculate"]
# Modules.
__all__ += ["generation", "ops", "serving", "sharding", "snapshot"]


if not TYPE_CHECKING:  # otherwise type checkers accept every name

    def __getattr__(name: str) -> object:
        """Import `generation` and `serving` at their first use."""
        if name not in __all__:
            raise AttributeError(f"module 'jaxkv' has no attribute {name!r}")
        if name in ("generation", "serving"):
            return import_module(f"jaxkv.{name}")
        return getattr(import_module("jaxkv.generation"), name)

    def __dir__() -> list[str]:
        return sorted(__all__)
