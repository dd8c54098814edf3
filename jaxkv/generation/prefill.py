"""Computation of prompts, and compilation ahead of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch, make_batch
from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_concrete, is_traced, next_power_of_two
from jaxkv.core.constants import NO_SLOT
from jaxkv.core.validate import check_count
from jaxkv.generation.model_program import own_or_copied_buffers
from jaxkv.generation.model_step import Edit, Forward, compiled_step, model_step
from jaxkv.generation.results import PrefillResult
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan
from jaxkv.planning.planners import check_ubatch_size, init_batch
from jaxkv.table import CacheTable
from jaxkv.ubatch import Ubatch, mask_slots

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

    from jaxkv.core.types import Tokens


def prefill(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    batch: Batch | Tokens,
    *,
    ubatch_size: int | None = None,
    plan: Plan | None = None,
    edit: Edit | None = None,
    donate: bool = False,
) -> PrefillResult:
    """Run a batch through a model, ubatch by ubatch.

    Args:
      forward: Function `(params, step) -> step, logits [O, V]`. Pass the same function, or the
        same method of one object, in every call: a new lambda in each call is compiled again.
      params: Model parameters, any pytree.
      cache: A cache with free cells for the batch.
      batch: A `Batch`, or an argument of `make_batch`, such as a list of tokens for each sequence.
      ubatch_size: Maximum number of tokens that are computed at once, see `init_batch`.
      plan: The plan of the batch, if `init_batch` was already called, for example with `split_by`.
      edit: Function `(cache, aux) -> cache`, called after the last ubatch, see `decode`. Earlier
        ubatches are not edited, since an edit would make the plan stale.
      donate: If True, reuse the buffers of the input cache, which become invalid; the table stays
        valid. By default, the buffers are copied once. Inside of `jit`, `donate` has no effect;
        donate the arguments of the jitted function instead.

    Returns:
      A `PrefillResult` with the fields below. By default, the last token of each sequence of the
      batch is an output token.

      - `cache`: the cache after the batch.
      - `logits` `[n, V]`: the logits of the n output tokens, in the order of the batch.
      - `sequences` `[n]` int32: the lowest sequence id of each output token.
      - `ok` `[]` bool and `reason` `[Q]` int32: see `Plan`.

      Inside of `jit`, a traced plan that is refused does not raise: `ok` is False, the cache is
      unchanged, bit for bit, and the logits are undefined. Inside of `jit`, `logits` and
      `sequences` have O rows instead of n. The first n rows are those of the output tokens. The
      other rows are padding: in these rows, `sequences` is -1.

    Raises:
      PlanRefusedError: If the batch is refused, for example because too few cells are free, see
        `Reason`. The input cache stays valid.
      ValueError: If the batch is empty, or a list of tokens is empty.
      ValueError: If a concrete sequence id is not in the cache, or a token in a list or a NumPy
        array is negative.
      ValueError: If the plan is stale, or if plan and batch have different numbers of tokens.
      ValueError: If both `plan` and `ubatch_size` are passed.
      ValueError: If the cache was donated, or `forward` returns no step or no logits.

    Examples:
      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, x = attend(step, 0, x, x, x)
      ...     return step, x.reshape(-1, 4)[step.outputs] @ params.T
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=8)
      >>> cache, logits, *_ = prefill(forward, jnp.eye(4), cache, [1, 2, 3])
      >>> logits.shape, cache.num_used_cells().item()
      ((1, 4), 3)

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
        cache, logits = run_plan(forward, params, cache, plan, edit=edit, donate=donate)
    else:
        for ubatch, edit_here in _pair_with_edit(plan, edit):
            cache, out = model_step(forward, params, cache, ubatch, edit=edit_here)
            logits.append(out)
    sequences = plan.gather_outputs([_sequences_of_outputs(ubatch) for ubatch in plan.ubatches])
    return PrefillResult(cache, plan.gather_outputs(logits), sequences, plan.ok, plan.reason)


def run_plan(
    forward: Forward,
    params: PyTree,
    cache: Cache,
    plan: Plan,
    *,
    edit: Edit | None = None,
    donate: bool,
) -> tuple[Cache, list[Float[Array, "O V"]]]:
    """Run a compiled step for each ubatch of a plan; return the cache, and logits by ubatch."""
    logits, (table, buffers) = [], own_or_copied_buffers(cache, donate)
    for ubatch, edit_here in _pair_with_edit(plan, edit):
        step = compiled_step(forward, edit_here)
        table, buffers, out = step(params, table, buffers, ubatch)
        logits.append(out)
    return merge(table, buffers), logits


def _pair_with_edit(plan: Plan, edit: Edit | None) -> list[tuple[Ubatch, Edit | None]]:
    """Return each ubatch with the edit after it; only the last ubatch has one."""
    return [*((ubatch, None) for ubatch in plan.ubatches[:-1]), (plan.ubatches[-1], edit)]


