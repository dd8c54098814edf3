"""What every family is from the outside: tokens in, logits out; what its layers are, it says."""

from typing import Any

import jax
from flax import nnx

from jaxkv import Ubatch
from models.families.layers import RMSNorm, Vocabulary


class LanguageModel(nnx.Module):
    """Tokens in, logits of the tokens that want them out; layers one after another between.

    A family makes the three parts, and says where its embeddings or logits are more than a row of
    a matrix and a product with one.

    vocabulary: the embedding and the head.
    blocks: the layers; each takes the cache, the ubatch and `x`, `[R, T, width]`, and returns the
      cache and the next `x`.
    norm: of what the last layer makes.
    """

    vocabulary: Vocabulary
    blocks: nnx.List
    norm: RMSNorm

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Turn tokens, `[R, T]`, into what the first layer reads, `[R, T, width]`."""
        return self.vocabulary.embed(tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """Turn what the norm makes of O tokens, `[O, width]`, into logits `[O, V]`, float32."""
        return self.vocabulary.logits(x)

    def __call__(self, cache: Any, ubatch: Ubatch) -> tuple[Any, jax.Array]:
        """Run a ubatch that has been applied; returns the cache and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        for block in self.blocks:
            cache, x = block(cache, ubatch, x)
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        return cache, self.logits(self.norm(x))
