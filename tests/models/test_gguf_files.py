"""GGUF files that llama.cpp's converter wrote, and the folders of the same models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models.tiny_files import DATA, config_at

NAMES = ["olmo2", "gemma3n", "gemma4", "gemma4_experts", "llama4", "deepseek_v2"]
NAMES += ["deepseek_v2_groups", "deepseek_v3", "deepseek_v32"]
FIXED = {
    "llama4": {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "deepseek_v2_groups": {
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "mscale": 0.6,
            "mscale_all_dim": 0.6,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
            "rope_type": "yarn",
        }
    },
}
"""Settings that llama.cpp fixes, with its values."""


def load_folder(path, name):
    """Load the model of a folder, with the settings that llama.cpp fixes."""
    if fixed := FIXED.get(name):
        (path / "model.safetensors").symlink_to(DATA / name / "model.safetensors")
        return models.load(config_at(path, name, **fixed))
    model = models.load(DATA / name)
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


@pytest.mark.parametrize("name", NAMES)
def test_load_recorded_gguf_equals_folder(name, tmp_path):
    folder, file = load_folder(tmp_path, name), models.load(DATA / "gguf" / f"{name}.gguf")
    assert file.family is folder.family
    assert_close(*(dataclasses.asdict(model.config) for model in (file, folder)))
    assert_close(file.params, folder.params)
    for one, tensor in file.checkpoint.tensors.items():
        assert tensor.stored[0].startswith(f"{file.checkpoint.stored_name(one)} (")
