"""How far texts have come in a generation, and how a generation begins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.loops.sampling import Sampler, draw, draw_key, make_sampler, newest
from jaxkv.memory import Facts, Memory, split
from jaxkv.places import END, flags, integers, is_concrete
from jaxkv.plan import Reason


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeState:
    """How far T texts have come, each a sequence of a memory; `start` and `begin` make it.

    Where the texts stand, the memory knows.

    token: `[T]` int32, the token that was picked last and is not in the memory yet.
    sequence: `[T]` int32, the sequence of each text, each at most once.
    active: `[T]` bool, the texts that go on.
    left: `[T]` int32, how many more tokens of a text may be picked.
    reason: `[T]` int32, a `Reason`: why the memory refused a text's token, which ended it; FITS
      while it did not.
    key: `[T]`, what a text draws with: its key of `jax.random`, of which each position has one.
    adjusting: the state of the sampler.
    """

    token: jax.Array  # [T]
    sequence: jax.Array  # [T]
    active: jax.Array  # [T]
    left: jax.Array  # [T]
    reason: jax.Array  # [T]
    key: jax.Array  # [T]
    adjusting: Any


class Picked(NamedTuple):
    """The tokens that were picked in n steps.

    tokens: `[T, n]` int32, -1 where a text had ended.
    logprobs: `[T, n]` float32, the logarithms of their probabilities by the model alone, before a
      sampler adjusted anything; 0 where a text had ended, so that their sum is that of the text.
    """

    tokens: jax.Array
    logprobs: jax.Array


def start(
    memory: Memory,
    tokens: Any,
    sequences: Any = None,
    *,
    limit: Any = None,
    sampler: Sampler | None = None,
    seed: Any = 0,
    prompts: Sequence[Any] | None = None,
) -> DecodeState:
    """Start texts whose first tokens have been picked already; `begin` picks them too.

    Args:
      memory: the memory after the prompts.
      tokens: `[T]` int32, the first tokens, which are not in the memory yet.
      sequences: `[T]` int32, where each text stands; by default 0, 1, 2 and so on.
      limit: `[]` or `[T]` int32, how many more tokens of each may be picked; by default any number.
      sampler: what will adjust logits, see `jaxkv.loops.sampling`; by default the best token is
        taken.
      seed: `[]` or `[T]` int, of all draws. One for all is folded with the sequence, so that equal
        prompts go on differently; one for each text is all that its draws depend on, beside the
        position.
      prompts: `[T, n]` int32, or a list of lists: the tokens of each text so far, which the
        penalties of a sampler count. -1 pads an array, in front.

    Returns:
      The state for `decode` and the other loops.

    Raises:
      ValueError: when shapes differ, a sequence is known and comes twice or is none, or there are
        not as many prompts as texts.
      TypeError: when tokens, sequences, limits or seeds are no integers.

    Examples:
      >>> memory = make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=4, sequences=2)
      >>> state = loops.start(memory, [5, 7], limit=[1, 9])
      >>> state.sequence.tolist(), state.left.tolist()
      ([0, 1], [1, 9])
    """
    facts = split(memory)[0].facts
    tokens = integers(tokens, "tokens")
    if np.ndim(tokens) != 1:
        raise ValueError(f"wanted tokens [T], got the shape {np.shape(tokens)}")
    count = tokens.shape[0]
    ids = np.arange(count, dtype=np.int32) if sequences is None else sequences
    key = _keys(seed, facts.sequence_ids(ids), count)
    left = _each(END if limit is None else limit, count, "limit")
    state = DecodeState(
        token=tokens,
        sequence=jnp.asarray(ids),
        active=left > 0,
        left=left,
        reason=jnp.full(count, Reason.FITS, jnp.int32),
        key=key,
        adjusting=(sampler or make_sampler()).start(_of_all(prompts, count)),
    )
    state = checked(facts, state)
    return jax.tree.map(jnp.asarray, state)


def begin(
    sampler: Sampler,
    memory: Memory,
    logits: jax.Array,
    stop: Any = (),
    sequences: Any = None,
    *,
    limit: Any = None,
    seed: Any = 0,
    prompts: Sequence[Any] | None = None,
) -> tuple[DecodeState, Picked]:
    """Pick the first token of each text from the logits of its prompt.

    Args:
      sampler: what adjusts logits, see `jaxkv.loops.sampling`.
      memory: the memory after the prompts.
      logits: `[T, V]`, those of the last token of each prompt.
      stop: the tokens that end a text, see `decode`.
      sequences: `[T]` int32, where each text stands; by default 0, 1, 2 and so on.
      limit: `[]` or `[T]` int32, how many tokens of each may be picked, this one included.
      seed: see `start`.
      prompts: see `start`.

    Returns:
      The state for `decode`, and the first tokens, `[T, 1]`.

    Raises:
      ValueError: as `start` does, or when the logits are no `[T, V]`.

    Examples:
      Two texts of one prompt, the second one a fork; 3 ends a text:

      >>> memory = make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=4, sequences=2)
      >>> logits = jnp.array([[0.0, 2.0, 1.0, 1.5]])
      >>> sampler = loops.sampling.make_sampler(temperature=1.0)
      >>> state, first = loops.begin(sampler, memory, jnp.repeat(logits, 2, axis=0), [3], seed=5)
      >>> first.tokens.tolist(), state.active.tolist()
      ([[3], [0]], [False, True])
    """
    if np.ndim(logits) != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(
            f"wanted logits [T, V] of floats, got {logits.dtype} {list(np.shape(logits))}"
        )
    none = np.zeros(logits.shape[0], np.int32)
    options = {"limit": limit, "sampler": sampler, "seed": seed, "prompts": prompts}
    state = start(memory, none, sequences, **options)
    return _begin(sampler, split(memory)[0], logits, stops(stop, len(none)), state)


@jax.jit
def _begin(
    sampler: Sampler, table: Any, logits: jax.Array, stop: jax.Array, state: DecodeState
) -> tuple[DecodeState, Picked]:
    positions = ends(table)[state.sequence] + 1
    state, token, logprob = advance(sampler, logits, state, stop, positions, state.left > 0)
    return state, Picked(token[:, None], logprob[:, None])


def advance(
    sampler: Sampler,
    logits: jax.Array,
    state: DecodeState,
    stop: jax.Array,
    positions: jax.Array,
    goes: jax.Array,
) -> tuple[DecodeState, jax.Array, jax.Array]:
    """Pick one more token for the texts that go on, and end those that it ends.

    Args:
      sampler: what adjusts the logits.
      logits: `[T, V]`.
      state: how far the texts have come.
      stop: `[T or 1, n]` int32, the tokens that end a text.
      positions: `[T]` int32, where the tokens will stand.
      goes: `[T]` bool, the texts that one is picked for; the others stay as they are.

    Returns:
      The state, the tokens, `[T]` int32, and their logarithms of probability, `[T]` float32.
    """
    logits = logits.astype(jnp.float32)
    adjusted = sampler.adjust(logits, state.adjusting)
    token = draw(sampler, adjusted, draw_key(state.key, positions))
    picked = goes & (token >= 0)
    followed = sampler.follow(state.adjusting, token)
    left = state.left - picked
    ended = jnp.any(token[:, None] == stop, axis=1) | (left <= 0) | (token < 0)
    state = DecodeState(
        token=jnp.where(picked, token, state.token),
        sequence=state.sequence,
        active=state.active & ~(goes & ended),
        left=left,
        reason=state.reason,
        key=state.key,
        adjusting=jax.tree.map(chosen(picked), followed, state.adjusting),
    )
    return state, jnp.where(picked, token, -1), logprob_of(logits, token, picked)


def chosen(which: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a function that takes the first of two arrays `[T, ...]` for some texts, `[T]`."""

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *[1] * (jnp.ndim(old) - 1)), new, old)

    return choose


