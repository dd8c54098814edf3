"""Qwen3-Next: gated delta rules, gated attention in some layers, and experts."""

from models.checkpoints.checkpoint import Checkpoint
from models.families import gated_delta
from models.families.delta_layer import Config
from models.families.gated_delta import block_weights, expert_fields, shared_fields
from models.families.ropes import rope_of
from models.families.sources import Sources

ARCHITECTURES = ("qwen3_next",)


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of a model from its checkpoint."""
    c = checkpoint.config
    c.ignore("intermediate_size")  # of layers without experts
    return Config(
        **shared_fields(checkpoint),
        **expert_fields(checkpoint),
        normalised=c["norm_topk_prob"],
        rope=rope_of(checkpoint, partly=True),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of the module."""
    source, groups = Sources(checkpoint), config.key_heads

    def inputs(name: str) -> dict:
        return {
            "input": source.linear(f"{name}.in_proj_qkvz", parts=groups),
            "steps": source.linear(f"{name}.in_proj_ba", parts=groups),
        }

    def block(i: int, layer: str) -> dict:
        return block_weights(source, config, layer, attends=config.attends[i], inputs=inputs)

    return source.language_model(block, config)


layers_of = gated_delta.layers_of
MODULE = gated_delta.GatedDelta
