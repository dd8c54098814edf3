"""GGUF files that llama.cpp's converter wrote, and the folders of the same models."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA, config_at, parts_of_gguf, write_tensors

NAMES = ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_latent"]
NAMES += ["nemotron_h_dense", "olmo2", "gemma3n", "gemma4", "gemma4_experts", "llama4"]
NAMES += ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v32", "llama_llama3"]
NAMES += ["gemma3", "gpt_oss_mxfp4", "mamba2", "granite_hybrid_experts", "lfm2", "falcon_h1"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 32, "mscale": 0.6, "mscale_all_dim": 0.6}
FIXED = {
    "gemma3": {"layer_types": ["sliding_attention"] * 4, "query_pre_attn_scalar": 16},
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
    if name == "falcon_h1":  # factors of the config are in the weights of the file
        factors, vocabulary = model.config, model.params["vocabulary"]
        vocabulary["embedding"] *= factors.embedding_factor
        vocabulary["head"] *= factors.logits_factor
        config = dataclasses.replace(factors, embedding_factor=1.0, logits_factor=1.0)
        model = dataclasses.replace(model, config=config)
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
        stored = file.checkpoint.stored_name(one).replace("_shexp", "")
        assert tensor.stored[0].replace("_shexp", "").startswith(f"{stored} (")


@pytest.mark.parametrize("name", mark_cases(["qwen3_5", "qwen3_5_moe"], core=["qwen3_5"]))
def test_mtp_head_of_gguf_equals_that_of_folder(name):
    places = DATA / "gguf" / f"{name}.gguf", DATA / name
    assert_equal(*(models.mtp_head(models.load(place)) for place in places))


def fuse_experts(tensors):
    """Join the gate and up matrices of experts, as an option of the converter does."""
    for name in [one for one in tensors if "ffn_gate_exps" in one]:
        halves = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate(halves, axis=1)


def split_experts(tensors):
    """Store the gate and up matrices of experts in two tensors."""
    for name in [one for one in tensors if "ffn_gate_up_exps" in one]:
        gate, up = np.split(tensors.pop(name), 2, axis=1)
        tensors |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}


def flatten_gates(tensors):
    """Store matrices of one row as vectors, as `llama-quantize` does."""
    for name in [one for one in tensors if "ffn_gate_inp_shexp" in one]:
        tensors[name] = tensors[name][0]


def keep_qkvz(tensors):
    """Store the matrices of delta rules as older converters do."""
    folder = models.load(DATA / "qwen3_next").checkpoint
    for layer in (0, 2):
        del tensors[f"blk.{layer}.attn_qkv.weight"], tensors[f"blk.{layer}.attn_gate.weight"]
        plain = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        tensors[f"blk.{layer}.ssm_in.weight"] = folder.tensors[plain].read()


def join_kv_b(tensors):
    """Store the matrices for keys and values in one tensor, as older converters do."""
    for i in range(3):
        keys, values = (tensors.pop(f"blk.{i}.attn_{letter}_b.weight") for letter in "kv")
        both = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        tensors[f"blk.{i}.attn_kv_b.weight"] = both.reshape(-1, both.shape[2])


def add_head(tensors):
    """Add some tensors of a layer that predicts further tokens."""
    last = max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    for name in ("nextn.eh_proj", "attn_q", "post_attention_norm", "ffn_up_exps"):
        tensors[f"blk.{last + 1}.{name}.weight"] = np.ones(4, np.float32)


def add_images(tensors):
    """Add some tensors for images and audio."""
    for name in ("v.blk.0.attn_q", "a.blk.0.attn_q", "mm.input_projection"):
        tensors[f"{name}.weight"] = np.ones((2, 2), np.float32)


IMAGES = {"vision.block_count": 27, "audio.block_count": 2, "mm.tokens_per_image": 256}
LONGER = {"block_count": 7, "nextn_predict_layers": 1}
LONGER |= {
    "feed_forward_length": [0, 12] * 3 + [12],
    "attention.head_count_kv": [0, 0, 2] * 2 + [2],
}
OLDER = dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"))
OLDER |= {"attention.key_length": 10, "attention.value_length": 5, "attention.head_count_kv": 4}
FORMS = [
    ("qwen3_moe", None, {"expert_shared_feed_forward_length": 0}),
    ("qwen3_moe", fuse_experts, {}),
    ("qwen3_next", fuse_experts, {}),
    ("gemma3", add_images, IMAGES),
    ("qwen3_next", keep_qkvz, {}),
    ("qwen3_next", flatten_gates, {}),
    ("qwen3_5_moe", flatten_gates, {}),
    ("nemotron_h", add_head, LONGER),
    ("gemma4_experts", split_experts, {}),
    ("deepseek_v3", fuse_experts, {}),
    ("deepseek_v3", join_kv_b, OLDER),
    ("deepseek_v32", add_head, {"block_count": 4, "nextn_predict_layers": 1}),
    ("qwen3_5", None, {"attention.recurrent_layers": None, "full_attention_interval": 2}),
]


def load_changed(folder, name, fields=None, change=None):
    """Load a recorded file with other metadata, of which None is left out, and changed tensors."""
    arch, metadata, tensors = parts_of_gguf(DATA / "gguf" / f"{name}.gguf")
    metadata = metadata | {f"{arch}.{key}": value for key, value in (fields or {}).items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    if change:
        found = {one: values for one, values, _ in tensors}
        change(found)
        tensors = [(one, np.ascontiguousarray(x), None) for one, x in found.items()]
    return models.load(write_tensors(folder / "tiny.gguf", arch, metadata, tensors))


@pytest.mark.parametrize(("name", "change", "fields"), FORMS)
def test_load_of_another_form_of_file_gives_the_same_model(tmp_path, name, change, fields):
    wanted = models.load(DATA / "gguf" / f"{name}.gguf")
    assert_equal(load_changed(tmp_path, name, fields, change), wanted)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3_5", {"rope.dimension_sections": [2, 1, 1]}, "4 numbers with 0 as the last"),
        ("qwen3_5", {"rope.dimension_sections": [2, 1, 1, 1]}, "4 numbers with 0 as the last"),
        ("llama_llama3", {"rope.dimension_count": 0}, "dimension_count 8, got 0"),
        ("llama_llama3", {"rope.dimension_count": 4}, "dimension_count 8, got 4"),
        ("gemma3", {"attention.sliding_window_pattern": ["false"] * 4}, "true or false"),
        ("granite_hybrid_experts", {"rope.scaling.finetuned": "false"}, "true or false"),
        ("qwen3_5", {"ssm.time_step_rank": 3}, "a multiple of linear_num_key_heads"),
        ("qwen3_next", {"attention.recurrent_layers": [1, 0]}, "one for each of 3 layers"),
        ("qwen3_moe", {"nextn_predict_layers": 1}, "nextn_predict_layers 0, got 1"),
        ("nemotron_h", {"expert_feed_forward_length": [12] * 6}, "a whole number"),
        ("olmo2", {"attention.sliding_window": 8}, "attention.sliding_window left out"),
        ("llama4", {"attention.sliding_window": 0}, "attention.sliding_window left out"),
        ("gemma3n", {"activation_sparsity_scale": [math.nan] * 5}, "standard deviations"),
        ("gemma3n", {"activation_sparsity_scale": [0.5]}, "5 numbers"),
        ("gemma3n", {"feed_forward_length": [20, 20]}, "each of 5 layers"),
        ("gemma4", {"feed_forward_length": [24, 48, 24, 48, 48]}, "doubled in layers that share"),
        ("gemma4", {"feed_forward_length": [24, 24]}, "each of 5 layers"),
        ("gemma4", {"attention.head_count_kv": [2, 2]}, "each of 5 layers"),
        ("gemma4", {"attention.value_length_swa": 4}, "8, the size of a key"),
        ("gemma4", {"attention.sliding_window_pattern": [1, 0]}, "one for each of 5 layers"),
        ("deepseek_v2", {"expert_weights_norm": True}, "false with a softmax"),
        ("deepseek_v3", {"expert_gating_func": 4}, "1 or 2, got 4"),
        ("deepseek_v3", {"rope.scaling.yarn_log_multiplier": 0.0}, "a number above 0"),
        ("deepseek_v3", {"rope.dimension_count": 12}, "for qk_nope_head_dim, got -2"),
        ("deepseek_v32", {"expert_gating_func": 1, "expert_weights_norm": False}, "func 2, got 1"),
    ],
)
def test_unsupported_metadata_raises(tmp_path, name, fields, message):
    with pytest.raises(models.ModelError, match=message):
        load_changed(tmp_path, name, fields)


def test_tensor_with_two_names_is_unused(tmp_path):
    names = "blk.0.ffn_down.weight", "blk.00.attn_norm.weight"
    more = dict.fromkeys(names, np.ones((2, 2), np.float32))
    unused = r"2 unused \(blk\.0\.ffn_down\.weight .*, blk\.00\."
    with pytest.raises(models.ModelError, match=unused):
        load_changed(
            tmp_path, "granite_hybrid_experts", change=lambda tensors: tensors.update(more)
        )


@pytest.mark.parametrize("rotates", [True, None])
def test_granite_rotates_unless_the_file_says_otherwise(tmp_path, rotates):
    file = load_changed(tmp_path, "granite_hybrid_experts", {"rope.scaling.finetuned": rotates})
    changes = {"position_embedding_type": "rope"}
    folder = models.load_shapes(config_at(tmp_path, "granite_hybrid_experts", **changes))
    assert file.config.rope == folder.config.rope is not None


@pytest.mark.parametrize(
    ("fields", "slides"),
    [
        ({"attention.sliding_window": None}, [0, 0, 0, 0]),
        ({"attention.sliding_window": 0}, [0, 0, 0, 0]),
        ({"attention.sliding_window_pattern": [True, False, False, True]}, [1, 0, 0, 1]),
    ],
)
def test_gemma3_has_windows_in_the_layers_that_the_file_names(tmp_path, fields, slides):
    file = load_changed(tmp_path, "gemma3", fields)
    types = [("full_attention", "sliding_attention")[one] for one in slides]
    changes = FIXED["gemma3"] | {"layer_types": types}
    folder = models.load_shapes(config_at(tmp_path, "gemma3", **changes))
    assert_close(*(dataclasses.asdict(model.config) for model in (file, folder)))


@pytest.mark.parametrize("divisors", [[1, 1, 1e30], [1, 2, *[1e30] * 6], [1e30, *[1] * 7]])
def test_gemma4_with_other_divisors_raises(tmp_path, divisors):
    rope = {"rope_freqs.weight": np.array(divisors, np.float32)}
    with pytest.raises(models.ModelError, match=r"1 and then 1e30, for rope_freqs\.weight"):
        load_changed(tmp_path, "gemma4", change=lambda x: x.update(rope))
