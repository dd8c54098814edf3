"""DeepSeek V2 and V3: multi-head latent attention (MLA) and experts.

Each token has one vector, the latent. The keys and values of all heads are linear functions of it.
The cache stores the latent and a few rotated numbers as one key head; the value is a slice of the
key. Queries, instead of latents, are multiplied by the matrix that computes keys. Outputs of
attention, instead of latents, are multiplied by the matrix that computes values. In this form (the
absorbed form) a step reads each latent once for all heads.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from jaxkv.rope import Rope
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.tensor import Tensor
from models.families import language_model
from models.families.caches import Attends
from models.families.experts import Experts
from models.families.language_model import LanguageModel
from models.families.layers import Feed, Linear, RMSNorm, store_mass
from models.families.linear import linear, matrix
from models.families.ropes import rope_of, yarn_sharpness
from models.families.sources import Sources
from models.meshes import Split

ARCHITECTURES = ("deepseek_v2", "deepseek_v3")
EPS = 1e-6
"""Epsilon of the norms in attention, which does not depend on the config."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Selection of experts.

    experts: number of experts, of which a token selects `experts_per_token`.
    groups: number of groups of neighbouring experts, of which a token selects `groups_per_token`.
    scores: "softmax" over all logits (V2) or "sigmoid" of each logit (V3). With "sigmoid", a
      correction is added to the scores when experts are selected, but not to the factors. A group
      is ranked by its best score with "softmax", and by the sum of its two best scores with
      "sigmoid".
    normalised: whether the factors of the chosen experts are divided by the sum of these factors.
    factor: factor of the sum of expert outputs.
    """

    experts: int
    experts_per_token: int
    groups: int
    groups_per_token: int
    scores: Literal["softmax", "sigmoid"]
    normalised: bool
    factor: float


@dataclass(frozen=True, kw_only=True)
class Config(language_model.Config):
    """Configuration of DeepSeek; other fields are in `models.families.language_model`.

    dense: number of layers without experts, which are the first layers. The inner size of their
      feed-forward parts is `hidden`.
    query_rank: rank of the query projection; 0 for full rank.
    rank: size of the latent.
    nope_dim: size of the part of a query head that is not rotated.
    rope_dim: size of the rotated part of a query head and of a key.
    value_dim: size of the value of a head.
    expert_hidden: inner size of an expert.
    shared_hidden: inner size of the feed-forward part that every token uses, in layers with
      experts.
    """

    layers: int
    dense: int
    width: int
    hidden: int
    heads: int
    query_rank: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope
    scale: float
    routing: Routing
    expert_hidden: int
    shared_hidden: int
    implementation: jaxkv.ops.attention.Implementation | None = None
    return_mass: bool = False


class LatentAttention(nnx.Module):
    """Attention over latents; a mesh splits only the parameters of query heads."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = self.config = config
        self.layer = layer
        by_head = partial(Split, parts=c.heads, of="query heads")
        if c.query_rank:
            self.query_down = Linear(c.width, c.query_rank, dtype, rngs)
            self.query_norm = RMSNorm(c.query_rank, EPS, dtype)
        size = (c.heads, c.nope_dim + c.rope_dim)
        self.query = Linear(c.query_rank or c.width, size, dtype, rngs, split=by_head(axis=0))
        self.down = Linear(c.width, c.rank + c.rope_dim, dtype, rngs)
        self.norm = RMSNorm(c.rank, EPS, dtype)
        heads = partial(matrix, rngs, dtype=dtype, split=by_head(axis=0))
        self.to_keys = heads(shape=(c.heads, c.nope_dim, c.rank))
        self.to_values = heads(shape=(c.heads, c.value_dim, c.rank))
        self.output = Linear(c.heads * c.value_dim, c.width, dtype, rngs, split=by_head(axis=1))

    def select(
        self, step: jaxkv.Step, x: jax.Array, low: jax.Array
    ) -> tuple[jaxkv.Step, jax.Array | None]:
        """Return the step and the cells that each token attends to; None for all.

        A subclass may select cells. The argument `low` has the inputs of the query projection.
        """
        del x, low
        return step, None

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Attend from `x`, `[R, T, width]`, to the cache; return the step and the output."""
        c = self.config
        low = self.query_norm(self.query_down(x)) if c.query_rank else x
        step, select = self.select(step, x, low)
        q, q_rope = jnp.split(self.query(low), [c.nope_dim], axis=-1)
        latent, k_rope = jnp.split(self.down(x)[:, :, None], [c.rank], axis=-1)  # one key head
        rotate = partial(c.rope.rotate, positions=step.positions)
        # Rotated numbers come first, since a rope rotates the first numbers of a key.
        key = jnp.concatenate([rotate(k_rope), self.norm(latent)], axis=-1)
        q = jnp.einsum("rthd,hdc->rthc", q, self.to_keys[...])
        q = jnp.concatenate([rotate(q_rope), q], axis=-1)
        step, out, *mass = jaxkv.attend(
            step,
            self.layer,
            q,
            key,
            scale=c.scale,
            select=select,
            implementation=c.implementation,
            return_mass=c.return_mass,
        )
        store_mass(self, step, mass)
        out = jnp.einsum("rthc,hdc->rthd", out, self.to_values[...])
        return step, self.output(out.reshape(*x.shape[:2], -1))


class Router(nnx.Module):
    """Selector of groups of experts, then of experts in these groups."""

    def __init__(self, config: Config, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.routing = config.routing
        self.weight = matrix(rngs, (self.routing.experts, config.width), dtype)
        if self.routing.scores == "sigmoid":
            self.correction = nnx.Param(jnp.zeros(self.routing.experts, jnp.float32))

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Select k experts for each token `[n, width]`; return factors and ids, `[n, k]` each."""
        r = self.routing
        # Scores are close to each other, so they are computed in float32.
        logits = linear(tokens.astype(jnp.float32), self.weight[...].astype(jnp.float32))
        if r.scores == "softmax":
            ranks = scores = jax.nn.softmax(logits, axis=-1)
        else:
            scores = jax.nn.sigmoid(logits)
            ranks = scores + self.correction[...][None]
        if r.groups > 1:
            in_groups = ranks.reshape(len(tokens), r.groups, -1)
            best, _ = jax.lax.top_k(in_groups, 1 if r.scores == "softmax" else 2)
            _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), r.groups_per_token)
            kept = jnp.any(groups[..., None] == jnp.arange(r.groups)[None, None], axis=1)
            ranks = jnp.where(kept[..., None], in_groups, -jnp.inf).reshape(ranks.shape)
        _, expert_ids = jax.lax.top_k(ranks, r.experts_per_token)
        share = jnp.take_along_axis(scores, expert_ids, axis=-1)
        if r.normalised:
            share = share / (jnp.sum(share, axis=-1, keepdims=True) + 1e-20)
        return share * r.factor, expert_ids


