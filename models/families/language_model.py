"""Base class of all model families.

Each family has a hashable `Config`. Several families have these fields:

- `layers`: number of layers, L.
- `width`: size of a token's vector between layers.
- `hidden`: inner size of the feed-forward modules.
- `heads`: number of query heads, H.
- `kv_heads`: number of key/value heads, K.
- `head_dim`: size of a head, D.
- `vocabulary`: number of token ids, V.
- `eps`: epsilon of the norms.
- `rope`: rotary embedding of queries and keys; None for no rotation.
- `windows`: window of each layer; None for full attention.
- `scale`: factor of query-key products.
- `tied`: whether the embedding matrix is also the output matrix.
- `bias`: whether query, key and value projections have biases.
- `implementation`: attention implementation, see `jaxkv.attend`; None lets jaxkv choose.
"""

from typing import Any

import jax
from flax import nnx

from jaxkv import Ubatch
from models.families.layers import RMSNorm, Vocabulary


class LanguageModel(nnx.Module):
    """Model that maps tokens to logits: an embedding, layers, a norm and an output matrix.

    vocabulary: module with the embedding and the head.
    blocks: layers, functions from `(cache, ubatch, x)` to `(cache, x)`; `x` is `[R, T, width]`.
    norm: normalisation of the last layer's output.
    """

    vocabulary: Vocabulary
    blocks: nnx.List
    norm: RMSNorm

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens `[R, T]` as the input of the first layer, `[R, T, width]`."""
        return self.vocabulary.embed(tokens)

    def logits(self, x: jax.Array) -> jax.Array:
        """Map normalised vectors `[O, width]` to logits `[O, V]`, float32."""
        return self.vocabulary.logits(x)

    def __call__(self, cache: Any, ubatch: Ubatch) -> tuple[Any, jax.Array]:
        """Run the model on an applied ubatch; return the cache and logits `[O, V]`, float32."""
        x = self.embed(ubatch.tokens) if ubatch.embeddings is None else ubatch.embeddings
        for block in self.blocks:
            cache, x = block(cache, ubatch, x)
        x = x.reshape(-1, x.shape[-1])[ubatch.outputs]
        return cache, self.logits(self.norm(x))
