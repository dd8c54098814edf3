"""Base classes of all model families: the module and its configuration.

Several families have further fields in their configuration:

- `layers`: number of layers, L.
- `hidden`: inner size of the feed-forward modules.
- `rope`: rotary embedding of queries and keys; None for no rotation.
- `windows`: window of each layer; None for full attention.
- `scale`: factor of query-key products.
- `bias`: whether query, key and value projections have biases.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.window import Window
from models.checkpoints.checkpoint import Checkpoint
from models.families.layers import RMSNorm, Vocabulary


@dataclass(frozen=True, kw_only=True)
class Config:
    """Hashable configuration of a model.

    vocabulary: number of token ids, V.
    eps: epsilon of the norms.
    tied: whether the embedding matrix is also the output matrix.
    """

    vocabulary: int
    eps: float
    tied: bool = True


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Configuration of a model with attention.

    width: size of a token's vector between layers.
    heads: number of query heads, H.
    kv_heads: number of key/value heads, K.
    head_dim: size of a head, D.
    implementation: attention implementation, see `jaxkv.attend`; None lets jaxkv choose.
    return_mass: whether the model also returns the attention mass of each layer.
    return_features: whether the model also returns the input of the output matrix.
    """

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    implementation: jaxkv.ops.attention.Implementation | None = None
    return_mass: bool = False
    return_features: bool = False


@dataclass(frozen=True, kw_only=True)
class WindowedConfig(AttentionConfig):
    """Configuration of a model with attention in each layer; layers may have windows."""

    windows: tuple[Window | None, ...]

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.windows)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(AttentionConfig):
    """Configuration of a model with recurrent layers; `attends` has True for attention layers."""

    attends: tuple[bool, ...]

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.attends)


def attention_fields(checkpoint: Checkpoint, *, eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Read the fields of `AttentionConfig` from a checkpoint, except those of `models.load`.

    The argument `eps` is the key of the epsilon. Raises `ModelError` if the number of query heads
    is no multiple of the number of key/value heads.
    """
    c = checkpoint.config
    c.check_divides("num_key_value_heads", "num_attention_heads")
    return {
        "width": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"],
        "head_dim": c["head_dim"],
        "vocabulary": c["vocab_size"],
        "eps": c[eps],
        "tied": c["tie_word_embeddings"],
    }


class LanguageModel(nnx.Module):
    """Model that maps tokens to logits: an embedding, layers, a norm and an output matrix.

    block: class of the layers. A layer is a function from `(step, x)` to `(step, x)`;
      `x` is `[R, T, width]`.
    less_one: whether the norm of the last layer's output stores its factor minus 1.
    """

    block: type[nnx.Module]
    less_one: bool = False

    def __init__(self, config: Any, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        c = self.config = config
        self.vocabulary = Vocabulary(c.vocabulary, c.width, dtype, rngs, tied=c.tied)
        self.blocks = nnx.List([self.block(c, layer, dtype, rngs) for layer in range(c.layers)])
        self.norm = RMSNorm(c.width, c.eps, dtype, less_one=self.less_one)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as the input of the first layer, `[R, T, width]`."""
        return self.vocabulary.embed(tokens)

    def embed_step(self, step: jaxkv.Step) -> jax.Array:
        """Return the input of the first layer, `[R, T, width]`."""
        return self.embed(step.tokens) if step.embeddings is None else step.embeddings

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        return self.vocabulary.logits(x)

    def run_blocks(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply all layers to `x`, `[R, T, width]`; return the next step and the new `x`."""
        for block in self.blocks:
            step, x = block(step, x)
        return step, x

    def __call__(self, step: jaxkv.Step) -> tuple[jaxkv.Step, *tuple[jax.Array, ...]]:
        """Run the model; return the step after all layers, and logits `[O, V]`, float32.

        With `return_features`, the third result is `[O, width]`, the normalised output of the last
        layer.
        """
        step, x = self.run_blocks(step, self.embed_step(step))
        x = self.norm(x.reshape(-1, x.shape[-1])[step.outputs])
        features = (x,) if getattr(self.config, "return_features", False) else ()
        return step, self.logits(x), *features
