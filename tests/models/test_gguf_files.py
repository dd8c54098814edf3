"""GGUF files that llama.cpp's converter wrote, and the folders of the same models."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA

NAMES = ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_latent"]
NAMES += ["nemotron_h_dense", "olmo2", "gemma3n", "gemma4", "gemma4_experts", "llama4"]
NAMES += ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v32"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 32, "mscale": 0.6, "mscale_all_dim": 0.6}
FIXED = {
    "qwen3_moe": {"norm_topk_prob": True},
    "nemotron_h": {"time_step_min": 0.0},
    "nemotron_h_latent": {"time_step_min": 0.0},
    "nemotron_h_dense": {
        "time_step_min": 0.0,
        "moe_intermediate_size": 1,
        "moe_shared_expert_intermediate_size": 1,
    },
    "llama4": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "deepseek_v2_groups": {"rope_parameters": YARN},
}
"""Settings that llama.cpp fixes, or that have no effect."""


def load_folder(path, name):
    """Load the model of a folder, with other values of some settings."""
    config = json.loads((DATA / name / "config.json").read_text()) | FIXED.get(name, {})
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").symlink_to(DATA / name / "model.safetensors")
    model = models.load(path)
    if name == "gemma3n":  # tokens without inputs have inputs of 0 in the file
        config, rows = model.config, model.params["inputs"]["embedding"]
        inputs = dataclasses.replace(config.inputs, tokens=config.vocabulary)
        model = dataclasses.replace(model, config=dataclasses.replace(config, inputs=inputs))
        rows = jnp.pad(rows, ((0, config.vocabulary - len(rows)), (0, 0)))
        model.params["inputs"]["embedding"] = rows
    return model


def assert_close(found, wanted):
    """Compare trees of numbers, which are rounded to float32 in files, and of other values."""

    def compare(x, y):
        if isinstance(y, float | jax.Array):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-7)
        else:
            assert x == y

    jax.tree.map(compare, found, wanted)


def assert_equal(file, folder):
    assert file.family is folder.family
    assert_close(*(dataclasses.asdict(model.config) for model in (file, folder)))
    assert_close(file.params, folder.params)


@pytest.mark.parametrize("name", NAMES)
def test_load_recorded_gguf_equals_folder(name, tmp_path):
    file = models.load(DATA / "gguf" / f"{name}.gguf")
    assert_equal(file, load_folder(tmp_path, name))
    for one, tensor in file.checkpoint.tensors.items():
        assert tensor.stored[0].startswith(f"{file.checkpoint.stored_name(one)} (")


@pytest.mark.parametrize("name", mark_cases(["qwen3_5", "qwen3_5_moe"], core=["qwen3_5"]))
def test_mtp_head_of_gguf_equals_that_of_folder(name):
    places = DATA / "gguf" / f"{name}.gguf", DATA / name
    assert_equal(*(models.mtp_head(models.load(place)) for place in places))
