"""Computation of encoder sources, which cross-attention reads from a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxkv.api.apply import apply
from jaxkv.batch import Batch, make_batch
from jaxkv.cache import Cache
from jaxkv.core.array_utils import is_concrete
from jaxkv.generation.model_program import ModelProgram
from jaxkv.generation.results import PrefillResult
from jaxkv.planning.planners import init_batch
from jaxkv.ubatch import Ubatch

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.core.types import Tokens
    from jaxkv.step import Step
from jaxkv.step import Step

Encoder = Callable[[Any, Step], Step]
"""Function `(params, step) -> step`; the step has the tokens of sources."""


def encode(
    encoder: Encoder,
    params: PyTree,
    cache: Cache,
    batch: Batch | Tokens,
    *,
    append: bool = False,
    donate: bool = False,
) -> PrefillResult:
    """Run an encoder, and write the encoder sources of sequences to a cache.

    Args:
      encoder: Function `(params, step) -> step`. Pass the same function in every call, as
        for `prefill`. The step has all source tokens. For each cross-attention layer, the function
        passes keys and values to `write_kv`.
      params: Model parameters, any pytree.
      cache: A hybrid cache with a part for encoder sources (`CacheSpec.cross_attention`).
      batch: Source tokens: a `Batch`, or an argument of `make_batch`; see `init_batch`.
      append: If True, add the tokens to the sources of their sequences, as for a later image of a
        conversation. Positions continue; see `init_batch`. Later decoder tokens attend to the whole
        source. To hide a part of it from them, pass `bias=` to `attend`. Static.
      donate: If True, reuse the buffers of the input cache, which becomes invalid; see `prefill`.

    Returns:
      A `PrefillResult` with None in place of `logits` and `sequences`. The other fields are
      `cache`, `ok` `[]` bool and `reason` `[Q]` int32. Inside of `jit`, a refused plan does not
      raise: `ok` is False, and the cache is unchanged, bit for bit.

    Raises:
      PlanRefusedError: If the sources do not fit.
      PlanRefusedError: If a sequence already has a source, and `append` is False.
      TypeError: If the cache has no part for encoder sources.
      ValueError: If the encoder does not return a step, or the cache was donated.

    Examples:
      An encoder without self-attention, and a decoder that repeats the source:

      >>> def encoder(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     return write_kv(step, 1, x, x)
      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, _ = attend(step, 0, x, x, x)
      ...     step, x = attend(step, 1, x)
      ...     return step, x.reshape(-1, 4)[step.outputs]
      >>> sizes = dict(layers=1, kv_heads=1, head_dim=4)
      >>> text, sources = CacheSpec.attention(**sizes), CacheSpec.cross_attention(**sizes)
      >>> cache = make_cache(CacheSpec.hybrid((text, [0]), (sources, [1])), cells=8, sequences=2)
      >>> cache = encode(encoder, jnp.eye(4), cache, [[2, 2, 2], [3]]).cache
      >>> cache, logits, *_ = prefill(forward, jnp.eye(4), cache, [[0], [0, 1]])
      >>> jnp.argmax(logits, axis=-1).tolist()
      [2, 3]

    llama.cpp: `llama_encode`.
    """
    if not isinstance(batch, Batch):
        batch = make_batch(batch)
    plan = init_batch(cache, batch, encoder=True, append=append)
    (ubatch,) = plan.ubatches
    if is_concrete(plan.ok):
        plan.check()
    (cache,) = _ENCODE(encoder, params, cache, ubatch, donate=donate)
    return PrefillResult(cache, None, None, plan.ok, plan.reason)


def _encode_ubatch(encoder: Encoder, params: PyTree, cache: Cache, ubatch: Ubatch) -> tuple[Cache]:
    step = encoder(params, apply(cache, ubatch))
    if not isinstance(step, Step):
        raise ValueError(
            f"expected a step from encoder, got {type(step)}; return the step of the last write_kv"
        )
    return (step.cache,)


_ENCODE = ModelProgram(_encode_ubatch)