def _sequences_of_outputs(ubatch: Ubatch) -> Any:
    """Return the sequence id of each output token of a ubatch, `[O]` int32; -1 for padding."""
    xp = np if is_concrete(ubatch.sequences, ubatch.outputs, ubatch.output_index) else jnp
    sequences, outputs, order = map(
        xp.asarray, (ubatch.sequences, ubatch.outputs, ubatch.output_index)
    )
    return xp.where(order == NO_SLOT, -1, sequences.reshape(-1)[outputs])


def _check_plan(cache: Cache, batch: Batch, ubatch_size: int | None, plan: object) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"expected a plan, init_batch makes it, got {type(plan)}; make one with "
            "init_batch(cache, batch)"
        )
    if ubatch_size is not None:
        raise ValueError("expected a plan or a ubatch_size, got both; the plan is cut already")
    if is_concrete(batch, plan) and plan.ok:
        num_tokens, num_planned = (
            sum(int(np.sum(np.asarray(part.valid))) for part in several)
            for several in ([batch], plan.ubatches)
        )
        if num_tokens != num_planned:
            raise ValueError(
                f"expected a plan of the batch's {num_tokens} tokens, got one of {num_planned}; "
                "plan this batch"
            )
    # A refused plan is never current; `prefill` raises the reason of the refusal.
    if is_traced(cache, plan) or not plan.ok:
        return
    current = cache.is_current(plan.ubatches[0])  # traced inside of `jit`
    if is_concrete(current) and not current:
        raise ValueError("expected a plan of this cache as it is, got a stale one; plan again")


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
    """Compile the programs of `prefill`; return the unchanged cache.

    If `sequences` has one id, the model is compiled for ubatches of `ubatch_size` tokens, and of
    each power of two below `ubatch_size`. Planning is compiled for prompts of up to `longest`
    tokens. A later `prefill` of one prompt of up to `longest` tokens compiles nothing if only the
    last token of the prompt is an output token. Other calls may compile small programs.

    To compile a loop such as `decode`, call the loop once with a state of ended sequences.
    For servers, use `serving.Engine.warm_up` instead of this function.

    Args:
      forward: The function object of later calls, see `prefill`.
      params: Model parameters, any pytree.
      cache: The cache of later calls, or a cache with the same shapes.
      ubatch_size: Maximum number of tokens that are computed at once, see `init_batch`.
      sequences: Sequence ids of a later batch. If later batches have more than 8 sequences, or
        sequences of several streams, call `warm_up` for each number of sequences in a batch.
      longest: Maximum length of prompts whose planning is compiled. The default is `ubatch_size`
        divided by the number of sequence ids. A lower value is raised to the default.
      donate: Value of `donate` in later calls of `prefill`. If False, this call copies the buffers,
        and needs twice their memory. If True, the input cache becomes invalid.

    Raises:
      ValueError: If no sequence id is given, or an id is not in the cache.
      ValueError: If `ubatch_size` or `longest` is below 1.
      ValueError: If `ubatch_size` exceeds the limit of the cache, see `init_batch`.

    Examples:
      >>> compiled = []
      >>> def forward(params, step):
      ...     compiled.append(step.valid.shape)
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, x = attend(step, 0, x, x, x)
      ...     return step, x.reshape(-1, 4)[step.outputs] @ params.T
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=4), cells=32)
      >>> cache = warm_up(forward, jnp.eye(4), cache, ubatch_size=8)
      >>> cache, *_ = prefill(forward, jnp.eye(4), cache, make_batch([1, 2, 3]), ubatch_size=8)
      >>> compiled, cache.num_used_cells().item()
      ([(1, 1), (1, 2), (1, 4), (1, 8)], 3)
    """
    if not sequences:
        raise ValueError(
            "expected at least one sequence to warm up for, got none; pass one or more"
        )
    spec = split(cache)[0].spec
    limit = max(check_ubatch_size(spec, ubatch_size) // len(sequences), 1)
    longest = limit if longest is None else check_count(longest, "longest")

    def plan_of_length(length: int) -> Plan:
        batch = make_batch([[0] * length] * len(sequences), sequences=sequences)
        return init_batch(cache, batch, ubatch_size=ubatch_size)

    plans = [plan_of_length(length) for length in _bucket_lengths(limit)]
    for length in _bucket_lengths(longest):
        for rest in (
            _bucket_lengths(limit) if length > limit else ()
        ):  # the tokens of the last ubatch
            plan_of_length((length - rest) // limit * limit + rest)
    step = compiled_step(forward)
    table, buffers = own_or_copied_buffers(cache, donate)
    for plan in plans:
        logits = []
        for ubatch in plan.ubatches:
            _, buffers, out = step(params, table, buffers, _without_slots(table, ubatch))
            logits.append(out)
        plan.gather_outputs(logits)
    return merge(table, buffers) if donate else cache


@jit_table
def _without_slots(table: CacheTable, ubatch: Ubatch) -> Ubatch:
    """Return a ubatch of which no token is written."""
    del table  # selects the mesh
    return mask_slots(jnp.array(False), ubatch)


def _bucket_lengths(limit: int) -> list[int]:
    """Return the powers of two below a limit, and the limit.

    >>> _bucket_lengths(6)
    [1, 2, 4, 6]
    """
    return sorted({min(next_power_of_two(length), limit) for length in range(1, limit + 1)})
