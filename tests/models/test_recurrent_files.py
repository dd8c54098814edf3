"""Recurrent and hybrid models in GGUF files, as llama.cpp's converter writes them."""

import dataclasses

import gguf
import jax
import numpy as np
import pytest

import models
from tests.models.tiny_files import DATA, fields_of, interleave, write_tensors

ARCHITECTURES = {
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
}
NAMES = ["mamba2", "granite_hybrid", "granite_hybrid_experts_rope", "lfm2", "falcon_h1"]


def all_fields_of(config):
    kind, fields = config["model_type"], fields_of(config)
    if kind == "mamba2":
        fields |= {"feed_forward_length": 0, "attention.head_count": 0}
        return fields | {"ssm.inner_size": config["num_heads"] * config["head_dim"]}
    groups = config["num_key_value_heads"]
    if kind == "falcon_h1":
        del fields["embedding_scale"]  # its factor is in the weights
        fields |= {"attention.head_count_kv": groups, "attention.key_length": config["head_dim"]}
    else:
        attends = [layer == "full_attention" for layer in config["layer_types"]]
        fields["attention.head_count_kv"] = [groups if one else 0 for one in attends]
    if kind == "granitemoehybrid":
        fields["rope.scaling.finetuned"] = config.get("position_embedding_type") == "rope"
    if kind == "lfm2":
        fields["feed_forward_length"] = models.load_shapes(DATA / "lfm2").config.hidden
    else:
        fields["ssm.inner_size"] = config["mamba_n_heads"] * config["mamba_d_head"]
    return fields


def multiply(name, array, config):
    """A tensor of Falcon-H1 with the multipliers of the config in it."""
    c = config
    shared, heads = c["mamba_n_groups"] * c["mamba_d_state"], c["mamba_n_heads"]
    inner = heads * c["mamba_d_head"]
    rows = np.repeat(np.float32(c["ssm_multipliers"]), [inner, inner, shared, shared, heads])
    factors = {
        "q_proj": c["attention_in_multiplier"],
        "k_proj": c["attention_in_multiplier"] * c["key_multiplier"],
        "v_proj": c["attention_in_multiplier"],
        "o_proj": c["attention_out_multiplier"],
        "in_proj": c["ssm_in_multiplier"] * rows[:, None],
        "out_proj": c["ssm_out_multiplier"],
        "gate_proj": c["mlp_multipliers"][0],
        "down_proj": c["mlp_multipliers"][1],
        "embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
    }
    return array * np.float32(factors.get(name.split(".")[-2], 1))


def convert_tensor(name, array, config):
    kind = config["model_type"]
    if kind == "falcon_h1":
        array = multiply(name, array, config)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    part = name.split(".")[-2]
    if kind == "granitemoehybrid" and part in heads:
        return interleave(array, config[heads[part]])
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        return array[:, 0]
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return array.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    if name.endswith(".A_log"):
        return -np.exp(array)[:, None]
    return array[:, None] if name.endswith(".D") else array


def write_gguf(path, checkpoint, *extra):
    config, arch = checkpoint.config, ARCHITECTURES[checkpoint.architecture]
    called, tensors = gguf.MODEL_ARCH_NAMES[arch], []
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name in checkpoint.tensors:
        array = convert_tensor(name, checkpoint.tensors[name].read(), config)
        parts = {name: array}
        if ".input_linear." in name:  # the halves of a gated product are two tensors
            gate, up = np.split(array, 2, axis=-2)
            down = name.replace("input_linear", "output_linear")
            parts = {(down, "gate"): gate, (down, "up"): up}
        for part, values in parts.items():
            known, half = part if isinstance(part, tuple) else (part, "down")
            known = known.replace("dt_bias", "dt_proj.bias")
            where = names.get_name(known, (".weight", ".bias")).replace("down", half)
            if not config.get("num_local_experts"):
                where = where.replace("_shexp", "")
            tensors.append((where, np.ascontiguousarray(values), None))
    metadata = {f"{called}.{key}": value for key, value in all_fields_of(config).items()}
    return write_tensors(path, called, metadata, [*tensors, *extra])


def test_gguf_tensor_with_two_names_is_refused(tmp_path):
    folder, again = models.load(DATA / "granite_hybrid"), np.ones((2, 2), np.float32)
    extra = ("blk.0.ffn_down_shexp.weight", again, None), ("blk.00.attn_norm.weight", again, None)
    path = write_gguf(tmp_path / "tiny.gguf", folder.checkpoint, *extra)
    with pytest.raises(models.ModelError, match=r"2 unused \(.*shexp.weight.*, blk\.00\."):
        models.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_load_gguf_recurrent_model_equals_folder(tmp_path, name):
    folder = models.load(DATA / name)
    file = models.load(write_gguf(tmp_path / "tiny.gguf", folder.checkpoint))
    assert file.family is folder.family
    for one, tensor in file.checkpoint.tensors.items():
        stored = file.checkpoint.stored_name(one).replace("_shexp", "")
        assert tensor.stored[0].replace("_shexp", "").startswith(f"{stored} (")
    wanted, found = (dataclasses.asdict(model.config) for model in (folder, file))
    for sizes in (wanted, found):  # numbers rounded to float32 in the file
        sizes["eps"] = np.float32(sizes["eps"])
        if "mixer" in sizes:
            sizes["mixer"]["eps"] = np.float32(sizes["mixer"]["eps"])
    params = folder.params
    if name == "falcon_h1":  # the model gets only these two from the folder
        for one, factor in {"embedding": "embedding_factor", "head": "logits_factor"}.items():
            params["vocabulary"][one] *= wanted[factor]
            assert found.pop(factor) == 1 and wanted.pop(factor) != 1
    assert found == wanted
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), file.params, params)
