"""Recurrent memory: a table of states and the rows beside it, assembled.

A recurrent layer goes on from a state of fixed size instead of looking back at every token. What
cannot be seen any more cannot be forgotten either, so this memory keeps earlier states to return
to, exactly to the token, and refuses where it has none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv import memory as contract
from jaxkv.batch import Ubatch
from jaxkv.kv.cells import END
from jaxkv.recurrent import states as table_of_states
from jaxkv.recurrent.states import States


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentCache:
    """States of many sequences, the newest E + 1 of each.

    table: which states are kept, and in which cells.
    rows: for each layer, by name, the states of all cells, `[N, ...]`.
    """

    table: States
    rows: tuple[dict[str, jax.Array], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Nothing:
    """The plan of an update or a defrag of a memory that never needs one."""

    @property
    def pending(self) -> jax.Array:
        """How many rows will change: none; `[]` int32."""
        return jnp.int32(0)


def make_recurrent_cache(
    *,
    layers: int,
    states: Mapping[str, Any],
    sequences: int = 1,
    kept: int = 0,
    streams: int = 1,
) -> RecurrentCache:
    """Make an empty recurrent memory.

    It has cells for E + 1 states of each sequence, so there is always room. Sequences share cells
    after `seq_cp`, and what is shared is never written over: only a sequence's own states make
    place for its next ones.

    What its verbs say, where it differs from an attention memory:

    - `seq_rm` of an end is granted where a kept state stands right before it, or the whole sequence
      goes, and refused elsewhere. A range that ends earlier, or begins later, changes nothing and
      is granted: what a state has seen stays in it.
    - `seq_cp` gives the targets the states of the source as they were at the end of the range, in
      place of what they had. Where none is kept, they are refused (LOST) until they are forgotten.
    - `seq_add` moves the positions of states. One that turns negative is dropped; if it was the
      current one, the sequence returns to a state that stands right before the range, or is empty
      if that began at 0, or is LOST.
    - `seq_div` drops the earlier states of the range, and divides the position of the current one.
    - `seq_pos_max` is the last position, and `seq_pos_min` the lowest that it can be cut back to.

    A memory is a value, so one that is kept is a checkpoint, and goes on as if nothing had been in
    between. Donation takes it away: its own, and that of what a verb made of it, which has the same
    rows. So let the first step from there not donate, or copy the memory once. To keep one state
    while all is donated, share it: `seq_cp` to a sequence that is not used otherwise.

    Args:
      layers: L, the recurrent layers.
      states: by name, the shape and dtype of one sequence's state in one layer, as a
        `jax.ShapeDtypeStruct` or a pair `(shape, dtype)`.
      sequences: Q, the sequences that may be told apart.
      kept: E, how many states are kept before the current one; as many tokens can be taken back.
      streams: 1 or Q, as in `make_kv_cache`, and the same where both are parts of one memory: with
        1, `seq_add` moves a state for every sequence that shares it, and with Q for one alone.

    Returns:
      The cache, with N = Q (E + 1) cells.

    Raises:
      ValueError: when a count is too small, `streams` is neither 1 nor Q, or there are no states.

    Examples:
      A state of two numbers that forgets half of what it had with each token:

      >>> memory = make_recurrent_cache(layers=1, states={"x": ((2,), jnp.float32)}, kept=2)
      >>> def model(memory, ubatch):
      ...     x = read_states(memory, 0, ubatch)["x"]
      ...     after = [x]
      ...     for t in range(ubatch.tokens.shape[1]):
      ...         x = jnp.where(ubatch.valid[:, t, None], x / 2 + ubatch.tokens[:, t, None], x)
      ...         after.append(x)
      ...     last = tails(ubatch, states_kept(memory, 0) + 1)
      ...     x = jnp.take_along_axis(jnp.stack(after, 1), last[..., None], axis=1)
      ...     return write_states(memory, 0, ubatch, {"x": x})
      >>> plan = init_batch(memory, make_batch([8, 4, 2, 1]))
      >>> memory = model(apply(memory, plan), plan.ubatches[0])
      >>> print(show(memory))
      sequence 0 1 2 3

      Two tokens can be taken back, and no more:

      >>> [can_seq_rm(memory, 0, p0).item() for p0 in (0, 1, 2, 3, 4)]
      [True, False, True, True, True]
      >>> memory, ok = seq_rm(memory, 0, 2)
      >>> plan = init_batch(memory, make_batch([0]))
      >>> read_states(apply(memory, plan), 0, plan.ubatches[0])["x"].tolist()  # 8 / 2 + 4
      [[8.0, 8.0]]

      Keep the memory, let the sequence go elsewhere, and come back to what was kept:

      >>> def step(memory, ubatch):
      ...     return model(apply(memory, ubatch), ubatch)
      >>> def tell(memory, *tokens):
      ...     return step(memory, init_batch(memory, make_batch(tokens)).check().ubatches[0])
      >>> checkpoint, once = memory, tell(memory, 6, 3)
      >>> memory, _ = seq_rm(tell(memory, 5, 5, 5), 0, 4)
      >>> again = tell(checkpoint, 6, 3)
      >>> jax.tree.all(jax.tree.map(np.array_equal, again, once))
      True

      A step that donates is given a copy, or the checkpoint is gone:

      >>> donating = jax.jit(step, donate_argnames="memory")
      >>> memory = donating(jax.tree.map(jnp.copy, checkpoint), plan.ubatches[0])
      >>> memory = donating(checkpoint, plan.ubatches[0])
      >>> checkpoint.rows[0]["x"].is_deleted()
      True

    llama.cpp: `llama_memory_recurrent`, with `n_rs_seq` for `kept`.
    """
    for name, count in {"layers": layers, "sequences": sequences}.items():
        if count < 1:
            raise ValueError(f"a cache needs {name} of at least 1, got {count}")
    if kept < 0:
        raise ValueError(f"wanted kept of at least 0, the earlier states to keep, got {kept}")
    if streams not in (1, sequences):
        raise ValueError(f"wanted streams of 1 or {sequences}, one a sequence, got {streams}")
    if not states:
        raise ValueError("a recurrent cache needs at least one state")
    table = table_of_states.make_states(
        layers=layers, sequences=sequences, kept=kept, streams=streams
    )
    shapes = {name: _shape(state) for name, state in states.items()}

    def row() -> dict[str, jax.Array]:
        return {
            name: jnp.zeros((table.size, *state.shape), state.dtype)
            for name, state in shapes.items()
        }

    return RecurrentCache(table=table, rows=tuple(row() for _ in range(layers)))


def _shape(state: Any) -> jax.ShapeDtypeStruct:
    return state if hasattr(state, "shape") else jax.ShapeDtypeStruct(*state)


@contract.read_states.register
def _read(memory: RecurrentCache, layer: int, ubatch: Ubatch) -> dict[str, jax.Array]:
    source = table_of_states.settled(memory.table, _known_layer(memory, layer), ubatch).source
    # Filling selects: a cell that holds NaN leaves no trace in a state that begins at zero.
    return {
        name: array.at[source].get(mode="fill", fill_value=0)
        for name, array in memory.rows[layer].items()
    }


@contract.write_states.register
def _write(
    memory: RecurrentCache, layer: int, ubatch: Ubatch, states: Mapping[str, jax.Array]
) -> RecurrentCache:
    table, old = memory.table, memory.rows[_known_layer(memory, layer)]
    if set(states) != set(old):
        raise ValueError(f"wanted the states {sorted(old)}, got {sorted(states)}")
    cells = table_of_states.settled(table, layer, ubatch).cells
    new = {}
    for name, array in old.items():
        state, wanted = states[name], (*cells.shape, *array.shape[1:])
        if table.kept == 0 and state.shape == (wanted[0], *wanted[2:]):
            state = state[:, None]
        if state.shape != wanted:
            raise ValueError(
                f"wanted {name} [R, E + 1, ...] of {wanted}, got {state.shape}: give the states "
                f"after as many tokens as tails(ubatch, {table.kept + 1}) says"
            )
        new[name] = array.at[cells].set(state.astype(array.dtype), mode="drop", unique_indices=True)
    rows = (*memory.rows[:layer], new, *memory.rows[layer + 1 :])
    return RecurrentCache(table=table_of_states.finish(table, layer, cells), rows=rows)


@contract.states_kept.register
def _kept(memory: RecurrentCache, layer: int) -> int:
    _known_layer(memory, layer)
    return memory.table.kept


def _known_layer(memory: RecurrentCache, layer: int) -> int:
    if not 0 <= layer < len(memory.rows):
        raise ValueError(f"wanted a layer from 0 to {len(memory.rows) - 1}, got {layer}")
    return layer


def _admit(table: States, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
    """There is always room: a sequence lets go of as many states as it gets new ones."""
    return wanted >= 0, jnp.full_like(wanted, END)


contract.split.register(RecurrentCache, lambda memory: (memory.table, memory.rows))
contract.join.register(States, lambda table, rows: RecurrentCache(table=table, rows=rows))
contract.table_sequences.register(States, lambda table: table.sequences)
contract.table_streams.register(States, lambda table: table.sequences)
contract.table_apart.register(States, lambda table: table.streams > 1)
contract.table_ubatch_size.register(States, lambda table: None)
contract.table_digest.register(States, table_of_states.digest)
contract.table_first.register(States, table_of_states.first)
contract.table_last.register(States, table_of_states.last)
contract.table_used.register(States, table_of_states.used)
contract.table_reached.register(
    States, lambda table, present: (table_of_states.reached(table, present), jnp.array(True))
)
contract.table_lost.register(States, lambda table, position: table.lost > 0)
contract.table_owing.register(States, lambda table, present: jnp.zeros_like(present))
contract.table_admit.register(States, _admit)
contract.table_place.register(States, table_of_states.place)
contract.table_fresh.register(States, table_of_states.fresh)
contract.table_fill.register(States, table_of_states.fill)
contract.table_rm.register(States, table_of_states.remove)
contract.table_cp.register(States, table_of_states.copy)
contract.copies_rows.register(States, lambda table: False)
contract.table_keep.register(States, table_of_states.keep)
contract.table_clear.register(States, table_of_states.clear)
contract.table_add.register(States, table_of_states.add)
contract.table_div.register(States, table_of_states.divide)
contract.table_can_rm.register(States, table_of_states.can_remove)
contract.table_can_resume.register(States, table_of_states.can_resume)
contract.table_update.register(States, lambda table: Nothing())
contract.table_defrag.register(States, lambda table, max_moves: Nothing())
contract.table_unwritten.register(States, table_of_states.unwritten)
contract.table_restored.register(States, table_of_states.restored)
contract.table_faults.register(States, table_of_states.faults)
contract.carry_out.register(Nothing, lambda part, table, rows: (table, rows))
contract.nothing_to_do.register(Nothing, lambda part: True)
