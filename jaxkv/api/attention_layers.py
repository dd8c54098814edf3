"""`AttentionLayers`: attention for models whose attention function can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxkv.api.layer import attend
from jaxkv.step import Step

if TYPE_CHECKING:
    from jaxtyping import Array, Float

OPTIONS = ("scale", "softcap", "sinks")
"""Options of `attend` that a model may pass."""
NO_EFFECT = ("mask", "is_causal", "deterministic", "broadcast_dropout", "dropout_rng", "dtype")
NO_EFFECT += ("precision", "module", "implementation")
"""Ignored options of `flax` and `jax.nn`; the cache determines the mask, and dropout is off."""


class AttentionLayers:
    """Attention function for all layers of a model, in one forward pass.

    Pass the object as the attention function of `nnx.MultiHeadAttention`, of Linen's
    `MultiHeadDotProductAttention`, or of any model that calls a function of q, k and v. Each call
    attends in the next layer of the cache. To choose a layer by number, index the object. The model
    must apply the rope to queries and keys. The option `mask` is ignored.

    Inside of `jax.checkpoint` or a scan, call `attend` in place of the object.

    The property `step` is the step after the last call.

    Args:
      step: the step that the model gets.

    Raises:
      TypeError: If the model passes an unsupported option. A model can pass `scale`, `softcap`,
        `sinks`, and the options that flax layers pass.
      ValueError: If a layer is called twice, the model has more layers than the cache, or the model
        passes a bias or uses dropout.

    Examples:
      A model of two layers that takes an attention function:

      >>> def model(params, tokens, attention):
      ...     x = jnp.take(params, tokens, axis=0)[:, :, None]
      ...     for _ in range(2):
      ...         x = x + attention(x, x, x, mask=None)
      ...     return x.reshape(-1, 4)
      >>> def forward(params, step):
      ...     layers = AttentionLayers(step)
      ...     x = model(params, step.tokens, layers)
      ...     return layers.step, x[step.outputs] @ params.T
      >>> cache = make_cache(CacheSpec.attention(layers=2, kv_heads=1, head_dim=4), cells=8)
      >>> prefill(forward, jnp.eye(4), cache, [1, 2, 3]).logits.shape
      (1, 4)
    """

    def __init__(self, step: Step):
        if not isinstance(step, Step):
            raise TypeError(f"expected a step, got {type(step)}; pass that of forward")
        self.step = step

    def __call__(
        self,
        q: Float[Array, "R T H D"],
        k: Float[Array, "R T K D"],
        v: Float[Array, "R T K Dv"],
        **options: Any,
    ) -> Float[Array, "R T H Dv"]:
        """Return the output of the next layer; see `attend`."""
        layers = self.step.table.layers_to_write(self.step.buffers, self.step.ubatch)
        attends = [(number, path) for path, verb, number in layers if verb == "attend"]
        left = [number for number, path in sorted(attends) if path not in self.step.written_paths]
        if not left:
            raise ValueError(
                f"expected {len(attends)} calls, one for each attention layer of the cache, got "
                "one more; make the cache with the layers of the model"
            )
        return self._attend(left[0], q, k, v, **options)

    def __getitem__(self, layer: int) -> Callable[..., Float[Array, "R T H Dv"]]:
        """Return the attention function of the layer with this number."""
        return partial(self._attend, layer)

    def _attend(
        self,
        layer: int,
        q: Float[Array, "R T H D"],
        k: Float[Array, "R T K D"],
        v: Float[Array, "R T K Dv"],
        *,
        bias: object = None,
        dropout_rate: float = 0.0,
        **options: Any,
    ) -> Float[Array, "R T H Dv"]:
        if bias is not None:
            raise ValueError("expected no bias, got one; call attend(bias=) in the model")
        if dropout_rate and not options.get("deterministic", False):
            raise ValueError(
                f"expected attention without dropout, got a rate of {dropout_rate}; pass "
                "deterministic=True"
            )
        given = {name: x for name, x in options.items() if x is not None and name not in NO_EFFECT}
        if unknown := given.keys() - OPTIONS:
            raise TypeError(
                f"expected options among {', '.join(OPTIONS)}, got {', '.join(sorted(unknown))}; "
                "call attend in the model"
            )
        self.step, out = attend(self.step, layer, q, k, v, **given)
        return out
