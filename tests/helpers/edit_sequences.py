"""A tiny model whose states depend on all their tokens, and a cache with its oracles.

The expected states are recomputed, bit for bit, from the tokens that the oracle stores.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.recurrent.states import States
from tests.helpers import caches, reference_caches
from tests.helpers.caches import Kind, Oracles, attend_signed, attention_cache, plan_rows
from tests.helpers.reference_cache import Oracle
from tests.helpers.reference_states import Histories

STATES = {"hash": ((), jnp.uint32), "trace": jax.ShapeDtypeStruct((2,), jnp.float32)}
"""The states of a layer: a hash of the tokens and their order, and a float."""


def update_state(state: dict[str, Any], token: Any, layer: int, xp: Any) -> dict[str, Any]:
    """Update a state with a token: exact in NumPy and in JAX."""
    number = token.astype(xp.uint32)
    x = token.astype(xp.float32)[..., None]
    return {
        "hash": state["hash"] * xp.uint32(31) + number + xp.uint32(1 + 1000 * layer),
        "trace": state["trace"] / 2 + xp.concatenate([x, -x], axis=-1),
    }


def state_after(history: Sequence[int], layer: int) -> dict[str, np.ndarray]:
    """Compute the state after a history of tokens."""
    state = {"hash": np.zeros(1, np.uint32), "trace": np.zeros((1, 2), np.float32)}
    for token in history:
        state = update_state(state, np.array([token]), layer, np)
    return {name: value[0] for name, value in state.items()}


def compute(step: jaxkv.Step, kinds: str = "rr") -> tuple[jaxkv.Step, list[dict]]:
    """Run every layer over an applied ubatch: `a` attends, `r` is recurrent, `b` is both.

    Returns:
      The step, and for each recurrent layer the states after each token, `[R, T + 1, ...]`.
    """
    passed = []
    for layer, kind in enumerate(kinds):
        if kind in "ab":
            step, _ = attend_signed(step, layer)
        if kind in "rb":
            before = jaxkv.read_states(step, layer)

            def recur(state: dict, column: tuple, layer: int = layer) -> tuple[dict, dict]:
                token, valid = column
                after = update_state(state, token, layer, jnp)
                mask = {"hash": valid, "trace": valid[:, None]}
                state = {n: jnp.where(mask[n], after[n], state[n]) for n in state}
                return state, state

            _, after = jax.lax.scan(recur, before, (step.tokens.T, step.valid.T))
            states = {
                n: jnp.concatenate([before[n][:, None], jnp.moveaxis(after[n], 0, 1)], axis=1)
                for n in before
            }
            last = step.state_write_steps(layer)
            at = jax.vmap(lambda row, steps: row[steps])
            written = {name: at(x, last) for name, x in states.items()}
            step = jaxkv.write_states(step, layer, written)
            passed.append(states)
    return step, passed


@partial(jax.jit, static_argnames="kinds")
def run_ubatch(cache: Any, ubatch: jaxkv.Ubatch, kinds: str = "rr") -> tuple[Any, list[dict]]:
    step, passed = compute(jaxkv.apply(cache, ubatch), kinds)
    return step.cache, passed


def run_batch(cache: Any, batch: jaxkv.Batch, *, ubatch_size: int = 4, kinds: str = "rr") -> Any:
    for ubatch in jaxkv.init_batch(cache, batch, ubatch_size=ubatch_size).check().ubatches:
        cache, _ = run_ubatch(cache, ubatch, kinds)
    return cache


def plan_tokens(cache: Any, *rows: Sequence[int]) -> jaxkv.Ubatch:
    """Plan tokens for sequences 0, 1, 2, at most WIDTH each, that fit; as one ubatch."""
    sequences = cache.table.spec.sequences
    table = np.zeros((2, sequences, caches.WIDTH), np.int32)
    for seq, row in enumerate(rows):
        table[:, seq, : len(row)] = row, [1] * len(row)
    (ubatch,) = plan_rows(cache, *table).check().ubatches
    return ubatch


def run_rows(cache: Any, *rows: Sequence[int], kinds: str = "rr") -> Any:
    """Run tokens for sequences 0, 1, 2, at most WIDTH each, that fit; all at once."""
    return run_ubatch(cache, plan_tokens(cache, *rows), kinds)[0]


def make(kept: int = 0, sequences: int = 3, layers: int = 2, streams: int = 1) -> Any:
    """Make a recurrent cache that fits the model."""
    sizes = dict(sequences=sequences, streams=streams, max_rollback=kept)
    return caches.recurrent_cache(layers, STATES, **sizes)


def stored_states(cache: Any) -> dict[int, list[tuple[int, tuple[bytes, ...]]]]:
    """List the stored states of each sequence: positions, and the bytes of all layers."""
    table: States = cache.table
    position, cell = np.asarray(table.position), np.asarray(table.cell)
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(cache.buffers)]
    share = table.sequences_per_stream
    return {
        seq: [
            (int(p), tuple(array[seq // share, c].tobytes() for array in arrays))
            for p, c in zip(position[seq], cell[seq], strict=True)
            if p >= 0
        ]
        for seq in range(table.sequences)
    }


def first_positions(table: States) -> dict[int, list[int]]:
    """List `first_position` of the stored states of each sequence."""
    first, cell = np.asarray(table.first_position), np.asarray(table.cell)
    return {
        seq: first[seq // table.sequences_per_stream, row[row < table.num_cells]].tolist()
        for seq, row in enumerate(cell)
    }


def list_states(cache: Any, seq: int = 0) -> list[tuple[int, tuple[bytes, ...]]]:
    """List positions and bytes of a sequence's states, in a cache without attention."""
    return stored_states(cache)[seq]


