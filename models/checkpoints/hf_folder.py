"""Checkpoints that are Hugging Face folders: `config.json` beside `*.safetensors` files."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import Checkpoint, ModelError
from models.checkpoints.config import complete

# Models that also see or hear keep their language part under one of these.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def open_folder(folder: Path) -> Checkpoint:
    """Opens a folder; the tensors stay in their files until they are asked for."""
    top = read_json(folder / "config.json")
    if not top:
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder; give the "
            "folder that holds config.json and *.safetensors, or the path of a .gguf file."
        )
    config = {**top, **top.get("text_config", {})}
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} names no model_type, so its family is unknown; "
            'add one, such as "model_type": "llama".'
        )
    if config.get("quantization_config"):
        raise ModelError(
            f"{folder} holds weights that are packed for another program (quantization_config in "
            "its config.json); give the model's unpacked folder or a .gguf file."
        )
    tensors = _tensors(folder)
    generation = read_json(folder / "generation_config.json")
    ends: set[int] = set()
    for ids in (
        generation.get("eos_token_id"),
        top.get("eos_token_id"),
        config.get("eos_token_id"),
    ):
        ends.update(ids if isinstance(ids, list) else () if ids is None else (ids,))

    def load_tokenizer():
        from models.text.from_json import tokenizer_from_folder

        return tokenizer_from_folder(folder, config)

    return Checkpoint(
        source=str(folder),
        architecture=config["model_type"],
        config=complete(config, tensors, str(folder)),
        tensors=tensors,
        end_tokens=frozenset(ends),
        load_tokenizer=load_tokenizer,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); download it again.") from error


def _tensors(folder: Path) -> dict[str, Callable[[], np.ndarray]]:
    from safetensors import SafetensorError, safe_open

    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if index is not None:
        shards = [folder / name for name in sorted(set(index.values()))]
    elif (folder / "model.safetensors").is_file():  # others beside it hold the same once more
        shards = [folder / "model.safetensors"]
    else:
        shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(
            f"{folder} has a config.json but no *.safetensors files; convert its weights with "
            "save_pretrained, or give a .gguf file."
        )
    tensors: dict[str, Callable[[], np.ndarray]] = {}
    for shard in shards:
        if not shard.is_file():
            raise ModelError(
                f"{folder} lists {shard.name} in its index but does not hold it; download the "
                "missing shard."
            )
        try:
            # Held open: a map of the file, of which only what is read takes memory.
            held = safe_open(shard, framework="numpy")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{shard} cannot be read as safetensors ({error}); download it again."
            ) from error
        for name in list(held.keys()):  # it has keys but is no mapping
            tensors[_plain(name)] = partial(held.get_tensor, name)
    for name in index or ():
        if _plain(name) not in tensors:
            raise ModelError(f"{folder} lists {name} in its index, but no shard holds it.")
    return tensors


def _plain(name: str) -> str:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
