"""A tiny random llama as a Hugging Face folder and as a GGUF file; recorded models."""

import functools
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parent.parent / "data"
HEADS, KV_HEADS, SIZE, HIDDEN, INNER, VOCAB, LAYERS = 4, 2, 8, 32, 64, 40, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": VOCAB,
    "eos_token_id": 7,
}
OF_LAYER = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
    "self_attn.q_proj.bias": (HEADS * SIZE,),
    "self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.k_proj.bias": (KV_HEADS * SIZE,),
    "self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
SHAPES = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
SHAPES |= {"lm_head.weight": (VOCAB, HIDDEN)}
SHAPES |= {f"model.layers.{i}.{name}": OF_LAYER[name] for i in range(LAYERS) for name in OF_LAYER}


def tiny_tensors(dtype=np.float32):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def config_at(folder, name, **changes):
    """A folder with the changed config of a recorded model and no weights; None removes a key."""
    config = json.loads((DATA / name / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def write_folder(folder, tensors, config=CONFIG, **files):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


def interleave(array, heads):
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


FIELDS = {
    "context_length": 128,
    "block_count": LAYERS,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": CONFIG["rms_norm_eps"],
    "rope.freq_base": CONFIG["rope_theta"],
}
"""Metadata of a file, after the architecture's name."""


def write_gguf(path, tensors, arch="llama", kind=None, fields=None, base=FIELDS):
    """Write as llama.cpp's converter does: for llama, the halves of q and k interleaved."""
    metadata = {f"{arch}.{key}": value for key, value in base.items()}
    metadata |= {"tokenizer.ggml.eos_token_id": 7} if fields is None else fields
    names, packed = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS), []
    for name, array in tensors.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = HEADS if ".q_proj." in name else KV_HEADS
            array = np.ascontiguousarray(interleave(array, heads))
        raw = kind if array.ndim == 2 else None
        if array.dtype == ml_dtypes.bfloat16:
            raw = raw or gguf.GGMLQuantizationType.BF16
        if raw is not None:
            array = gguf.quants.quantize(array.astype(np.float32), raw)
        packed.append((names.get_name(name, (".weight", ".bias")) or name, array, raw))
    return write_tensors(path, arch, metadata, packed)


def write_tensors(path, arch, metadata, tensors):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        large = type(value) is int and abs(value) >= 2**31
        try:
            type_ = gguf.GGUFValueType.UINT64 if large else gguf.GGUFValueType.get_type(value)
            writer._pack_val(value, type_, add_vtype=True)
        except Exception:  # the format has no nulls, dicts or numbers of that size
            value, type_ = repr(value), gguf.GGUFValueType.STRING
        writer.add_key_value(key, value, type_)
    for name, array, raw in tensors:
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def parts_of_gguf(path):
    """The architecture of a recorded file, its metadata and tensors, for `write_tensors`."""
    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    arch = fields["general.architecture"]
    metadata = {key: value for key, value in fields.items() if key.startswith(f"{arch}.")}
    tensors = [(one.name, np.array(one.data), one.tensor_type) for one in reader.tensors]
    return arch, metadata, tensors
