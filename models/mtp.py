"""Drafts from the heads of models that predict further tokens (MTP)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import generation
from jaxkv.generation.model_program import ModelProgram
from models.errors import ModelError, few
from models.families import gated_delta, mtp
from models.model import Model, functional, on_mesh, problems_of, read_params


def mtp_head(model: Model) -> Model:
    """Load the head of a model that predicts further tokens (MTP) from the tensors `mtp.*`.

    Args:
      model: a model from `load`, of Qwen3-Next or Qwen3.5. The head shares its vocabulary.

    Returns:
      A model of one layer, whose `forward` is a head for `jaxkv.generation.head_drafter`.

    Raises:
      ModelError: If the model has no such head, or one of several layers.
    """
    checkpoint = model.checkpoint
    names = {name for name in checkpoint.tensors if name.startswith("mtp.")}
    if not names or not issubclass(model.family.MODULE, gated_delta.GatedDelta):
        raise ModelError(
            f"{checkpoint.source}: expected a model with the tensors mtp.* of a head, got one "
            "without; use another drafter."
        )
    config = mtp.config_of(model.config)
    forward, _, shapes = functional(mtp, config, model.dtype)
    head = replace(model, config=config, forward=forward, family=mtp, params=shapes)
    if model.mesh is not None:
        head = on_mesh(head, model.mesh, model.rules)
    own = {name: tree for name, tree in head.params.items() if name != "vocabulary"}
    sources = mtp.weights_of(checkpoint, config)
    sources = {name: sources[name] for name in own}
    unused = sorted(names - checkpoint.used_names)
    if problems := problems_of(checkpoint, own, sources) or unused and f"unused ({few(unused)})":
        raise ModelError(
            f"{checkpoint.source}: expected the tensors of a head of one layer, got {problems}; "
            "use another drafter."
        )
    params = read_params(own, sources, None)
    return replace(head, params=params | {"vocabulary": model.params["vocabulary"]})


def mtp_drafter(
    model: Model,
    head: Model,
    prompts: Sequence[Sequence[int]],
    *,
    cells: int,
    num_draft_tokens: int = 3,
    extra: Mapping[str, Any] | None = None,
) -> generation.Drafter:
    """Make a drafter from a head, for `jaxkv.generate` or `jaxkv.generation.speculate`.

    The model computes the prompts in a cache of its own, since `generate` does not return features
    of prompts.

    Args:
      model: a model from `load` with `return_features=True`.
      head: the result of `mtp_head(model)`.
      prompts: P lists of tokens; prompt i is in sequence i.
      cells: number of cells of each sequence in the cache of the head.
      num_draft_tokens: maximum number of tokens of a draft. The main cache must have `max_rollback`
        of at least this number.
      extra: additional model inputs of the prompts, as in `jaxkv.generate`.

    Raises:
      ModelError: If the model does not return features.
    """
    if not model.config.return_features:
        raise ModelError(
            f"{model.checkpoint.source}: expected a model that returns features, got one that does "
            "not; load it with return_features=True."
        )
    count, lengths = len(prompts), [len(prompt) for prompt in prompts]
    sizes = dict(sequences=count, streams=count)
    cache, found = model.make_cache(cells=max(lengths), **sizes), []
    batch = jaxkv.make_batch(prompts, outputs=np.ones(sum(lengths), bool), extra=extra)
    plan = jaxkv.init_batch(cache, batch)
    for ubatch in plan.check().ubatches:
        cache, features = _FEATURES(model.forward, model.params, cache, ubatch, donate=True)
        found.append(features)
    features = plan.gather_outputs(found)
    last = np.cumsum(lengths) - 1
    # The head reads each token except the first of a prompt, with the features of the one before.
    first = last + 1 - lengths
    inputs = {name: np.delete(x, first, axis=0) for name, x in (batch.extra or {}).items()}
    cache = head.make_cache(cells=cells, **sizes)
    if longer := [i for i, length in enumerate(lengths) if length > 1]:
        rest = jaxkv.make_batch(
            [prompts[i][1:] for i in longer],
            sequences=longer,
            extra={**inputs, "features": jnp.delete(features, last, axis=0)},
        )
        cache = jaxkv.prefill(head.forward, head.params, cache, rest).cache
    return generation.head_drafter(
        head.forward, head.params, cache, features[last], num_draft_tokens=num_draft_tokens
    )


def _features_of_ubatch(
    forward: Callable, params: Any, cache: jaxkv.Cache, ubatch: jaxkv.Ubatch
) -> tuple[jaxkv.Cache, jax.Array]:
    step, _, features = forward(params, jaxkv.apply(cache, ubatch))
    return step.cache, features


_FEATURES = ModelProgram(_features_of_ubatch)
