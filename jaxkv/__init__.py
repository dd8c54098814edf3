"""Key/value caches for JAX, as plain values.

A memory is an immutable pytree; everything done to it is a pure function that returns the next one.
It holds a table of cells, which says who lives where, and rows of keys and values beside it.

Letters, in every shape of this library:

  S  streams, independent tables of cells        L  layers
  N  cells of a stream                           H  query heads
  B  tokens of a batch                           K  key/value heads
  R  rows of a ubatch                            D  head size
  T  tokens of a row                             O  outputs of a ubatch
  Q  sequences                                   V  vocabulary
  W  words of 32 owners                          U  ubatches of a plan
  E  earlier states that are kept
"""

from jaxkv.batch import Batch, Ubatch, make_batch
from jaxkv.draw import show
from jaxkv.hybrid import HybridCache, make_hybrid_cache
from jaxkv.kv.buffers import Rows
from jaxkv.kv.cache import KVCache, make_kv_cache
from jaxkv.kv.cells import Cells
from jaxkv.kv.defrag import Defrag
from jaxkv.kv.shift import Update
from jaxkv.loops.generation import decode
from jaxkv.loops.prompts import prefill
from jaxkv.memory import attend, join, read_states, split, states_kept, write_states
from jaxkv.ops.attention.api import Implementation, attention
from jaxkv.plan import Plan, Reason, RefusedError
from jaxkv.planning.init import init_batch, init_full, plan_step
from jaxkv.planning.splits import equal_split, sequence_split, simple_split
from jaxkv.recurrent.cache import RecurrentCache, make_recurrent_cache
from jaxkv.recurrent.states import States, StateSlots, tails
from jaxkv.rope import Rope, make_rope, rotate
from jaxkv.verbs.apply import apply, defrag_plan, go_back, init_update, make_room
from jaxkv.verbs.ask import (
    can_resume,
    can_seq_rm,
    check_invariants,
    nbytes,
    seq_pos_max,
    seq_pos_min,
    used,
)
from jaxkv.verbs.edit import clear, seq_add, seq_cp, seq_div, seq_keep, seq_rm
from jaxkv.window import Window, chunked, standard, symmetric

__all__ = [
    "Batch",
    "Cells",
    "Defrag",
    "HybridCache",
    "Implementation",
    "KVCache",
    "Plan",
    "Reason",
    "RecurrentCache",
    "RefusedError",
    "Rope",
    "Rows",
    "StateSlots",
    "States",
    "Ubatch",
    "Update",
    "Window",
    "apply",
    "attend",
    "attention",
    "can_resume",
    "can_seq_rm",
    "check_invariants",
    "chunked",
    "clear",
    "decode",
    "defrag_plan",
    "equal_split",
    "go_back",
    "init_batch",
    "init_full",
    "init_update",
    "join",
    "make_batch",
    "make_hybrid_cache",
    "make_kv_cache",
    "make_recurrent_cache",
    "make_room",
    "make_rope",
    "nbytes",
    "plan_step",
    "prefill",
    "read_states",
    "rotate",
    "seq_add",
    "seq_cp",
    "seq_div",
    "seq_keep",
    "seq_pos_max",
    "seq_pos_min",
    "seq_rm",
    "sequence_split",
    "show",
    "simple_split",
    "split",
    "standard",
    "states_kept",
    "symmetric",
    "tails",
    "used",
    "write_states",
]