def logprob_of(logits: jax.Array, tokens: jax.Array, picked: jax.Array) -> jax.Array:
    """Return the logarithms of the probability of tokens, `[T]`; 0 for those not picked."""
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    return jnp.where(picked, own - jax.nn.logsumexp(logits, axis=1), 0)


def ends(table: Any) -> jax.Array:
    """Return the last position of every sequence, `[Q]` int32; -1 if it holds none."""
    return table.inspect(jnp.ones(table.facts.sequences, bool)).last


def stops(stop: Any, count: int) -> Any:
    """Return the tokens that end each of T texts, `[T or 1, n]` int32.

    Raises:
      ValueError: when they are neither `[n]` nor `[T, n]`.
    """
    stop = integers(stop, "stop")
    if np.ndim(stop) == 1:
        return stop[None]
    if np.ndim(stop) != 2 or stop.shape[0] not in (1, count):
        raise ValueError(f"wanted stop tokens [n] or [{count}, n], got {np.shape(stop)}")
    return stop


def check_sampler(sampler: Any, state: DecodeState) -> None:
    """Raise unless it is a sampler, and remembers what a state was started with.

    Raises:
      TypeError: when it is no sampler.
      ValueError: when the state was started with another kind of sampler.
    """
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"wanted a sampler, such as loops.sampling.make_sampler(), got {type(sampler)}"
        )
    fresh = sampler.start(np.zeros((state.token.shape[0], 0), np.int32))
    wanted, got = (
        jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), one)
        for one in (fresh, state.adjusting)
    )
    if wanted != got:
        raise ValueError(
            f"wanted a state that was started with this sampler, which remembers {wanted}, got one "
            f"that remembers {got}: pass sampler= to loops.start, or begin with loops.begin"
        )