def state_bytes(history: Sequence[int], layers: Iterable[int]) -> tuple[bytes, ...]:
    """The bytes of a history's state in each layer, as `stored_states` lists them."""
    return tuple(x.tobytes() for x in jax.tree.leaves([state_after(history, i) for i in layers]))


@dataclass(frozen=True)
class StateKind(Kind):
    """A cache with states under test, with or without attention.

    model: the layers, see `compute`. Without attention the cache is no hybrid one.
    kept: how many states are stored in addition to the current one.
    """

    model: str = "rr"
    kept: int = 1

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        served = (tuple(i for i, one in enumerate(self.model) if one in of) for of in ("ab", "rb"))
        return tuple(filter(None, served))

    def make(self, rope: Any = None) -> Any:
        *attending, recurrent = self.layers
        states = make(self.kept, self.sequences, len(recurrent), self.streams)
        if not attending:
            return states
        sizes = dict(cells=self.cells, sequences=self.sequences, streams=self.streams)
        sizes |= dict(layers=len(*attending), kv_heads=caches.HEADS, head_dim=caches.SIZE)
        attention = attention_cache(**sizes, window=self.windows[0], rope=rope)
        return compose_hybrid_cache((attention, *attending), (states, recurrent))

    def oracles(self) -> Oracles:
        histories = Histories(self.sequences, self.kept, streams=self.streams)
        if len(self.layers) == 1:
            return Oracles([histories])
        (attention,) = super().oracles()
        attention.in_rows = True
        return Oracles([attention, histories])


class Twin(reference_caches.Twin):
    """A cache with states and its oracles.

    All tokens of a batch form one ubatch, `[Q, WIDTH]`, to limit compilation; or parts of 4, which
    must be of one sequence.
    """

    def __init__(
        self,
        kinds: str = "rr",
        *,
        cells: int = 16,
        sequences: int = 3,
        window: jaxkv.Window | None = None,
        **options: int,
    ) -> None:
        sizes = dict(cells=cells, sequences=sequences, windows=(window,))
        super().__init__(StateKind("states", model=kinds, **sizes, **options), in_rows=True)
        self.kinds, self.sequences = kinds, sequences

    def compare_part(self, part: Any, layers: Sequence[int], oracle: Any) -> None:
        if isinstance(oracle, Oracle):
            super().compare_part(part, layers, oracle)
            return
        expected = {
            seq: [(s.position, state_bytes(s.history, layers)) for s in states]
            for seq, states in oracle.states.items()
        }
        assert stored_states(part) == expected, jaxkv.show(self.cache)
        begins = {seq: [s.begin for s in states] for seq, states in oracle.states.items()}
        assert first_positions(part.table) == begins, jaxkv.show(self.cache)

    def run(self, cache: Any, ubatch: jaxkv.Ubatch, ahead: int | None = None) -> tuple[Any, ...]:
        """Run the model; outputs of attention are not compared."""
        cache, _ = run_ubatch(cache, ubatch, self.kinds)
        return cache, [], []


def make_filled_twin(kept: int = 0, counts: Sequence[int] = (10,), **options: Any) -> Twin:
    """Make a twin with `counts` tokens of sequences 0, 1, ..."""
    twin = Twin(kept=kept, **options)
    counts = list(counts)
    while any(counts):
        now = [min(count, caches.WIDTH) for count in counts]
        assert twin.decode([seq for seq, count in enumerate(now) for _ in range(count)])
        counts = [count - some for count, some in zip(counts, now, strict=True)]
    twin.compare()
    return twin