class Block(nnx.Module):
    """One layer: attention over the cache, a feed-forward part and possibly experts."""

    attention_class = LatentAttention

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.attention_norm = RMSNorm(c.width, c.eps, dtype)
        self.attention = self.attention_class(c, layer, dtype, rngs)
        self.feed_norm = RMSNorm(c.width, c.eps, dtype)
        self.sparse = layer >= c.dense
        hidden = c.shared_hidden if self.sparse else c.hidden
        self.feed = Feed(c.width, hidden, jax.nn.silu, dtype, rngs)
        if self.sparse:
            router = Router(c, dtype, rngs)
            count = c.routing.experts
            self.experts = Experts(c.width, c.expert_hidden, count, router, dtype, rngs)

    def __call__(self, step: jaxkv.Step, x: jax.Array) -> tuple[jaxkv.Step, jax.Array]:
        """Apply the layer to `x`, `[R, T, width]`; return the next step and the new `x`."""
        step, out = self.attention(step, self.attention_norm(x))
        x = x + out
        y = self.feed_norm(x)
        out = self.feed(y)
        if self.sparse:
            out = out + self.experts(y)
        return step, x + out


class DeepSeek(LanguageModel):
    """Flax module of DeepSeek V2 and V3."""

    block = Block


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    nope_dim, rope_dim = c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    equal = {"head_dim": "qk_rope_head_dim", "num_key_value_heads": "num_attention_heads"}
    for key, other in equal.items():
        if c[key] != c[other]:
            raise c.refusal(key, f"{c[other]}, as {other},")
    c.ignore("num_mtp_layers")  # their tensors follow those of the other layers
    rope = rope_of(checkpoint, head_dim=rope_dim)
    interleaved = c["rope_interleave"] if checkpoint.architecture == "deepseek_v3" else True
    return Config(
        layers=c["num_hidden_layers"],
        dense=min(c["first_k_dense_replace"], c["num_hidden_layers"]),
        width=c["hidden_size"],
        hidden=c["intermediate_size"],
        heads=c["num_attention_heads"],
        query_rank=c.get("q_lora_rank") or 0,
        rank=c["kv_lora_rank"],
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=c["v_head_dim"],
        vocabulary=c["vocab_size"],
        eps=c["rms_norm_eps"],
        rope=replace(rope, interleaved=interleaved),
        scale=(nope_dim + rope_dim) ** -0.5 * yarn_sharpness(checkpoint) ** 2,
        routing=routing_of(checkpoint),
        expert_hidden=c["moe_intermediate_size"],
        shared_hidden=c["moe_intermediate_size"] * c["n_shared_experts"],
        tied=c["tie_word_embeddings"],
    )