def checked(facts: Facts, state: DecodeState) -> DecodeState:
    """Make arrays of what a state holds, and refuse what cannot be."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"wanted a state, jaxkv.loops.start makes it, got {type(state)}")
    state = DecodeState(
        token=integers(state.token, "token"),
        sequence=facts.sequence_ids(state.sequence),
        active=flags(state.active, "active"),
        left=integers(state.left, "left"),
        reason=integers(state.reason, "reason"),
        key=state.key,
        adjusting=state.adjusting,
    )
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(state)]
    if len(shapes[0]) != 1 or any(shape[:1] != shapes[0] for shape in shapes):
        raise ValueError(
            f"wanted token, sequence, active and all else of a state of one length [T], got "
            f"{', '.join(map(str, shapes))}"
        )
    if is_concrete(state.sequence):
        ids, counts = np.unique(np.asarray(state.sequence), return_counts=True)
        if np.any(counts > 1):
            raise ValueError(
                f"sequence {ids[counts > 1][0]} comes twice: a sequence goes on in one way at a "
                f"time; fork it with seq_cp to go on in several"
            )
    return state


def _of_all(prompts: Sequence[Any] | None, count: int) -> Any:
    """Return the prompts of T texts as rows; without any, rows of nothing."""
    if prompts is None:
        return np.zeros((count, 0), np.int32)
    if len(prompts) != count:
        raise ValueError(f"wanted the prompts of {count} texts, got {len(prompts)}")
    return padded(prompts)


def _each(value: Any, count: int, name: str) -> Any:
    """Return a number for each text, from one for all or one each."""
    value = integers(value, name)
    if np.shape(value) not in ((), (count,)):
        raise ValueError(f"wanted {name} [] or [{count}], got {np.shape(value)}")
    xp = np if is_concrete(value) else jnp
    return xp.broadcast_to(value, (count,))


def _keys(seed: Any, ids: Any, count: int) -> jax.Array:
    """Return the key of each text, of a seed for all or for each."""
    if np.shape(seed) not in ((), (count,)):
        raise ValueError(f"wanted a seed [] or [{count}], got {np.shape(seed)}")
    if is_concrete(seed):
        array = np.asarray(seed)
        if array.dtype.kind not in "iu":
            raise TypeError(f"wanted integers for seed, got {array.dtype}")
        wrong = array[(array < 0) | (array >= 2**32)]
        if wrong.size:
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {wrong[0]}")
        seed = array.astype(np.uint32)
    return _made_keys(seed, ids)


@jax.jit
def _made_keys(seed: jax.Array, ids: jax.Array) -> jax.Array:
    if jnp.ndim(seed):
        return jax.vmap(jax.random.key)(seed)
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), ids)


def padded(prompts: Sequence[Any], most: int | None = None) -> Any:
    """Return the tokens of texts as rows of one length, `[T, n]` int32, -1 in front of them.

    Args:
      prompts: `[T, n]`, or a list of lists.
      most: n, whatever the prompts have; by default the longest has all of its tokens.
    """
    if getattr(prompts, "ndim", 0) == 2:
        rows = integers(prompts, "prompts")
    else:
        lists = [integers(prompt, "prompts").reshape(-1) for prompt in prompts]
        longest = max((len(one) for one in lists), default=0)
        lists = [np.pad(one, (longest - len(one), 0), constant_values=-1) for one in lists]
        rows = np.stack(lists) if lists else np.zeros((0, 0), np.int32)
    return rows if most is None else newest(rows, most)
