"""Every variant of the Llama family against logits that Hugging Face transformers computed."""

from pathlib import Path

import numpy as np
import pytest

import jaxkv
import models

DATA = Path(__file__).parent / "data"
VARIANTS = sorted(folder.parent.name for folder in DATA.glob("*/logits.npz"))


def test_all_variants_are_there():
    assert len(VARIANTS) == 7


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name):
    model = models.load(DATA / name)
    record = np.load(DATA / name / "logits.npz")
    memory = model.make_memory(cells=128, sequences=2)
    outputs = np.arange(len(record["tokens"])) % 9 == 0
    batch = jaxkv.make_batch(record["tokens"], sequences=1, outputs=outputs)
    memory, logits = jaxkv.prefill(model.step, model.weights, memory, batch, ubatch_size=64)
    np.testing.assert_allclose(logits, record["logits"], atol=2e-4)


def test_an_unknown_family_is_a_sentence(tmp_path):
    config = (DATA / "qwen2" / "config.json").read_text().replace("qwen2", "gpt_neox")
    for name in ("model.safetensors",):
        (tmp_path / name).write_bytes((DATA / "qwen2" / name).read_bytes())
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(models.ModelError, match="gpt_neox.*known are"):
        models.load(tmp_path)


def test_a_config_of_another_model_is_a_sentence(tmp_path):
    config = (
        (DATA / "qwen2" / "config.json")
        .read_text()
        .replace('"intermediate_size": 48', '"intermediate_size": 40')
    )
    (tmp_path / "model.safetensors").write_bytes(
        (DATA / "qwen2" / "model.safetensors").read_bytes()
    )
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(models.ModelError, match="blocks.0.down"):
        models.load(tmp_path)
