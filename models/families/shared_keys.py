"""What layers of Gemma 3n and Gemma 4 share; the last layers attend to keys of earlier layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from models.checkpoints.config import Config as Settings
from models.families import gemma3, per_layer
from models.families.caches import Attends
from models.families.layers import Attention, Feed, RMSNorm
from models.families.sources import Sources


@dataclass(frozen=True, kw_only=True)
class Config(gemma3.Config):
    """Configuration of both families; other fields are in `gemma3` and `language_model`.

    cache_layers: layer number in the cache for each layer. A layer with the number of an earlier
      layer writes nothing.
    bias: whether attention projections have biases.
    inputs: sizes of the inputs of layers; None for no inputs.
    """

    scale: float = 1.0
    cache_layers: tuple[int, ...]
    bias: bool
    inputs: per_layer.InputSizes | None

    def writes(self, layer: int) -> bool:
        """Return whether a layer writes keys and values."""
        return self.cache_layers[layer] == layer

    def head_sizes(self, layer: int) -> tuple[int, int]:
        """Return the number of key/value heads of a layer, and the size of a head."""
        del layer
        return self.kv_heads, self.head_dim

    def has_same_values(self, layer: int) -> bool:
        """Return whether keys of a layer are also its values."""
        del layer
        return False


class Block(nnx.Module):
    """Attention and a feed-forward part, each with a norm before and after it; a layer's input."""

    def __init__(
        self,
        config: Config,
        layer: int,
        hidden: int,
        activation: Callable[[jax.Array], jax.Array],
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        c = self.config = config
        norm = partial(RMSNorm, eps=c.eps, dtype=dtype)
        kv_heads, head_dim = c.head_sizes(layer)
        self.attention_norm = norm(c.width)
        self.attention = Attention(
            replace(c, kv_heads=kv_heads, head_dim=head_dim),
            c.cache_layers[layer],
            dtype,
            rngs,
            rope=c.ropes[layer],
            bias=c.bias,
            norm=norm,
            value_norm=norm(head_dim, weighted=False),
            scale=c.scale,
            writes=c.writes(layer),
            keys_are_values=c.has_same_values(layer),
        )
        self.after_attention_norm = norm(c.width)
        self.feed_norm = norm(c.width)
        self.feed = Feed(c.width, hidden, activation, dtype, rngs)
        self.after_feed_norm = norm(c.width)
        if c.inputs is not None:
            self.gate = per_layer.InputGate(c.width, c.inputs.size, c.eps, dtype, rngs)


def block_weights(source: Sources, config: Config, i: int, layer: str) -> dict[str, Any]:
    """Return the tensors for the `Block` of layer i, which has this name in the checkpoint."""
    letters = "qk" if config.has_same_values(i) else "qkv"
    tree = gemma3.layer_weights(source, layer)
    tree["attention"] = source.attention(
        f"{layer}.self_attn",
        kv_heads=config.head_sizes(i)[0],
        bias=config.bias,
        norms="norm",
        letters=letters if config.writes(i) else "q",
    )
    if config.inputs is not None:
        tree["gate"] = per_layer.input_gate_weights(source, layer)
    return tree


def cache_layers(c: Settings, windows: Sequence[jaxkv.Window | None]) -> tuple[int, ...]:
    """Return the layer number in the cache for each layer.

    The first layers write, each under its own number. The last `num_kv_shared_layers` layers attend
    to the keys and values of the last layer of their kind that writes.

    Raises:
      ModelError: If no layer writes, or the layers that write are not of all kinds.
    """
    writes = len(windows) - c["num_kv_shared_layers"]
    last = {window: layer for layer, window in enumerate(windows[: max(writes, 0)])}
    if last.keys() != {*windows}:
        raise c.refusal("num_kv_shared_layers", "a layer of each kind before the last layers")
    shared = [last[window] for window in windows[writes:]]
    return (*range(writes), *shared)


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return a description of each layer of the cache; the argument `dtype` is unused."""
    del dtype
    layers = []
    for i in filter(config.writes, range(config.layers)):
        kv_heads, head_dim = config.head_sizes(i)
        rope, window = config.ropes[i], config.windows[i]
        layers.append(Attends(kv_heads=kv_heads, head_dim=head_dim, rope=rope, window=window))
    return layers
