"""Every variant of the Llama family against logits that Hugging Face transformers computed."""

from pathlib import Path

import numpy as np
import pytest

import jaxkv
import models

DATA = Path(__file__).parent.parent / "data"
VARIANTS = sorted(folder.parent.name for folder in DATA.glob("*/logits.npz"))
# The others have a sibling that does the same and more, or differ in numbers of their rope alone.
FAST = ("llama_tied",)


def test_all_variants_are_there():
    assert len(VARIANTS) == 10


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.nightly) for name in VARIANTS],
)
def test_variant(name):
    model = models.load(DATA / name)
    record = np.load(DATA / name / "logits.npz")
    # A window cache is smaller than the text then, so that its cells are used again and again.
    memory = model.make_memory(cells=128, sequences=2, ubatch_size=20, rollback=4)
    outputs = np.arange(len(record["tokens"])) % 9 == 0
    batch = jaxkv.make_batch(record["tokens"], sequences=1, outputs=outputs)
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, batch, ubatch_size=20)
    np.testing.assert_allclose(logits, record["logits"], atol=2e-4)


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window"])
@pytest.mark.parametrize("streams", [1, 2])
def test_window_caches_hold_no_more_than_they_need(name, streams):
    """All layers of one model have a window, and one layer of the other."""
    model = models.load(DATA / name)
    per_cell = 2 * 4 * model.config.kv_heads * model.config.head_dim
    whole, wide = model.config.windows.count(None), 2 - model.config.windows.count(None)
    options = dict(cells=1024, sequences=2, streams=streams, ubatch_size=16, rollback=4)
    for full_windows, cells in [(False, 2 * (12 + 16 + 4)), (True, 1024 * streams)]:
        memory = model.make_memory(**options, full_windows=full_windows)
        _, buffers = jaxkv.split(memory)
        assert jaxkv.nbytes(buffers) == per_cell * (whole * 1024 * streams + wide * cells)
    assert (len(jaxkv.hybrid.parts_of(memory)) == 1) == (name == "mistral_window")


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
    with pytest.raises(models.ModelError, match="blocks.0.feed.down.weight"):
        models.load(tmp_path)
