"""Checkpoints in GGUF files, converted to the form of Hugging Face.

Three properties of tensors are converted, in addition to those in `recurrent.py` and
`gpt_oss.py`:

- names of tensors;
- order of the rows of q and k in files of architectures "llama" and "granitehybrid": GGUF files
  have the two rows of a rotation next to each other (Hugging Face rotates row i with row i + D/2);
- norm weights of Gemma, which are 1 larger in GGUF files.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.config import Config
from models.checkpoints.gguf.config import CONVERTERS, config_from_gguf
from models.checkpoints.gguf.metadata import Metadata
from models.checkpoints.gguf.names import hugging_face_name, stored_name
from models.checkpoints.gguf.reader import Reader
from models.checkpoints.tensor import Tensor, check_numbers
from models.errors import ModelError, first_line
from models.kinds import TEXT, TOKEN, whole

# Architecture of the file -> model_type of Hugging Face.
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3_text",
    "mamba2": "mamba2",
    "granitehybrid": "granitemoehybrid",
    "lfm2": "lfm2",
    "falcon-h1": "falcon_h1",
    "gpt-oss": "gpt_oss",
}

_CHUNK = 1 << 16  # values unpacked at a time, which fit into a CPU's cache


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; tensors are read on demand."""
    reader = _reader(path)
    source, get = str(path), Metadata(reader, str(path))
    arch = get("general.architecture")
    if not isinstance(arch, str) or arch not in _FAMILIES:
        raise ModelError(
            f"{path}: expected an architecture of {', '.join(_FAMILIES)}, got {arch!r}; give "
            "another model."
        )
    if get("split.count", whole(0, 2**16), 1) > 1:
        raise ModelError(f"{path} is one part of several; merge the parts with llama-gguf-split.")

    stored = {tensor.name: tensor for tensor in reader.tensors}
    factors = stored.pop("rope_freqs.weight", None)
    if factors is not None:
        factors = check_numbers(np.asarray(factors.data), factors.name, source).tolist()
    # The suffix distinguishes an unknown name from the name of a Hugging Face tensor.
    by_name = {
        hugging_face_name(name, arch) or f"{name}.unknown": tensor
        for name, tensor in stored.items()
    }
    shapes = {name: _shape(tensor) for name, tensor in by_name.items()}
    metadata = Metadata(reader, source, f"{arch}.")
    values = config_from_gguf(arch, metadata, shapes, factors) | {"model_type": _FAMILIES[arch]}
    config = Config(values, source)
    tensors = {
        name: _tensor(name, tensor, arch, config, source) for name, tensor in by_name.items()
    }
    if arch in CONVERTERS:
        tensors = convert_tensors(tensors, CONVERTERS[arch], source)
    vocabulary = Metadata(reader, source, "tokenizer.ggml.")

    def load_tokenizer():
        from models.checkpoints.gguf.tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(vocabulary, get("tokenizer.chat_template", TEXT))

    ends = (vocabulary(key, TOKEN) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    return Checkpoint(
        source=source,
        architecture=_FAMILIES[arch],
        config=config,
        tensors=tensors,
        end_tokens=frozenset(end for end in ends if end is not None),
        load_tokenizer=load_tokenizer,
        stored_name=partial(stored_name, arch),
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


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(length) for length in reversed(tensor.shape))  # in C order


def _tensor(name: str, tensor: Any, arch: str, config: dict, source: str) -> Tensor:
    """Return a tensor that is converted to Hugging Face's form at each read."""
    part = name.split(".")[-2]
    shape, heads = _shape(tensor), None
    stored = f"{tensor.name} {shape}"
    if arch in ("llama", "granitehybrid") and part in ("q_proj", "k_proj"):
        heads = config["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        shape = shape if shape[0] % (2 * heads) == 0 else ()  # the size of a head is even
    norm_offset = 1.0 if arch == "gemma3" and part.endswith("norm") else 0.0
    return Tensor(
        shape=shape, read=partial(_read, tensor, heads, norm_offset, source), stored=(stored,)
    )


def convert_tensors(
    tensors: Mapping[str, Tensor], converter: ModuleType, source: str
) -> dict[str, Tensor]:
    """Join each pair of tensors named `x.gate` and `x.up`, and convert all tensors.

    The functions `join_halves` and `convert` of the module `converter` do this for one tensor.
    Raises `ModelError` if a tensor `x.gate` has no second half `x.up`.
    """
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".up"):
            continue
        plain = name.removesuffix(".gate")
        if plain != name:
            if f"{plain}.up" not in tensors:
                raise ModelError(
                    f"{source}: expected a second half of {tensor.stored[0]}, got none; download "
                    "it again."
                )
            tensor = converter.join_halves(tensor, tensors[f"{plain}.up"])
        out[plain] = converter.convert(plain, tensor)
    return out


def _even_rows_first(rows: int, heads: int) -> np.ndarray:
    """Return the order in which each head has its even rows first, and then its odd rows."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _read(tensor: Any, heads: int | None, norm_offset: float, source: str) -> np.ndarray:
    raw, kind = np.asarray(tensor.data), Kind(tensor.tensor_type)  # a view of the file map
    if kind == Kind.BF16:
        raw = raw.view(ml_dtypes.bfloat16)
    if heads is not None:
        # Quantised rows can be reordered without unpacking.
        raw = raw[_even_rows_first(len(raw), heads)]
    if raw.dtype == np.uint8:
        raw = _unpack(raw, kind, f"{source}: {tensor.name}")
    raw = check_numbers(raw, tensor.name, source)
    return raw - raw.dtype.type(norm_offset) if norm_offset else raw


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
