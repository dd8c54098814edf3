"""State of sequences during generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import check_extra
from jaxkv.cache import Cache, split
from jaxkv.core.array_utils import is_concrete
from jaxkv.core.constants import END
from jaxkv.core.pytree import pytree_dataclass
from jaxkv.core.validate import check_bool, check_int32
from jaxkv.generation.filters import make_sampler
from jaxkv.generation.padding import pad_prompts
from jaxkv.generation.sampler import Sampler, check_sampler
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Reason
from jaxkv.spec import TableSpec, check_distinct

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Integer, Key, PyTree, Shaped, UInt32

    from jaxkv.core.types import Ids
    from jaxkv.generation.types import Prompts, Seeds
    from jaxkv.table import CacheTable


@pytree_dataclass
class DecodeState:
    """State of Z sequences, made by `init_decode`; positions are stored only in the cache.

    token: The last sampled token of each sequence; this token is not in the cache yet.
    sequence: Id of each sequence, without repetition.
    active: False for sequences that have ended.
    remaining: Number of tokens that may still be sampled.
    reason: A `Reason`: OK, NONFINITE_LOGITS, EDITED, or the reason of a refused plan.
    key: Random key of each sequence; each draw folds `draw_index` into the key.
    draw_index: Position of the first drawn token, plus the number of draws so far.
    last_token_hash: Hash of the last cached token of each sequence, to detect edits.
    sampler_state: State of the sampler, any pytree.
    extra: Additional model inputs of each next token of a sequence, by name; None for none.
    """

    token: Int32[Array, " Z"]
    sequence: Int32[Array, " Z"]
    active: Bool[Array, " Z"]
    remaining: Int32[Array, " Z"]
    reason: Int32[Array, " Z"]
    key: Key[Array, " Z"]
    draw_index: Int32[Array, " Z"]
    last_token_hash: UInt32[Array, " Z"]
    sampler_state: PyTree
    extra: dict[str, Shaped[Array, "Z ..."]] | None = None

    def extra_of_tokens(self, count: int) -> dict[str, Shaped[Array, "Z {count} ..."]] | None:
        """Return the additional inputs of `count` next tokens of each sequence."""
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x[:, None], (x.shape[0], count, *x.shape[1:])), self.extra
        )


def make_decode_state(
    cache: Cache,
    tokens: Ids,
    sequences: Ids | None,
    *,
    max_new_tokens: Ids | None,
    sampler: Sampler,
    seed: Seeds,
    prompts: Prompts | None,
    extra: Mapping[str, PyTree] | None = None,
) -> DecodeState:
    """Return the initial state; its sampler state includes `prompts`, but not `tokens`."""
    table, _ = split(cache)
    token = check_int32(tokens, "tokens", low=0)
    if np.ndim(token) != 1:
        raise ValueError(
            f"expected tokens [Z], got the shape {np.shape(token)}; pass a flat list, one token "
            "for each sequence"
        )
    count = token.shape[0]
    ids = table.spec.sequence_ids(np.arange(count) if sequences is None else sequences)
    if np.shape(ids) != (count,):
        raise ValueError(
            f"expected sequences [{count}], one for each token, got {np.shape(ids)}; pass one id "
            "for each token"
        )
    remaining = _broadcast_to_sequences(
        END if max_new_tokens is None else max_new_tokens, count, "max_new_tokens"
    )
    key, draw, last_token_hash = _init_draw_state(table, check_seed(seed, count), ids)
    reason: PyTree = np.full(count, Reason.OK, np.int32)
    state = DecodeState(
        token=token,
        sequence=ids,
        active=remaining > 0,
        remaining=remaining,
        reason=reason,
        key=key,
        draw_index=draw,
        last_token_hash=last_token_hash,
        sampler_state=sampler.init(_prompts_as_rows(prompts, count)),
        extra=check_extra(extra, (count,)) or None,
    )
    state = check_state(table.spec, state)
    # `jnp.asarray` would compile a program for each shape and dtype.
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), state)


def last_positions(table: CacheTable) -> Int32[Array, " Q"]:
    """Return the last position of each sequence; -1 if the sequence is empty."""
    return table.sequence_status(jnp.ones(table.spec.sequences, bool)).last


def end_edited_sequences(table: CacheTable, state: DecodeState) -> DecodeState:
    """End sequences whose last cached token does not have `state.last_token_hash` (EDITED)."""
    _, same = table.compare_last_tokens(state.sequence, state.last_token_hash)
    edited = state.active & ~same
    reason = jnp.where(edited, Reason.EDITED, state.reason)
    return replace(state, active=state.active & ~edited, reason=reason)


def update_last_token_hashes(table: CacheTable, state: DecodeState) -> DecodeState:
    """Update hashes of last tokens from the table, except for sequences with the reason EDITED."""
    edited = state.reason == Reason.EDITED
    last_token_hash, _ = table.compare_last_tokens(state.sequence, state.last_token_hash)
    last_token_hash = jnp.where(edited, state.last_token_hash, last_token_hash)
    return replace(state, last_token_hash=last_token_hash)


def check_sampler_state(sampler: object, state: DecodeState) -> Sampler:
    """Return `sampler`, greedy if None; raise if `state` was made for another kind of sampler."""
    sampler = make_sampler() if sampler is None else check_sampler(sampler)
    fresh = sampler.init(np.zeros((state.token.shape[0], 0), np.int32))
    expected, actual = (
        jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), sampler_state)
        for sampler_state in (fresh, state.sampler_state)
    )
    if expected != actual:
        raise ValueError(
            f"expected a state that was started with this sampler, which remembers {expected}, got "
            f"one that remembers {actual}; pass the same sampler= to "
            f"generation.init_decode"
        )
    return sampler


def check_state(spec: TableSpec, state: DecodeState) -> DecodeState:
    """Return the state with its fields as arrays; raise if a field is invalid."""
    if not isinstance(state, DecodeState):
        raise TypeError(
            f"expected a state, jaxkv.generation.init_decode makes it, got {type(state)}; make "
            "one with generation.init_decode"
        )
    state = DecodeState(
        token=check_int32(state.token, "token"),
        sequence=spec.sequence_ids(state.sequence),
        active=check_bool(state.active, "active"),
        remaining=check_int32(state.remaining, "remaining"),
        reason=check_int32(state.reason, "reason"),
        key=state.key,
        draw_index=check_int32(state.draw_index, "draw_index"),
        last_token_hash=state.last_token_hash,
        sampler_state=state.sampler_state,
        extra=state.extra,
    )
    own, others = (
        [np.shape(leaf) for leaf in jax.tree.leaves(tree)]
        for tree in (
            replace(state, sampler_state=None, extra=None),
            (state.sampler_state, state.extra),
        )
    )
    axis = (np.size(state.token),)
    if any(shape != axis for shape in own) or any(shape[:1] != axis for shape in others):
        raise ValueError(
            f"expected a state whose arrays have one length [Z], got "
            f"{', '.join(map(str, own + others))}; make it with generation.init_decode"
        )
    check_distinct(state.sequence)
    return state


def _prompts_as_rows(prompts: Prompts | None, count: int) -> Int32[Array | np.ndarray, "{count} m"]:
    if prompts is None:
        return np.zeros((count, 0), np.int32)
    if len(prompts) != count:
        raise ValueError(
            f"expected the prompts of {count} sequences, got {len(prompts)}; pass a list of tokens "
            "for each sequence"
        )
    return pad_prompts(prompts)


def _broadcast_to_sequences(value: Ids, count: int, name: str) -> Any:
    array = check_int32(value, name, low=0)
    if np.shape(array) not in ((), (count,)):
        raise ValueError(
            f"expected {name} [] or [{count}], got {np.shape(array)}; pass a scalar, or one for "
            "each sequence"
        )
    xp = np if is_concrete(array) else jnp
    return xp.broadcast_to(array, (count,))


def is_key(seed: Seeds) -> bool:
    """Return whether a seed is a key of `jax.random`, or an array of keys."""
    return isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)


def check_seed(seed: Seeds, count: int) -> Seeds:
    """Return checked seeds; concrete integers become uint32."""
    if isinstance(seed, Sequence) and seed and is_key(seed[0]):
        seed = jnp.stack(seed)
    if np.shape(seed) not in ((), (count,)):
        raise ValueError(
            f"expected a seed [] or [{count}], got {np.shape(seed)}; pass a scalar, or one for "
            "each sequence"
        )
    if not is_concrete(seed) or is_key(seed):
        return seed
    array = np.asarray(seed)
    if array.dtype.kind not in "iu":
        raise TypeError(f"expected integers for seed, got {array.dtype}; pass an int or a key")
    wrong = array[(array < 0) | (array >= 2**32)]
    if wrong.size:
        raise ValueError(
            f"expected a seed from 0 to {2**32 - 1}, got {wrong[0]}; pass one in this range"
        )
    return array.astype(np.uint32)


@jit_table
def _init_draw_state(
    table: CacheTable, seed: Integer[Array, "*n"] | Key[Array, "*n"], ids: Int32[Array, " Z"]
) -> tuple[Key[Array, " Z"], Int32[Array, " Z"], UInt32[Array, " Z"]]:
    """Return the fields `key`, `draw_index` and `last_token_hash` of the initial state."""
    keys = seed if is_key(seed) else jnp.vectorize(jax.random.key)(seed)
    if not jnp.ndim(seed):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, ids)
    last_token_hash, _ = table.compare_last_tokens(ids, jnp.zeros(ids.shape, jnp.uint32))
    return keys, last_positions(table)[ids] + 2, last_token_hash
