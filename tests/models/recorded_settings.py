"""Models with one setting changed, and what Hugging Face transformers made of each.

`tests/data/record_settings.py` wrote the files. Weights are not stored: both sides compute them.
"""

import base64
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

FOLDER = Path(__file__).parent.parent / "data" / "settings"
VOCAB = 48  # ids of the tokens below are less than this
TOKENS = np.random.default_rng(1).integers(0, VOCAB, 48)
SOURCE, TARGET = TOKENS[:20], TOKENS[20:]
"""Tokens of the encoder and of the decoder of a T5."""
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Variant:
    """A folder and its result in transformers.

    - `logits`: `[48, 8]` (T5 `[28, 8]`), see `project_logits`; None if transformers raises.
    - `refused`: type and first line of the exception; None for a model with logits.
    - `at`: what raises: "config", "model" or "forward"; None for a model with logits.
    """

    name: str
    config: dict[str, Any]
    shapes: Shapes
    logits: np.ndarray | None
    refused: str | None
    at: str | None


@dataclass(frozen=True)
class Folder:
    """A folder with unusual tensors and its result in transformers.

    - `files`: by file name, for each tensor the name that its values follow from, its shape, and
      its type in safetensors, such as "BF16".
    - `json`: the content of other files, such as an index.
    - `logits`: None if transformers raises, or fills missing tensors with new random numbers.
    - `missing`, `unexpected`: tensors of the model that no file has, and tensors without use.
    """

    name: str
    config: dict[str, Any]
    files: dict[str, dict[str, tuple[str, list[int], str]]]
    json: dict[str, Any]
    logits: np.ndarray | None
    refused: str | None
    missing: list[str]
    unexpected: list[str]


def random_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the float32 values of a tensor: each has an effect, and states last some tokens."""
    values = np.random.default_rng(crc32(name.encode())).normal(size=shape)
    last = name.removesuffix(".weight").rpartition(".")[2]
    if last in ("A_log", "dt_bias"):
        values = 0.5 * values - 1.0
    elif last == "recurrent_param":
        values = 0.5 * values - 3.0
    elif name.endswith("bias") and last != "relative_attention_bias":
        values = 0.3 * values
    elif len(shape) == 1 and last != "sinks":  # norms and D
        values = 1.0 + 0.3 * values
    elif len(shape) > 1 and last != "relative_attention_bias":
        ends = last in ("embed_tokens", "embeddings", "shared", "lm_head")
        values = values * (1.0 if ends else 1.5) * shape[-1] ** -0.5
    return values.astype(np.float32)


def random_tensors(shapes: Shapes) -> dict[str, np.ndarray]:
    return {name: random_tensor(name, shape) for name, shape in shapes.items()}


def project_logits(logits: np.ndarray) -> np.ndarray:
    """Return `[n, 8]` numbers for logits `[n, vocab]`."""
    vectors = np.random.default_rng(2).normal(size=(8, logits.shape[1]))
    return (logits @ vectors.T * logits.shape[1] ** -0.5).astype(np.float32)


def write(family: str, base: dict[str, Any], variants: list[dict[str, Any]]) -> None:
    """Write a file; equal logits are written once."""
    arrays: dict[str, int] = {}
    for variant in variants:
        if "logits" in variant:
            text = base64.b64encode(variant["logits"].astype("<f4").tobytes()).decode()
            variant["logits"] = arrays.setdefault(text, len(arrays))
    content = base | {"variants": variants, "arrays": list(arrays)}
    packed = gzip.compress(json.dumps(content).encode(), mtime=0)
    (FOLDER / f"{family}.json.gz").write_bytes(packed)


def _content(name: str) -> tuple[dict[str, Any], list[np.ndarray]]:
    content = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    arrays = (np.frombuffer(base64.b64decode(text), "<f4") for text in content["arrays"])
    return content, [array.reshape(-1, 8) for array in arrays]


def read(family: str) -> list[Variant]:
    """Return the variants of a family; the first has the base config."""
    content, arrays = _content(family)
    variants = []
    for one in content["variants"]:
        config = content["config"] | one.get("config", {})
        config = {key: value for key, value in config.items() if key not in one.get("without", ())}
        shapes = content["tensors"] | one.get("tensors", {})
        shapes = {name: tuple(shape) for name, shape in shapes.items() if shape is not None}
        logits = arrays[one["logits"]] if "logits" in one else None
        ends = one.get("refused"), one.get("at")
        variants.append(Variant(one["name"], config, shapes, logits, *ends))
    return variants


def read_tensors() -> list[Folder]:
    content, arrays = _content("tensors")
    return [
        Folder(
            name=one["name"],
            config=one["config"],
            files=one["files"],
            json=one["json"],
            logits=arrays[one["logits"]] if "logits" in one else None,
            refused=one.get("refused"),
            missing=one.get("missing_keys", []),
            unexpected=one.get("unexpected_keys", []),
        )
        for one in content["variants"]
    ]
