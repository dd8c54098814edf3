"""`AttentionLayers`: attention for models whose attention function can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxkv.api.layer import attend
from jaxkv.batch import Ubatch
from jaxkv.cache import Cache

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

    Args:
      cache: a cache to which the ubatch was applied.
      ubatch: the tokens to compute.

    Raises:
      TypeError: If the model passes an unsupported option. A model can pass `scale`, `softcap`,
        `sinks`, and the options that flax layers pass.
      ValueError: If a layer is called twice, the model has more layers than the cache, or the model
        passes a bias or uses dropout.
      ValueError: If the property `cache` is read before all layers were called.

    Examples:
      A model of two layers that takes an attention function:

      >>> def model(params, tokens, attention):
      ...     x = jnp.take(params, tokens, axis=0)[:, :, None]
      ...     for _ in range(2):
      ...         x = x + attention(x, x, x, mask=None)
      ...     return x.reshape(-1, 4)
      >>> def forward(params, cache, ubatch):
      ...     layers = AttentionLayers(cache, ubatch)
      ...     x = model(params, ubatch.tokens, layers)
      ...     return layers.cache, x[ubatch.outputs] @ params.T
      >>> cache = make_cache(CacheSpec.attention(layers=2, kv_heads=1, head_dim=4), cells=8)
      >>> prefill(forward, jnp.eye(4), cache, [1, 2, 3]).logits.shape
      (1, 4)
    """

    def __init__(self, cache: Cache, ubatch: Ubatch):
        if not isinstance(cache, Cache) or not isinstance(ubatch, Ubatch):
            raise TypeError(
                f"expected a cache and a ubatch, got {type(cache)} and {type(ubatch)}; pass those "
                "of forward"
            )
        self._cache, self._ubatch = cache, ubatch
        self._layers = [
            layer
            for layer in range(cache.spec.layers)
            if cache.table.can_serve_layer("attend", layer)
        ]
        self._called: list[int] = []

    def __call__(
        self,
        q: Float[Array, "R T H D"],
        k: Float[Array, "R T K D"],
        v: Float[Array, "R T K Dv"],
        **options: Any,
    ) -> Float[Array, "R T H Dv"]:
        """Return the output of the next layer; see `attend`."""
        if len(self._called) == len(self._layers):
            raise ValueError(
                f"expected {len(self._layers)} calls, one for each attention layer of the cache, "
                "got one more; make the cache with the layers of the model"
            )
        return self._attend(self._layers[len(self._called)], q, k, v, **options)

    def __getitem__(self, layer: int) -> Callable[..., Float[Array, "R T H Dv"]]:
        """Return the attention function of the layer with this number."""
        return partial(self._attend, layer)

    @property
    def cache(self) -> Cache:
        """The cache after all layers were called."""
        if missing := [layer for layer in self._layers if layer not in self._called]:
            remedy = "call the function in each layer, or attend in a scan"
            if not self._called:
                remedy = "read the cache after the model has run, with this object as its attention"
            raise ValueError(
                f"expected a call for each of {len(self._layers)} attention layers, got none for "
                f"layers {missing}; {remedy}"
            )
        return self._cache

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
        if layer in self._called:
            raise ValueError(
                f"expected one call for each layer, got a second one for layer {layer}; give each "
                "layer its own number"
            )
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
        self._cache, out = attend(self._cache, layer, self._ubatch, q, k, v, **given)
        self._called.append(layer)
        return out
