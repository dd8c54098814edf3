"""Inputs of each layer, in Gemma 3n and Gemma 4."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.checkpoints.config import Config
from models.families.language_model import AttentionConfig
from models.families.layers import Linear, RMSNorm, gelu
from models.families.linear import matrix
from models.families.sources import Sources
from models.meshes import Split


@dataclass(frozen=True, kw_only=True)
class InputSizes:
    """Sizes of the inputs of layers.

    size: width of an input.
    tokens: number of token ids that have inputs.
    padding: token whose inputs are used if a batch has embeddings instead of tokens, as for images.
    """

    size: int
    tokens: int
    padding: int


def input_sizes(c: Config) -> InputSizes:
    """Read the sizes of the inputs of layers."""
    return InputSizes(
        size=c["hidden_size_per_layer_input"],
        tokens=c["vocab_size_per_layer_input"],
        padding=c.get("pad_token_id", 0),
    )


class LayerInputs(nnx.Module):
    """A vector of size P for each token and layer, from the token and from its embedding.

    embedding: `[tokens, L * P]`.
    """

    def __init__(
        self, sizes: InputSizes, config: AttentionConfig, layers: int, dtype: Any, rngs: nnx.Rngs
    ):
        self.sizes, self.layers, width = sizes, layers, config.width
        parts = sizes.tokens
        split = Split(axis=0, parts=parts, of="tokens of the vocabulary", with_cells=True)
        self.embedding = matrix(rngs, (parts, layers * sizes.size), dtype, split=split)
        self.projection = Linear(width, (layers, sizes.size), dtype, rngs)
        # The classes divide the projection by sqrt(width), which the norm undoes but for epsilon.
        self.norm = RMSNorm(sizes.size, config.eps * width, dtype)

    def __call__(self, tokens: jax.Array | None, x: jax.Array) -> list[jax.Array]:
        """Return vectors `[R, T, P]` for each layer, from tokens `[R, T]` and embeddings `x`."""
        if tokens is None:
            tokens = jnp.full(x.shape[:2], self.sizes.padding)
        of_token = jnp.take(self.embedding[...], tokens, axis=0)
        of_token = of_token.reshape(*tokens.shape, self.layers, -1)
        factor = jnp.asarray(self.sizes.size**0.5, of_token.dtype)
        both = (self.norm(self.projection(x)) + of_token * factor) * 2**-0.5
        return jnp.unstack(both, axis=2)


class InputGate(nnx.Module):
    """A map of a layer's output to a vector that is added to it; the layer's input is a factor."""

    def __init__(self, width: int, size: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = Linear(width, size, dtype, rngs)
        self.projection = Linear(size, width, dtype, rngs)
        self.norm = RMSNorm(width, eps, dtype)

    def __call__(self, x: jax.Array, inputs: jax.Array) -> jax.Array:
        """Map `x`, `[R, T, width]`, and the layer's input `[R, T, P]` to `[R, T, width]`."""
        return self.norm(self.projection(gelu(self.gate(x)) * inputs))


def layer_input_weights(source: Sources, layers: int) -> dict[str, Any]:
    """Return the tensors for `LayerInputs`."""
    return {
        "embedding": source.tensor("model.embed_tokens_per_layer.weight"),
        "projection": source.linear("model.per_layer_model_projection", parts=layers),
        "norm": source.norm("model.per_layer_projection_norm"),
    }


def input_gate_weights(source: Sources, layer: str) -> dict[str, Any]:
    """Return the tensors for the `InputGate` of the layer with this name."""
    return {
        "gate": source.linear(f"{layer}.per_layer_input_gate"),
        "projection": source.linear(f"{layer}.per_layer_projection"),
        "norm": source.norm(f"{layer}.post_per_layer_input_norm"),
    }
