"""Qwen3.5, dense and with experts: gated delta rules, and gated attention in some layers."""

from functools import partial

from models.checkpoints.checkpoint import Checkpoint
from models.families import gated_delta
from models.families.delta_layer import Config
from models.families.gated_delta import block_weights, expert_fields, shared_fields
from models.families.ropes import alternating_axes, rope_of
from models.families.sources import Sources

ARCHITECTURES = ("qwen3_5_text", "qwen3_5_moe_text")


def config_of(checkpoint: Checkpoint) -> Config:
    """Read the configuration of the text part of a model from its checkpoint."""
    c = checkpoint.config
    is_dense, rope = checkpoint.architecture == "qwen3_5_text", rope_of(checkpoint, partly=True)
    return Config(
        **shared_fields(checkpoint),
        **({"hidden": c["intermediate_size"]} if is_dense else expert_fields(checkpoint)),
        rope=rope,
        axes=alternating_axes(checkpoint, rope),
    )


def weights_of(checkpoint: Checkpoint, config: Config) -> dict:
    """Return a `Tensor` of the checkpoint for each parameter of the module."""
    source = Sources(checkpoint)

    def inputs(name: str) -> dict:
        qkv, gates, beta, steps = (f"{name}.in_proj_{part}" for part in ("qkv", "z", "b", "a"))
        return {
            "input": source.linear(qkv, gates, arrange=partial(gated_delta.by_group, config)),
            "steps": source.linear(beta, steps, parts=config.key_heads, axis=1),
        }

    def block(i: int, layer: str) -> dict:
        return block_weights(source, config, layer, attends=config.attends[i], inputs=inputs)

    return source.language_model(block, config)


layers_of = gated_delta.layers_of
MODULE = gated_delta.GatedDelta
