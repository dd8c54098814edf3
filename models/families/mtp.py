"""Heads that predict further tokens (MTP) of Qwen3-Next and Qwen3.5, for `models.mtp`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from models.checkpoints.checkpoint import Checkpoint
from models.families import gated_delta
from models.families.delta_layer import Config
from models.families.gated_delta import GatedDelta, block_weights
from models.families.layers import Linear, RMSNorm
from models.families.sources import Sources


class MtpHead(GatedDelta):
    """Flax module of a head of one attention layer, with the vocabulary of its model.

    For each token, the head gets the token, and in `step.extra["features"]` the features of the
    token before. It returns the logits of the next token, and its features of the current token.
    """

    def __init__(self, config: Config, *, dtype: jnp.dtype = jnp.float32, rngs: nnx.Rngs):
        super().__init__(config, dtype=dtype, rngs=rngs)
        c = config
        self.token_norm, self.feature_norm = (
            RMSNorm(c.width, c.eps, dtype, less_one=True) for _ in range(2)
        )
        self.join = Linear(2 * c.width, c.width, dtype, rngs)

    def embed_step(self, step: jaxkv.Step) -> jax.Array:
        """Return the input of the layer, `[R, T, width]`, from tokens and features."""
        both = self.token_norm(super().embed_step(step)), self.feature_norm(step.extra["features"])
        return self.join(jnp.concatenate(both, axis=-1))


def config_of(config: Config) -> Config:
    """Return the configuration of the head of a model."""
    return replace(config, attends=(True,), return_mass=False, return_features=True)


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter outside of the vocabulary."""
    source = Sources(checkpoint)
    layer = block_weights(source, config, "mtp.layers.0", attends=True, inputs=lambda _: {})
    return {
        "blocks": {0: layer},
        "norm": source.norm("mtp.norm"),
        "token_norm": source.norm("mtp.pre_fc_norm_embedding"),
        "feature_norm": source.norm("mtp.pre_fc_norm_hidden"),
        "join": source.linear("mtp.fc"),
    }


layers_of = gated_delta.layers_of
MODULE = MtpHead
