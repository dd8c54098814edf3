"""Gemma 3n: several vectors per token, inputs of each layer, and layers that share keys."""

from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import jax
import jax.numpy as jnp
from flax import nnx

from jaxkv import Step
from models.checkpoints.checkpoint import Checkpoint
from models.families import gemma3, per_layer, shared_keys
from models.families.altup import AltUp, Expansion, altup_weights, expansion_weights
from models.families.caches import windows_of
from models.families.language_model import attention_fields
from models.families.layers import Linear, RMSNorm, gelu
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("gemma3n_text",)


@dataclass(frozen=True, kw_only=True)
class Config(shared_keys.Config):
    """Configuration of Gemma 3n; other fields are in `models.families.shared_keys`.

    hidden: inner size of the feed-forward part of each layer.
    sparsity: expected share of gates of each layer that are replaced by 0; 0 for none.
    vectors: number of vectors of a token, A.
    active: index of the vector that layers read and write.
    scaled: whether that vector is multiplied by factors before the input of the layer is added.
    rank: inner size of the map beside attention (LAuReL).
    """

    hidden: tuple[int, ...]
    sparsity: tuple[float, ...]
    vectors: int
    active: int
    scaled: bool
    rank: int


class Block(shared_keys.Block):
    """One layer: attention beside a map of low rank, a feed-forward part, the layer's input."""

    def __init__(self, config: Config, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        c, activation = config, partial(sparse_gelu, sparsity=config.sparsity[layer])
        super().__init__(c, layer, c.hidden[layer], activation, dtype, rngs)
        self.altup = AltUp(c.vectors, c.active, c.width, c.eps, dtype, rngs)
        self.left = Linear(c.width, c.rank, dtype, rngs)
        self.right = Linear(c.rank, c.width, dtype, rngs)
        self.beside_norm = RMSNorm(c.width, c.eps, dtype)

    def __call__(self, step: Step, x: jax.Array, inputs: jax.Array) -> tuple[Step, jax.Array]:
        """Apply the layer to `x`, `[A, R, T, width]`, with its inputs `[R, T, P]`."""
        predicted = self.altup.predict(x)
        active = predicted[self.altup.active]
        y = self.attention_norm(active)
        step, out = self.attention(step, y)
        beside = y + self.beside_norm(self.right(self.left(y)))
        y = (active + self.after_attention_norm(out) + beside) * 2**-0.5
        y = y + self.after_feed_norm(self.feed(self.feed_norm(y)))
        x = self.altup.correct(predicted, y)
        added = self.gate(self.altup.scaled(x), inputs)
        return step, x.at[1:].add(added[None])


def sparse_gelu(gate: jax.Array, sparsity: float) -> jax.Array:
    """Return the GELU of the largest gates, less a limit; of normal gates, `sparsity` are below it.

    The limit follows from mean and deviation of the last dimension. If `sparsity` is 0 or less,
    return the GELU of all gates.
    """
    if sparsity <= 0:
        return gelu(gate)
    mean = jnp.mean(gate, axis=-1, keepdims=True)
    limit = mean + jnp.std(gate, axis=-1, keepdims=True) * NormalDist().inv_cdf(sparsity)
    return gelu(jax.nn.relu(gate - limit))


class Gemma3n(gemma3.Gemma3):
    """Flax module of Gemma 3n."""

    block = Block
    less_one = False

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        c = config
        self.inputs = per_layer.LayerInputs(c.inputs, c, c.layers, dtype, rngs)
        self.expansion = Expansion(c.vectors, c.width, dtype, rngs)

    def run_blocks(self, step: Step, x: jax.Array) -> tuple[Step, jax.Array]:
        """Apply all layers to `x`, `[R, T, width]`; return the next step and the new `x`."""
        tokens = step.tokens
        if tokens is not None:  # further tokens, as those of images, have the inputs of token 0
            tokens = jnp.where(tokens < self.config.inputs.tokens, tokens, 0)
        inputs = self.inputs(tokens, x)
        x = self.expansion.expand(x)
        for block, of_layer in zip(self.blocks, inputs, strict=True):
            step, x = block(step, x, of_layer)
        return step, self.expansion.merge(x)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c, windows = checkpoint.config, windows_of(checkpoint)
    c.ignore("altup_coef_clip")  # of training
    full, local = (rope_of(checkpoint, f"{kind}_attention") for kind in ("full", "sliding"))
    if not 0 <= c["altup_active_idx"] < c["altup_num_inputs"]:
        raise c.refusal("altup_active_idx", f"less than {c['altup_num_inputs']}")
    if any(not share < 1 for share in c["activation_sparsity_pattern"]):
        raise c.refusal("activation_sparsity_pattern", "numbers below 1")
    if not c["hidden_size_per_layer_input"]:
        raise c.refusal("hidden_size_per_layer_input", "at least 1")
    return Config(
        **attention_fields(checkpoint),
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
        hidden=tuple(c["intermediate_size"]),
        sparsity=tuple(map(float, c["activation_sparsity_pattern"])),
        cache_layers=shared_keys.cache_layers(c, windows),
        inputs=per_layer.input_sizes(c),
        vectors=c["altup_num_inputs"],
        active=c["altup_active_idx"],
        scaled=c["altup_correct_scale"],
        rank=c["laurel_rank"],
        bias=c["attention_bias"],
        final_softcap=c.get("final_logit_softcapping"),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of `Gemma3n`."""
    source, c = Sources(checkpoint), config

    def block(i: int, layer: str) -> dict:
        return shared_keys.block_weights(source, c, i, layer) | {
            "altup": altup_weights(
                source, f"{layer}.altup", count=c.vectors, width=c.width, scaled=c.scaled
            ),
            "left": source.linear(f"{layer}.laurel.linear_left"),
            "right": source.linear(f"{layer}.laurel.linear_right"),
            "beside_norm": source.norm(f"{layer}.laurel.post_laurel_norm"),
        }

    return source.language_model(block, c) | {
        "inputs": per_layer.layer_input_weights(source, c.layers),
        "expansion": expansion_weights(source, c.vectors),
    }


layers_of = shared_keys.layers_of
MODULE = Gemma3n
