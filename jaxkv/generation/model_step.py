"""One model step: apply a ubatch and call the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.api.apply import apply
from jaxkv.cache import Cache
from jaxkv.generation.model_program import ModelProgram
from jaxkv.step import Step
from jaxkv.table import check_made_for
from jaxkv.ubatch import Ubatch, placed_rows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, PyTree

Forward = Callable[[Any, Step], tuple[Step, jax.Array] | tuple[Step, jax.Array, Any]]
"""Model function `(params, step) -> step, logits [O, V]`, or `step, logits, aux`."""

Edit = Callable[[Cache, Any], Cache]
"""Function `(cache, aux) -> cache`, which edits the cache after each model step of a loop.

`aux` is the third result of the model function, any pytree, or None. The function is traced in the
loop. Pass the same function in every call: a new lambda is compiled again.
"""


def model_step(
    forward: Forward, params: PyTree, cache: Cache, ubatch: Ubatch, *, edit: Edit | None = None
) -> tuple[Cache, Float[Array, "O V"]]:
    """Apply a ubatch and run the model; return the cache and the logits.

    In your own loop, call `model_step` inside of `jit`. If the ubatch is refused (for example,
    because no cell is free) or stale, the cache is unchanged, and the logits are undefined. Read
    `Plan.ok` to detect a refused ubatch.

    Args:
      forward: Model function `(params, step) -> step, logits [O, V]`, see `prefill`.
      params: Model parameters, any pytree.
      cache: The cache for which the ubatch was planned.
      ubatch: One of `Plan.ubatches`, such as `plan_step(cache, tokens).ubatch`.
      edit: Function `(cache, aux) -> cache`, called after the step, see `decode`.

    Returns:
      The cache with the tokens of the ubatch, and the logits `[O, V]` as the model returned them.
      Row i of the logits is for the token with the index `ubatch.outputs[i]` among the R * T
      tokens. Rows after the last output token are padding.

    Raises:
      ValueError: If the model function does not return a step and float logits `[O, V]`.
      ValueError: If the function did not write each layer, see `Step.cache`.
      TypeError: If `edit` does not return a cache of the same kind and sizes.
      ValueError: If the ubatch was planned for another `TableSpec`.
      TypeError: If a plan is passed as the ubatch.

    Examples:
      >>> def forward(params, step):
      ...     x = jnp.take(params, step.tokens, axis=0)[:, :, None]
      ...     step, x = attend(step, 0, x, x, x)
      ...     return step, x.reshape(-1, 4)[step.outputs] @ params.T
      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2)
      >>> ubatch = plan_step(cache, [1, 2]).ubatch
      >>> cache, logits = generation.model_step(forward, jnp.eye(4), cache, ubatch)
      >>> logits.shape, cache.seq_pos_max().tolist()
      ((2, 4), [0, 0])
    """
    return run_model(forward, params, cache, ubatch, edit)[:2]


def run_model(
    forward: Forward, params: PyTree, cache: Cache, ubatch: Ubatch, edit: Edit | None = None
) -> tuple[Cache, Float[Array, "O V"], PyTree]:
    """Implement `model_step`; also return `aux`, None if the model function returns none."""
    check_made_for(cache.table, ubatch)
    step = apply(cache, ubatch)
    output = forward(params, step)
    is_result = isinstance(output, tuple) and len(output) in (2, 3)
    if not is_result or not isinstance(output[0], Step):
        description = type(output)
        if isinstance(output, tuple):
            description = f"({', '.join(type(item).__name__ for item in output)})"
        elif isinstance(output, jax.Array):
            description = f"an array of shape {output.shape}"
        raise ValueError(
            f"expected step and logits from forward, got {description}; end it with "
            "`return step, logits`"
        )
    after, logits, *aux = output
    if after.is_written is not None and after.is_written is step.is_written:
        raise ValueError(
            "expected a step with written layers from forward, got its input step; return the "
            "step of the last attend"
        )
    after = after.cache
    shape, rows = np.shape(logits), ubatch.outputs.shape[0]
    if len(shape) != 2 or shape[0] != rows or not shape[1]:
        raise ValueError(
            f"expected logits [O, V] from forward, a row for each of the {rows} ubatch.outputs, "
            f"got {shape}; flatten the rows of the last layer, and take x.reshape(-1, width)"
            f"[ubatch.outputs]"
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"expected logits of floats from forward, got {logits.dtype}; cast them")
    aux = aux[0] if aux else None
    return after if edit is None else _edit_cache(edit, after, aux, step.ubatch), logits, aux


def _edit_cache(edit: Edit, cache: Cache, aux: PyTree, ubatch: Ubatch) -> Cache:
    """Return the edited cache; the cache unchanged if no token of the ubatch was stored."""
    edited = edit(cache, aux)
    forms = [jax.tree.flatten(jax.tree.map(jax.typeof, x)) for x in (cache, edited)]
    if forms[0] != forms[1]:
        raise TypeError(
            f"expected the edited cache from edit, got {edited!r:.80}; return a cache of the same "
            "sizes, such as evict(cache, keep).cache"
        )
    is_stored = jnp.any(placed_rows(ubatch))

    def choose(old: jax.Array, new: jax.Array) -> jax.Array:
        return old if new is old else jnp.where(is_stored, new, old)

    return jax.tree.map(choose, cache, edited)


_STEP = ModelProgram(model_step)


def compiled_step(forward: Forward, edit: Edit | None = None) -> jax.stages.Wrapped:
    """Return a jitted model step, `(params, table, buffers, ubatch) -> table, buffers, logits`."""
    return _STEP.compiled(forward, edit)
