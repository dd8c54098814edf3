"""Running prompts through a model, and compiling ahead what they need.

Called outside of `jax.jit`, a loop compiles itself, once for each function; called inside, it is
traced as part of the caller's program. What is donated is always the buffers of a cache and never
its table, which may be gone back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxkv.api.apply import is_current
from jaxkv.batch import Batch, Ubatch, make_batch, mask_slots
from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_concrete, is_traced, next_power_of_two
from jaxkv.core.constants import NO_SLOT
from jaxkv.core.validate import check_count
from jaxkv.generation.model_step import Forward, compiled_step, model_step, own_or_copied_buffers
from jaxkv.generation.results import PrefillResult
from jaxkv.plan import Plan
from jaxkv.planning.planners import check_ubatch_size, init_batch

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.core.types import Tokens


def prefill(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    batch: Batch | Tokens,
    *,
    ubatch_size: int | None = None,
    plan: Plan | None = None,
    donate: bool = False,
) -> PrefillResult:
    """Run a batch through a model, ubatch by ubatch.

    Args:
      forward: `(params, cache, ubatch) -> cache, logits [O, V]`, called for a ubatch that has
        been applied; one that applies it once more does no harm. It is compiled once for each shape
        of a ubatch and kept for as long as the function lives, so pass the same one every time: a
        method of the same object counts as the same, a new lambda does not.
      params: whatever the model wants.
      cache: a cache with room for the batch.
      batch: the tokens: a `Batch`, or what `make_batch` makes one of, such as a list of tokens for
        each sequence.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      plan: what `init_batch` has planned for this batch in this cache, where that is known
        already; it is not planned again.
      donate: give up the buffers of the cache passed in, whose bytes the returned one then holds.
        By default they are copied once, since forks and checkpoints share them. The table stays in
        either case. Inside of `jit` nothing is copied, and what is donated is up to the caller.

    Returns:
      The cache after the batch, the logits of its output tokens, and whose they are.

      Inside of `jit` and other transformations a refusal cannot be raised. When `ok` is False
      there, the cache is the one passed in, bit for bit, and the logits mean nothing. And there
      the logits are padded to `[O, V]`: the first n rows are those of the n output tokens, so take
      `logits[:n]`; the sequence of all others is -1.

    Raises:
      PlanRefusedError: when there is no room or the batch is at fault. It is raised before anything
        runs or is copied, so the cache is still there.
      ValueError: when `forward` gives back something else than a cache that it has written and
        logits `[O, V]`; when the plan is stale, has another number of tokens than the batch, or
        comes with a `ubatch_size`; or when the cache was donated.
      TypeError: when `plan` is no plan, or the batch is none and has no tokens.

    Examples:
      A model of one layer, whose tokens look at those before them:

      >>> def forward(params, cache, ubatch):
      ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
      ...     cache, x = attend(cache, 0, ubatch, x, x, x)
      ...     return cache, x.reshape(-1, 4)[ubatch.outputs] @ params.T
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=8)
      >>> cache, logits, *_ = prefill(forward, jnp.eye(4), cache, [1, 2, 3])
      >>> logits.shape, cache.num_used_cells().item()
      ((1, 4), 3)

      As a part of the caller's program:

      >>> @jax.jit
      ... def feed(params, cache, tokens):
      ...     return prefill(forward, params, cache, make_batch(tokens))
      >>> result = feed(jnp.eye(4), cache, jnp.arange(6))
      >>> result.cache.num_used_cells().item(), result.ok.item()
      (3, False)

    llama.cpp: `llama_decode`.
    """
    if not isinstance(batch, Batch):
        batch = make_batch(batch)
    if plan is None:
        plan = init_batch(cache, batch, ubatch_size=ubatch_size)
    else:
        _check_plan(cache, batch, ubatch_size, plan)
    is_known = is_concrete(plan.ok)
    if is_known:
        plan.check()
    logits = []
    if is_known and not is_traced(params, cache, batch):
        step = compiled_step(forward)
        table, buffers = own_or_copied_buffers(cache, donate)
        for ubatch in plan.ubatches:
            table, buffers, out = step(params, table, buffers, ubatch)
            logits.append(out)
        cache = merge(table, buffers)
    else:
        for ubatch in plan.ubatches:
            cache, out = model_step(forward, params, cache, ubatch)
            logits.append(out)
    sequences = plan.gather_outputs([_sequences_of_outputs(ubatch) for ubatch in plan.ubatches])
    return PrefillResult(cache, plan.gather_outputs(logits), sequences, plan.ok, plan.reason)


def _sequences_of_outputs(ubatch: Ubatch) -> Any:
    """Return the sequence of each output of a ubatch, `[O]` int32; -1 where one only pads."""
    xp = np if is_concrete(ubatch.sequences, ubatch.outputs, ubatch.output_index) else jnp
    sequences, outputs, order = map(
        xp.asarray, (ubatch.sequences, ubatch.outputs, ubatch.output_index)
    )
    return xp.where(order == NO_SLOT, -1, sequences.reshape(-1)[outputs])


def _check_plan(cache: Cache, batch: Batch, ubatch_size: int | None, plan: object) -> None:
    """Raise unless a plan is of this cache, and of as many tokens as the batch has."""
    if not isinstance(plan, Plan):
        raise TypeError(f"expected a plan, init_batch makes it, got {type(plan)}")
    if ubatch_size is not None:
        raise ValueError("expected a plan or a ubatch_size, got both: the plan is cut already")
    if is_concrete(batch, plan) and plan.ok:
        num_tokens, num_planned = (
            sum(int(np.sum(part.valid)) for part in several) for several in ([batch], plan.ubatches)
        )
        if num_tokens != num_planned:
            raise ValueError(
                f"expected a plan of the batch's {num_tokens} tokens, got one of {num_planned}"
            )
    if not is_traced(cache, plan) and not is_current(cache, plan.ubatches[0]):
        raise ValueError("expected a plan of this cache as it is, got a stale one: plan again")


def warm_up(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    *,
    ubatch_size: int | None = None,
    sequences: Sequence[int] = (0,),
    longest: int | None = None,
    donate: bool = False,
) -> Cache:
    """Compile what prompts of any length need, before the first one comes.

    With `longest`, nothing is compiled by a later `prefill` of one prompt of up to that
    length, if its last token alone wants logits. Prompts that come together, and other `outputs`,
    still compile some small programs that plan them and put logits in order; so do prompts of
    several ubatches without `longest`. A server wants `serving.Engine.warm_up`, after
    which nothing compiles.

    `prefill` runs one program for each size of a ubatch, and those are powers of two. Here a ubatch
    of each size is planned with no slots, as in a refused plan, and run. Other loops compile
    themselves when they are called with a state in which no text is active.

    Args:
      forward: see `prefill`; the programs live as long as it does.
      params: whatever the model wants.
      cache: the cache that will be used, or one like it.
      ubatch_size: the most tokens that are computed at once, see `init_batch`.
      sequences: the sequences of a batch, by default one. Where there are several streams, prompts
        that come together are rows of one ubatch; and more than 8 have more outputs. Those
        are programs of their own, so call it for each number of prompts that you expect.
      longest: the tokens of the longest prompt. Planning is warmed up for all lengths up to it, of
        prompts that come alone; left out, prompts of several ubatches still compile some small
        programs when they come.
      donate: as `prefill` will be called. Otherwise the buffers are copied for as long as this
        runs, which takes their bytes once more.

    Returns:
      The cache as it was, bit for bit.

    Raises:
      ValueError: when there is no sequence, or none of the cache, or `ubatch_size` is more than it
        was sized for.

    Examples:
      >>> compiled = []
      >>> def forward(params, cache, ubatch):
      ...     compiled.append(ubatch.valid.shape)
      ...     x = jnp.take(params, ubatch.tokens, axis=0)[:, :, None]
      ...     cache, x = attend(cache, 0, ubatch, x, x, x)
      ...     return cache, x.reshape(-1, 4)[ubatch.outputs] @ params.T
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=32)
      >>> cache = warm_up(forward, jnp.eye(4), cache, ubatch_size=8)
      >>> cache, *_ = prefill(forward, jnp.eye(4), cache, make_batch([1, 2, 3]), ubatch_size=8)
      >>> compiled, cache.num_used_cells().item()
      ([(1, 1), (1, 2), (1, 4), (1, 8)], 3)
    """
    if not sequences:
        raise ValueError("expected at least one sequence to warm up for, got none")
    spec = split(cache)[0].spec
    limit = max(check_ubatch_size(spec, ubatch_size) // len(sequences), 1)
    longest = limit if longest is None else max(check_count(longest, "longest"), limit)

    def plan_of_length(length: int) -> Plan:
        batch = make_batch([[0] * length] * len(sequences), sequences=sequences)
        return init_batch(cache, batch, ubatch_size=ubatch_size)

    plans = [plan_of_length(length) for length in _bucket_lengths(limit)]
    for length in _bucket_lengths(longest):
        for rest in (
            _bucket_lengths(limit) if length > limit else ()
        ):  # what is left over at its end
            plan_of_length((length - rest) // limit * limit + rest)
    step = compiled_step(forward)
    table, buffers = own_or_copied_buffers(cache, donate)
    for plan in plans:
        logits = []
        for ubatch in plan.ubatches:
            _, buffers, out = step(params, table, buffers, mask_slots(jnp.array(False), ubatch))
            logits.append(out)
        plan.gather_outputs(logits)
    return merge(table, buffers) if donate else cache


def _bucket_lengths(limit: int) -> list[int]:
    """Return the powers of two below a number, and the number."""
    return sorted({min(next_power_of_two(length), limit) for length in range(1, limit + 1)})
