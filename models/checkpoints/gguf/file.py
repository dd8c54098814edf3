"""Checkpoints that are GGUF files, read so that they look like Hugging Face ones.

Three things differ in such a file and are turned back here: the names; the rows of q and k in
files of architecture "llama", which lie in the order that rotates neighbouring rows (Hugging Face
rotates row i with row i + D/2); and the norm weights of Gemma, to which 1 has been added. What is
different in files of recurrent models is in `models/gguf_recurrent.py`.
"""

import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from models.checkpoints.checkpoint import Checkpoint, ModelError
from models.checkpoints.config import complete
from models.checkpoints.gguf import recurrent as gguf_recurrent
from models.checkpoints.gguf.config import config_from_gguf
from models.checkpoints.gguf.reader import Reader

# Architecture of the file -> model_type of Hugging Face.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "mamba2": "mamba2",
    "granitehybrid": "granitemoehybrid",
}

_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_CHUNK = 1 << 20  # values unpacked at a time, so that no second copy of a tensor arises


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file; the tensors stay in it until they are asked for."""
    reader = _reader(path)

    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    arch = get("general.architecture")
    if arch not in _FAMILIES:
        raise ModelError(
            f"{path} holds a model of architecture {arch!r}; those that can be read are "
            f"{', '.join(_FAMILIES)}."
        )
    if get("split.count", 1) > 1:
        raise ModelError(f"{path} is one part of several; merge the parts with llama-gguf-split.")

    stored = {tensor.name: tensor for tensor in reader.tensors}
    factors = stored.pop("rope_freqs.weight", None)
    named = _named(path, arch, stored)
    config = config_from_gguf(arch, get, None if factors is None else factors.data.tolist())
    config["model_type"] = _FAMILIES[arch]
    for name in ("model.embed_tokens.weight", "backbone.embeddings.weight"):
        if name in named:
            config["vocab_size"] = int(named[name].shape[1])
    config = complete(config, named, str(path))
    tensors = {name: _reading(name, tensor, arch, config) for name, tensor in named.items()}
    if arch in gguf_recurrent.ARCHITECTURES:
        tensors = gguf_recurrent.turned_back(tensors)

    def load_tokenizer():
        from models.text.from_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(get, str(path))

    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = (get(f"tokenizer.ggml.{key}") for key in keys)
    return Checkpoint(
        source=str(path),
        architecture=_FAMILIES[arch],
        config=config,
        tensors=tensors,
        end_tokens=frozenset(int(end) for end in ends if end is not None),
        load_tokenizer=load_tokenizer,
    )


def _reader(path: Path) -> Reader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(
                f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'; give a "
                ".gguf file or a folder with config.json."
            )
        return Reader(path)
    except (OSError, ValueError, LookupError, struct.error) as error:
        raise ModelError(
            f"{path} cannot be read as GGUF ({error}); it may be cut short, so download it again."
        ) from error


def _named(path: Path, arch: str, stored: dict) -> dict[str, Any]:
    named = {_plain(name, arch): tensor for name, tensor in stored.items()}
    if None in named:
        raise ModelError(
            f"{path} holds a tensor {named[None].name!r}, which the {arch} models read here do "
            "not have; its kind (a mixture of experts, perhaps) is not supported."
        )
    return named


def _reading(name: str, tensor: Any, arch: str, config: dict) -> Callable[[], np.ndarray]:
    """The function that reads one tensor and turns back what the file stores differently."""
    part = name.split(".")[-2]
    rows = None
    if arch in ("llama", "granitehybrid") and part in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        rows = _halves(int(tensor.shape[-1]), heads)
    less = 1.0 if arch == "gemma3" and part.endswith("norm") else 0.0
    return partial(_read, tensor.data, Kind(tensor.tensor_type), rows, less)


def _plain(name: str, arch: str) -> str | None:
    """The Hugging Face name of a tensor; None where the architecture has no such tensor."""
    if arch in gguf_recurrent.ARCHITECTURES:
        return gguf_recurrent.plain(name, arch)
    if name == "output.weight":
        return "lm_head.weight"
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, stem, ending = found.groups() if found else (None, "", "")
    if layer is None:
        return f"model.{_WHOLE[stem]}.{ending}" if stem in _WHOLE else None
    table = _GEMMA_LAYER if arch == "gemma3" else _LAYER
    return f"model.layers.{layer}.{table[stem]}.{ending}" if stem in table else None


def _halves(rows: int, heads: int) -> np.ndarray:
    """The order of rows that brings pairs of neighbours to pairs of halves, head by head."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _read(data: np.ndarray, kind: Kind, rows: np.ndarray | None, less: float) -> np.ndarray:
    raw = np.asarray(data)  # a plain view of the map
    if kind == Kind.BF16:
        raw = raw.view(ml_dtypes.bfloat16)
    if rows is not None:
        raw = raw[rows]  # whole rows, so packed ones can be moved as they are
    if raw.dtype == np.uint8:
        raw = _unpack(raw, kind)
    return raw - raw.dtype.type(less) if less else raw


def _unpack(raw: np.ndarray, kind: Kind) -> np.ndarray:
    try:
        first = dequantize(raw[:1] if raw.ndim > 1 else raw, kind)
    except NotImplementedError as error:
        raise ModelError(
            f"A tensor is packed as {kind.name}, which the gguf package cannot unpack; requantise "
            "the file to a K-quant, Q8_0 or F16."
        ) from error
    if raw.ndim == 1:
        return first
    out = np.empty((len(raw), *first.shape[1:]), np.float32)
    step = max(1, _CHUNK // first.size)
    for start in range(0, len(raw), step):
        out[start : start + step] = dequantize(raw[start : start + step], kind)
    return out
