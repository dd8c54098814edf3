"""LFM2 and Falcon-H1 in files: as llama.cpp's converter writes them, and what is refused."""

import dataclasses
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

import models

DATA = Path(__file__).parent.parent / "data"
ARCHITECTURES = {"lfm2": gguf.MODEL_ARCH.LFM2, "falcon_h1": gguf.MODEL_ARCH.FALCON_H1}


def config_at(folder, name, **changes):
    """A folder with the config of a recorded model, changed, and no weights; None leaves out."""
    config = json.loads((DATA / name / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


# ---- as llama.cpp's converter writes them


def multiplied(name, array, config):
    """A tensor of Falcon-H1 with what the config multiplies by in it."""
    c = config
    shared, heads = c["mamba_n_groups"] * c["mamba_d_state"], c["mamba_n_heads"]
    gate, x, into, out_of, steps = c["ssm_multipliers"]
    inner = heads * c["mamba_d_head"]
    rows = [gate] * inner + [x] * inner + [into] * shared + [out_of] * shared + [steps] * heads
    factors = {
        "q_proj": c["attention_in_multiplier"],
        "k_proj": c["attention_in_multiplier"] * c["key_multiplier"],
        "v_proj": c["attention_in_multiplier"],
        "o_proj": c["attention_out_multiplier"],
        "in_proj": c["ssm_in_multiplier"] * np.array(rows, np.float32)[:, None],
        "out_proj": c["ssm_out_multiplier"],
        "gate_proj": c["mlp_multipliers"][0],
        "down_proj": c["mlp_multipliers"][1],
        "embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
    }
    return array * np.float32(factors.get(name.split(".")[-2], 1))


def stored(name, array, config):
    """A tensor as files hold it."""
    if config["model_type"] == "falcon_h1":
        array = multiplied(name, array, config)
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return array[:, 0]
    if name.endswith(".A_log"):
        return -np.exp(array)[:, None]
    return array[:, None] if name.endswith(".D") else array


def write_gguf(path, checkpoint):
    config, arch = checkpoint.config, ARCHITECTURES[checkpoint.architecture]
    layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    if arch == gguf.MODEL_ARCH.LFM2:
        attends = [kind == "full_attention" for kind in config["layer_types"]]
        writer.add_head_count_kv([kv_heads if one else 0 for one in attends])
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    names = gguf.get_tensor_name_map(arch, layers)
    for name in checkpoint.names():
        array = np.ascontiguousarray(stored(name, checkpoint.tensor(name), config))
        known = names.get_name(name.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
        writer.add_tensor(known, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_holds_the_same_model(tmp_path, name):
    folder = models.load(DATA / name)
    file = models.load(write_gguf(tmp_path / "tiny.gguf", folder.checkpoint))
    assert file.family is folder.family
    wanted, found = (dataclasses.asdict(model.config) for model in (folder, file))
    for sizes in (wanted, found):  # numbers rounded to float32 in the file
        sizes["eps"] = np.float32(sizes["eps"])
        if "mixer" in sizes:
            sizes["mixer"]["eps"] = np.float32(sizes["mixer"]["eps"])
    weights = folder.weights
    if name == "falcon_h1":  # these two are all that the folder leaves to the model
        factors = {"embedding": "embedding_factor", "head": "logits_factor"}
        for one, factor in factors.items():
            weights["vocabulary"][one] *= wanted[factor]
            assert found.pop(factor) == 1 and wanted.pop(factor) != 1
    assert found == wanted
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), file.weights, weights)


# ---- configs


REFUSED = [
    ("lfm2", {"conv_bias": True}, "conv_bias = True where False is wanted"),
    ("lfm2", {"sliding_window": 8}, "sliding_window = 8 where None is wanted"),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1"),
    ("lfm2", {"layer_types": ["conv", "chunked_attention", "conv"]}, "layer_types"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e6}, "intermediate_size = 20000000"),
    ("falcon_h1", {"attention_bias": True}, "attention_bias = True where False is wanted"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act = 'gelu' where 'silu' is wanted"),
    ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias"),
    ("falcon_h1", {"mlp_bias": True}, "mlp_bias"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
    ("falcon_h1", {"mamba_d_ssm": 48}, r"mamba_d_ssm = 48 where .* \(32\)"),
    ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_heads = 4 where a multiple of mamba_n_groups"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers"),
    ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers = .* where a list of 5"),
    ("falcon_h1", {"layer_types": ["full_attention", "conv"]}, "layer_types"),
    ("falcon_h1_norm", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate = True where"),
]


def test_what_is_not_computed_is_refused_by_name(tmp_path):
    for name, changes, message in REFUSED:
        with pytest.raises(models.ModelError, match=message):
            models.load_shapes(config_at(tmp_path, name, **changes))


def test_a_norm_before_the_gate_means_nothing_without_a_norm(tmp_path):
    plain = models.load_shapes(config_at(tmp_path, "falcon_h1")).config
    changes = {"mamba_norm_before_gate": True, "mamba_rms_norm": None}
    assert models.load_shapes(config_at(tmp_path, "falcon_h1", **changes)).config == plain


def test_older_files_of_lfm2_say_the_same(tmp_path):
    """The class of the family takes these keys before the newer ones."""
    wanted = models.load_shapes(config_at(tmp_path, "lfm2")).config
    older = {"block_ff_dim": 30, "intermediate_size": 7, "tie_embedding": True}
    older |= {"tie_word_embeddings": False, "full_attn_idxs": [1], "layer_types": None}
    assert models.load_shapes(config_at(tmp_path, "lfm2", **older)).config == wanted
    assert wanted.hidden == 24  # 0.9 of two thirds of 30, in eights
    plain = {"block_auto_adjust_ff_dim": False}
    assert models.load_shapes(config_at(tmp_path, "lfm2", **plain)).config.hidden == 30
