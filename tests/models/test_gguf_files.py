"""GGUF files that llama.cpp's converter wrote, and the folders of the same models."""

import dataclasses
import math

import jax
import numpy as np
import pytest

import models
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA

NAMES = ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"]
NAMES += ["nemotron_h", "nemotron_h_latent", "nemotron_h_dense"]
FIXED = {"qwen3_moe": {"normalised": True}}
FIXED |= {name: {"limits": (0.0, math.inf)} for name in NAMES if name.startswith("nemotron")}
FIXED["nemotron_h_dense"] |= {"expert_hidden": 1, "shared_hidden": 1}
"""Fields of a config that llama.cpp fixes, or that have no effect."""


def fields_of(config, fixed):
    """Fields of a config, with epsilons rounded as in the file, and other values of some fields."""
    fields = {}
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, dict):
            value = {key: fixed.get(key, one) for key, one in value.items()}
            value |= {"eps": np.float32(value["eps"])} if "eps" in value else {}
        fields[name] = np.float32(value) if name == "eps" else fixed.get(name, value)
    return fields


def assert_equal(file, folder, fixed):
    assert file.family is folder.family
    assert fields_of(file.config, {}) == fields_of(folder.config, fixed)
    # Decay rates, and norm weights that are 1 larger in the file, are rounded.
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-7)  # noqa: E731
    jax.tree.map(close, file.params, folder.params)


@pytest.mark.parametrize("name", mark_cases(NAMES, fast=["qwen3_5_moe"], core=["qwen3_next"]))
def test_load_recorded_gguf_equals_folder(name):
    folder, file = models.load(DATA / name), models.load(DATA / "gguf" / f"{name}.gguf")
    assert_equal(file, folder, FIXED.get(name, {}))


@pytest.mark.parametrize("name", mark_cases(["qwen3_5", "qwen3_5_moe"], core=["qwen3_5"]))
def test_mtp_head_of_gguf_equals_that_of_folder(name):
    places = DATA / name, DATA / "gguf" / f"{name}.gguf"
    folder, file = (models.mtp_head(models.load(place)) for place in places)
    assert_equal(file, folder, {})
