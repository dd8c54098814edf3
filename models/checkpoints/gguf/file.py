"""Checkpoints in GGUF files, converted to the form of Hugging Face.

A file in `architectures/` describes the names, settings and tensors of an architecture.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.config import Config
from models.checkpoints.gguf.architecture import Architecture
from models.checkpoints.gguf.architectures import (
    deepseek,
    falcon_h1,
    gemma3,
    gemma3n,
    gemma4,
    gpt_oss,
    granite_hybrid,
    lfm2,
    llama,
    llama4,
    mamba2,
    nemotron_h,
    olmo2,
    qwen3_5,
)
from models.checkpoints.gguf.config import config_from_gguf, count_layers
from models.checkpoints.gguf.metadata import Metadata, token_id
from models.checkpoints.gguf.reader import Reader
from models.checkpoints.tensor import Tensor, check_numbers
from models.errors import ModelError, first_line
from models.kinds import TEXT, TOKEN, several, whole

ARCHITECTURES: dict[str, Architecture] = {
    name: arch
    for group in (
        *(llama, qwen3_5, gemma3, mamba2, nemotron_h, granite_hybrid, lfm2, falcon_h1, gpt_oss),
        *(olmo2, gemma3n, gemma4, llama4, deepseek),
    )
    for name, arch in group.ARCHITECTURES.items()
}
"""Supported architectures by name."""

_CHUNK = 1 << 16  # values unpacked at a time, which fit into a CPU's cache


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; tensors are read on demand."""
    reader = _reader(path)
    source, get = str(path), Metadata(reader, str(path))
    name = get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{path}: expected an architecture of {', '.join(ARCHITECTURES)}, got {name!r}; give "
            "another model."
        )
    arch = ARCHITECTURES[name]
    if get("split.count", whole(0, 2**16), 1) > 1:
        raise ModelError(f"{path} is one part of several; merge the parts with llama-gguf-split.")

    stored = {tensor.name: tensor for tensor in reader.tensors}
    factors = stored.pop("rope_freqs.weight", None)
    if factors is not None:
        factors = check_numbers(np.ravel(factors.data), factors.name, source).tolist()
    metadata = Metadata(reader, source, f"{name}.")
    layers = count_layers(arch, metadata)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        plain = arch.hugging_face_name(name, layers)
        if plain is None or plain in tensors:  # the suffix makes it another name
            plain = f"{name}.unknown"
        tensors[plain] = _tensor(tensor, source)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    config = Config(config_from_gguf(arch, metadata, shapes, factors), source)
    vocabulary = Metadata(reader, source, "tokenizer.ggml.")

    def load_tokenizer():
        from models.checkpoints.gguf.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(vocabulary, get("tokenizer.chat_template", TEXT))

    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = {token_id(vocabulary, key) for key in keys} - {None}
    ends.update(vocabulary("eos_token_ids", several(TOKEN, 2**10), ()))  # of Ollama
    return Checkpoint(
        source=source,
        architecture=config["model_type"],
        config=config,
        tensors=convert_tensors(tensors, arch, config, source),
        end_tokens=frozenset(ends),
        load_tokenizer=load_tokenizer,
        stored_name=partial(arch.stored_name, layers),
        named_ends=True,
    )


def _reader(path: Path) -> Reader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        reader = Reader(path) if magic == b"GGUF" else None
    except Exception as error:  # the package raises many kinds for damaged files
        raise ModelError(
            f"{path} cannot be read as GGUF ({first_line(error)}); it may be cut short, so "
            "download it again."
        ) from error
    if reader is None:
        raise ModelError(
            f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'; give a "
            ".gguf file or a folder with config.json."
        )
    return reader


def _tensor(tensor: Any, source: str) -> Tensor:
    shape = tuple(int(length) for length in reversed(tensor.shape))  # in C order
    stored = f"{tensor.name} {shape}"
    return Tensor(shape=shape, read=partial(_read, tensor, source), stored=(stored,))


def _read(tensor: Any, source: str) -> np.ndarray:
    raw, kind = np.asarray(tensor.data), Kind(tensor.tensor_type)  # a view of the file map
    if kind == Kind.BF16:
        raw = raw.view(ml_dtypes.bfloat16)
    if raw.dtype == np.uint8:
        raw = _unpack(raw, kind, f"{source}: {tensor.name}")
    return check_numbers(raw, tensor.name, source)


def _unpack(raw: np.ndarray, kind: Kind, name: str) -> np.ndarray:
    try:
        first = dequantize(raw[:1] if raw.ndim > 1 else raw, kind)
    except NotImplementedError as error:
        raise ModelError(
            f"{name} is packed as {kind.name}, which the gguf package cannot unpack; requantise "
            "the file to a K-quant, Q8_0 or F16."
        ) from error
    if raw.ndim == 1:
        return first
    out = np.empty((len(raw), *first.shape[1:]), np.float32)
    step = max(1, _CHUNK // first.size)
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        # As one row, since `dequantize` loops over groups of 16 rows.
        row = dequantize(part.reshape(1, -1), kind)
        out[start : start + step] = row.reshape(len(part), *first.shape[1:])
    return out


def convert_tensors(
    tensors: Mapping[str, Tensor], arch: Architecture, config: Config, source: str
) -> dict[str, Tensor]:
    """Join each pair of tensors named `x.first` and `x.second`, and convert all tensors.

    Raises `ModelError` if a tensor `x.first` has no second half `x.second`.
    """
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".second"):
            continue
        plain = name.removesuffix(".first")
        if plain != name:
            if f"{plain}.second" not in tensors:
                raise ModelError(
                    f"{source}: expected a second half of {tensor.stored[0]}, got none; download "
                    "it again."
                )
            tensor = arch.join(plain, tensor, tensors[f"{plain}.second"], config)
        out[plain] = arch.convert(plain, tensor, config)
    return out
