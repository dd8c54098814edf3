"""DeepSeek V3.2: latent attention to the cells that an indexer selects (DSA), and experts.

The indexer is a small attention of its own: it has several queries for each token, and one key for
each cell. A cell's score is the weighted sum, over queries, of the positive parts of query-key
products. A token attends to the cells with the largest scores. The keys of the indexer of layer i
are stored in layer L + i of the cache.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from models.checkpoints.checkpoint import Checkpoint
from models.families import deepseek
from models.families.caches import Attends
from models.families.language_model import LanguageModel
from models.families.layers import LayerNorm, Linear
from models.families.sources import Sources

ARCHITECTURES = ("deepseek_v32",)


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.Config):
    """Configuration of DeepSeek V3.2; other fields are in `models.families.deepseek`.

    index_heads: number of queries of an indexer for each token.
    index_dim: size of a query and of a key of an indexer, above `rope_dim`.
    index_cells: largest number of cells that a token attends to.
    """

    index_heads: int
    index_dim: int
    index_cells: int

    @property
    def index_rope(self) -> jaxkv.Rope:
        """Rotary embedding of an indexer's queries and keys; it rotates halves."""
        return replace(self.rope, interleaved=False)


class Indexer(nnx.Module):
    """Selector of cells."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.layer = c.layers + layer
        self.query = Linear(c.query_rank, (c.index_heads, c.index_dim), dtype, rngs)
        self.key = Linear(c.width, c.index_dim, dtype, rngs)
        self.key_norm = LayerNorm(c.index_dim, deepseek.EPS, dtype)
        self.weights = Linear(c.width, c.index_heads, dtype, rngs)

    def __call__(
        self, step: jaxkv.Step, x: jax.Array, low: jax.Array
    ) -> tuple[jaxkv.Step, jax.Array | None]:
        """Store the keys of `x`, `[R, T, width]`; return the step and the selected cells.

        The argument `low` `[R, T, query_rank]` has the inputs of query projections. The cells are
        `[P, t, n]`, see `jaxkv.attend`; None if there are no more cells than a token attends to.
        """
        c = self.config
        key = self.key_norm(self.key(x))[:, :, None]
        step = jaxkv.write_kv(step, self.layer, c.index_rope.rotate(key, step.positions))
        keys, _, mask, _ = jaxkv.read_kv(step, self.layer)
        if mask.shape[2] <= c.index_cells:
            return step, None
        q = c.index_rope.rotate(self.query(low), step.positions).astype(jnp.float32)
        q = q.reshape(*mask.shape[:2], c.index_heads, c.index_dim) * c.index_dim**-0.5
        weights = self.weights(x).astype(jnp.float32).reshape(*mask.shape[:2], c.index_heads)
        products = jnp.einsum("pthd,pnd->pthn", q, keys[:, 0].astype(jnp.float32))
        scores = jnp.einsum("pthn,pth->ptn", jax.nn.relu(products), weights * c.index_heads**-0.5)
        _, cells = jax.lax.top_k(jnp.where(mask, scores, -jnp.inf), c.index_cells)
        return step, cells


class IndexedAttention(deepseek.LatentAttention):
    """Attention over the latents of selected cells."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        super().__init__(config, layer, dtype, rngs)
        self.indexer = Indexer(config, layer, dtype, rngs)

    def select(
        self, step: jaxkv.Step, x: jax.Array, low: jax.Array
    ) -> tuple[jaxkv.Step, jax.Array | None]:
        """Return the step and the cells that each token attends to; None for all."""
        return self.indexer(step, x, low)


class Block(deepseek.Block):
    """One layer: attention over selected cells, a feed-forward part and possibly experts."""

    attention_class = IndexedAttention


class DeepSeekV32(LanguageModel):
    """Flax module of DeepSeek V3.2."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.ignore("layer_types mlp_bias")  # the class declares them, and does not use them for logits
    kinds = list(c["mlp_layer_types"])
    dense = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    layers = c["num_hidden_layers"]
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise c.refusal("mlp_layer_types", f"dense, then sparse, for {layers} layers")
    if not c.get("q_lora_rank"):
        raise c.refusal("q_lora_rank", "a rank")
    if c["index_head_dim"] <= c["qk_rope_head_dim"]:
        raise c.refusal("index_head_dim", f"more than {c['qk_rope_head_dim']} (qk_rope_head_dim)")
    base = deepseek.config_of(checkpoint)
    given = {field.name: getattr(base, field.name) for field in fields(base)} | {"dense": dense}
    return Config(
        **given,
        index_heads=c["index_n_heads"],
        index_dim=c["index_head_dim"],
        index_cells=c["index_topk"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `DeepSeekV32`."""
    source, tree = Sources(checkpoint), deepseek.weights_of(checkpoint, config)
    for i, block in tree["blocks"].items():
        name = f"model.layers.{i}.self_attn.indexer"
        block["attention"]["indexer"] = {
            "query": source.linear(f"{name}.wq_b", parts=config.index_heads),
            "key": source.linear(f"{name}.wk"),
            "key_norm": source.linear(f"{name}.k_norm", bias=True),
            "weights": source.linear(f"{name}.weights_proj"),
        }
    return tree


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return what the cache stores: latents of L layers, then keys of their L indexers."""
    c = config
    values = slice(c.rope_dim, c.rope_dim + 1)  # a slice of the key, so that no values are stored
    keys = Attends(kv_heads=1, head_dim=c.index_dim, value_dim=values, rope=c.index_rope)
    return [*deepseek.layers_of(config, dtype), *[keys] * c.layers]


MODULE = DeepSeekV32