def routing_of(checkpoint: Checkpoint) -> Routing:
    """Read the selection of experts from a checkpoint.

    Raises `ModelError` if the numbers of experts and groups contradict each other.
    """
    c, newer = checkpoint.config, checkpoint.architecture != "deepseek_v2"
    experts = c["n_routed_experts"]
    groups, kept = c.get("n_group", 1), c.get("topk_group", 1)
    if not newer and c["topk_method"] == "greedy":  # without groups
        groups = kept = 1
    elif not newer and c["topk_method"] != "group_limited_greedy":
        raise c.refusal("topk_method", "greedy or group_limited_greedy")
    least = 2 if newer else 1  # number of experts that rank a group
    if experts % groups or experts // groups < least:
        raise c.refusal("n_group", f"a divisor of {experts} experts with {least} or more for each")
    if kept > groups:
        raise c.refusal("topk_group", f"1 to {groups} groups")
    if not 1 <= c["num_experts_per_tok"] <= kept * (experts // groups):
        raise c.refusal("num_experts_per_tok", f"1 to {kept * (experts // groups)} experts")
    return Routing(
        experts=experts,
        experts_per_token=c["num_experts_per_tok"],
        groups=groups,
        groups_per_token=kept,
        scores="sigmoid" if newer else "softmax",
        normalised=newer and c["norm_topk_prob"],
        factor=c["routed_scaling_factor"],
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `DeepSeek`."""
    source, c = Sources(checkpoint), config

    def attention(name: str) -> dict:
        def half(first: int | None, last: int | None) -> Tensor:
            def arrange(x: Any) -> Any:
                return x.reshape(c.heads, -1, x.shape[-1])[:, first:last]

            return source.tensor(f"{name}.kv_b_proj.weight", arrange=arrange)

        tree = {
            "query": source.linear(f"{name}.{'q_b' if c.query_rank else 'q'}_proj", parts=c.heads),
            "down": source.linear(f"{name}.kv_a_proj_with_mqa"),
            "norm": source.norm(f"{name}.kv_a_layernorm"),
            "to_keys": half(None, c.nope_dim),
            "to_values": half(c.nope_dim, None),
            "output": source.linear(f"{name}.o_proj"),
        }
        if c.query_rank:
            tree["query_down"] = source.linear(f"{name}.q_a_proj")
            tree["query_norm"] = source.norm(f"{name}.q_a_layernorm")
        return tree

    def experts(name: str) -> dict:
        tree = source.experts(name, count=c.routing.experts)
        if c.routing.scores == "sigmoid":
            tree["router"]["correction"] = source.tensor(f"{name}.gate.e_score_correction_bias")
        return tree

    def block(i: int, layer: str) -> dict:
        sparse = i >= c.dense
        tree = {
            "attention_norm": source.norm(f"{layer}.input_layernorm"),
            "attention": attention(f"{layer}.self_attn"),
            "feed_norm": source.norm(f"{layer}.post_attention_layernorm"),
            "feed": source.gated_feed(f"{layer}.mlp.shared_experts" if sparse else f"{layer}.mlp"),
        }
        return tree | {"experts": experts(f"{layer}.mlp")} if sparse else tree

    return source.language_model(block, c)


def layers_of(config: Config, dtype: Any) -> list[Attends]:
    """Return a description of each layer of the cache; the argument `dtype` is unused."""
    del dtype
    size = config.rope_dim + config.rank
    values = slice(config.rope_dim, size)
    return [Attends(kv_heads=1, head_dim=size, value_dim=values, rope=config.rope)] * config.layers


MODULE = DeepSeek
