"""Configs: models that raise, and cache sizes of the others."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import models
from jaxkv.core.array_utils import nbytes
from models.costs import abstract_mesh, costs_of
from models.meshes import RULES, make_mesh
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA, config_at

pytestmark = pytest.mark.core

REFUSED = json.loads((DATA / "configs_refused.json").read_text())
PUBLISHED = json.loads((DATA / "published_configs.json").read_text())
"""Configs of published models: name, config, and millions of parameters or the error."""

FAMILIES = sorted(path.parent.name for path in DATA.glob("*/config.json"))
SPECS = ["llama_tied", "mistral_window", "gemma3", "gemma3n", "gemma4", "llama4", "deepseek_v3"]
SPECS += ["deepseek_v32", "t5_tied", "mamba2", "granite_hybrid", "falcon_h1", "recurrent_gemma"]
SPECS += ["qwen3_5", "lfm2", "nemotron_h"]
"""A model of each kind of spec: the others have the same parts in other sizes and orders."""
WINDOWED = [("mistral_window", 2, 1), ("qwen2_window", 1, 2), ("gemma3", 3, 2)]


def config_of(folder, name, **changes):
    return models.load_shapes(config_at(folder, name, **changes)).config


def test_config_unsupported_field_raises(tmp_path):
    for name, changes, message in REFUSED:
        with pytest.raises(models.ModelError, match=message):
            config_of(tmp_path, name, **changes)


@pytest.mark.parametrize(
    ("name", "millions", "config"), PUBLISHED["read"], ids=lambda x: x if type(x) is str else ""
)
def test_load_shapes_of_published_config_has_its_number_of_parameters(
    tmp_path, name, millions, config
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.load_shapes(tmp_path).size / 1e6 == pytest.approx(millions, rel=2e-3), name


def test_load_shapes_of_published_config_of_another_family_raises(tmp_path):
    for _, message, config in PUBLISHED["refused"]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(models.ModelError, match=message):
            models.load_shapes(tmp_path)


def test_load_weights_of_another_size_raises(tmp_path):
    data = (DATA / "qwen2" / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data)
    down = r"model\.layers\.0\.mlp\.down_proj\.weight \(32, 48\) for weights of shape \(32, 40\)"
    with pytest.raises(models.ModelError, match=rf"4 of another shape \(first: {down}\)"):
        models.load(config_at(tmp_path, "qwen2", intermediate_size=40))


LFM2 = {"block_ff_dim": 30, "intermediate_size": 7, "tie_embedding": True}  # these come first
LFM2 |= {"tie_word_embeddings": False, "full_attn_idxs": [1], "layer_types": None}
LINEAR = {"type": "linear", "factor": 2.0}
OLDER = [
    ("falcon_h1", {"mamba_norm_before_gate": True, "mamba_rms_norm": None}),
    ("lfm2", LFM2),
    ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME*-ME"}),
    ("qwen3_moe", {"num_experts": 6, "num_local_experts": None}),
    ("qwen3_next", {"full_attention_interval": 2, "layer_types": None}),
    ("qwen3_5", {"full_attention_interval": 2, "layer_types": None}),
    ("llama_linear", {"rope_scaling": LINEAR, "rope_theta": 10000}),
    ("t5_gated", {"scale_decoder_outputs": None, "tie_word_embeddings": False}),
    ("t5_tied", {"scale_decoder_outputs": None, "tie_word_embeddings": None}),
]


def test_config_older_keys_mean_the_same(tmp_path):
    for name, older in OLDER:
        assert config_of(tmp_path, name, **older) == config_of(tmp_path, name), name
    assert config_of(tmp_path, "lfm2").hidden == 24  # 0.9 of two thirds of 30, in eights
    assert config_of(tmp_path, "lfm2", block_auto_adjust_ff_dim=False).hidden == 30
    assert config_of(tmp_path, "t5_gated", num_decoder_layers=None).layers == 3  # as the encoder


@pytest.mark.parametrize("name", ["t5_gated", "t5_tied", "granite_hybrid", "gemma3"])
def test_load_shapes_equals_load(name):
    shapes, loaded = models.load_shapes(DATA / name), models.load(DATA / name)
    assert shapes.config == loaded.config
    sizes = [jax.tree.map(jnp.shape, model.params) for model in (shapes, loaded)]
    assert sizes[0] == sizes[1]


def bytes_of(name, **options):
    model = models.load_shapes(DATA / name)
    cache = model.cache_shapes(**options)
    return nbytes(cache.buffers), len(cache.parts)


def are_identical(one, other):
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        (x.shape, x.dtype, x.sharding) == (y.shape, y.dtype, y.sharding)
        for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.parametrize("name", mark_cases(FAMILIES, core=SPECS))
def test_make_cache_of_spec_is_what_model_makes(name):
    model = models.load_shapes(DATA / name)
    for sizes in (dict(cells=512), dict(cells=16, sequences=4, streams=2, max_rollback=2)):
        cache = model.make_cache(**sizes)
        assert are_identical(jaxkv.make_cache(model.cache_spec, **sizes), cache)
        assert cache.spec == model.cache_spec
    half, sizes = models.load_shapes(DATA / name, dtype=jnp.bfloat16), dict(cells=16, sequences=2)
    cache = jaxkv.make_cache(half.cache_spec, dtype=half.dtype, **sizes)
    assert are_identical(cache, half.make_cache(**sizes))
    mesh = make_mesh({"data": 2, "tensor": 2})
    model = models.on_mesh(model, mesh, RULES)
    sizes = dict(cells=16, sequences=4, streams=2)
    cache = jaxkv.make_cache(model.cache_spec, **sizes, mesh=mesh, sharding_rules=RULES)
    assert are_identical(cache, model.make_cache(**sizes))
    assert cache.spec == model.cache_spec


@pytest.mark.parametrize(("name", "windows", "parts"), WINDOWED)
def test_make_cache_windows_hold_no_more_than_needed(name, windows, parts):
    config = models.load_shapes(DATA / name).config
    whole, cell = len(config.windows) - windows, 2 * 4 * config.kv_heads * config.head_dim
    for streams in (1, 2):
        options = dict(cells=1024, sequences=2, streams=streams, ubatch_size=16, max_rollback=4)
        for full_windows, cells in [(False, 2 * (12 + 16 + 4)), (True, 1024 * streams)]:
            found = bytes_of(name, full_windows=full_windows, **options)
            assert found == (cell * (whole * 1024 * streams + windows * cells), parts)


def test_make_cache_of_states_needs_no_cells():
    one, four = (bytes_of("mamba2", sequences=2, max_rollback=kept)[0] for kept in (0, 3))
    assert four == 4 * one
    assert bytes_of("recurrent_gemma", sequences=2)
    with pytest.raises(ValueError, match="pass cells="):
        bytes_of("granite_hybrid", sequences=2)


def test_make_cache_of_sources_has_cells_of_their_own():
    sizes = models.load_shapes(DATA / "t5_tied").cache_shapes(cells=8, source_cells=16)
    keys = [part.buffers.k[0].shape for part in sizes.parts]
    assert keys == [(1, 3, 8, 8), (1, 3, 16, 8)]


def test_costs_of_deepseek_are_one_latent_a_token():
    model = models.load_shapes(DATA / "deepseek_v3", dtype=jnp.bfloat16)
    model = models.on_mesh(model, abstract_mesh({"tensor": 2}), RULES)
    (part,) = costs_of(model, cells=64, sequences=1, streams=1).parts
    config = model.checkpoint.config
    numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert part.each == 2 * config["num_hidden_layers"] * numbers
    assert part.on_device == 64 * part.each  # one head is whole on each
