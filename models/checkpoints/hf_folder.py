"""Checkpoints in Hugging Face folders: `config.json` and `*.safetensors` files."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints import mxfp4
from models.checkpoints.checkpoint import Checkpoint, Tensor, check_numbers
from models.checkpoints.config import complete, implied_tensors
from models.checkpoints.keys import check_keys
from models.errors import ModelError, brief
from models.json_file import read_json
from models.kinds import TOKEN, check, either, refusal, several

# Prefixes of the language part in multimodal models.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def open_folder(folder: Path, *, weights: bool = True) -> Checkpoint:
    """Open a Hugging Face folder; tensors are read on demand.

    If `weights` is False, the checkpoint has no tensors.
    """
    top = read_json(folder / "config.json")
    if not top:
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder; give the "
            "folder that contains config.json and *.safetensors, or the path of a .gguf file."
        )
    inner = top.get("text_config") or {}
    if not isinstance(inner, dict):
        raise refusal(inner, "an object", "text_config", str(folder / "config.json"))
    config = {**top, **inner}
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} has no model_type, so its family is unknown; "
            'add one, such as "model_type": "llama".'
        )
    packing = config.get("quantization_config")
    if packing and not (isinstance(packing, dict) and packing.get("quant_method") == "mxfp4"):
        raise ModelError(
            f"{folder} has weights that are packed for another program (quantization_config in "
            "its config.json); give the model's unpacked folder or a .gguf file."
        )
    check_keys(config["model_type"], inner or top, str(folder / "config.json"))
    tensors = _tensors(folder, packed=bool(packing)) if weights else {}
    if weights:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    else:
        shapes = implied_tensors(config, str(folder))
    generation = read_json(folder / "generation_config.json")
    ends = _end_tokens(folder, generation, top, config)

    def load_tokenizer():
        from models.text.from_json import tokenizer_from_folder

        return tokenizer_from_folder(folder, config)

    return Checkpoint(
        source=str(folder),
        architecture=config["model_type"],
        config=complete(config, shapes, str(folder)),
        tensors=tensors,
        end_tokens=ends,
        load_tokenizer=load_tokenizer,
    )


def _end_tokens(folder: Path, *configs: dict[str, Any]) -> frozenset[int]:
    """Return the ids under the key `eos_token_id` in `configs`; a value may be a list of ids."""
    ends: set[int] = set()
    for config in configs:
        found = config.get("eos_token_id")
        if found is None or found == []:
            continue
        check(found, either(TOKEN, several(TOKEN, 1000)), "eos_token_id", str(folder))
        ends.update(found if isinstance(found, list) else [found])
    return frozenset(ends)


def _tensors(folder: Path, *, packed: bool) -> dict[str, Tensor]:
    """Return the tensors of a folder; if `packed` is True, unpack MXFP4 tensors."""
    from safetensors import safe_open

    shards, names = _shards(folder)
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not shard.is_file():
            raise ModelError(
                f"{folder} lists {shard.name} in its index but does not contain it; download "
                "the missing shard."
            )
        try:
            # The reader stays open: it maps the file, so only tensors that are read use memory.
            reader = safe_open(shard, framework="numpy")
            for name in list(reader.keys()):  # it has `keys` but is not a mapping
                tensors[_plain(name)] = Tensor(
                    shape=tuple(reader.get_slice(name).get_shape()),
                    read=partial(
                        _read, reader, name, shard, packed=packed and name.endswith(mxfp4.ENDINGS)
                    ),
                )
        except Exception as error:  # the library raises many kinds
            raise ModelError(
                f"{shard} cannot be read as safetensors ({brief(error)}); download it again."
            ) from error
    for name in names:
        if _plain(name) not in tensors:
            raise ModelError(
                f"{folder} lists {name} in its index, but no shard contains it; download it again."
            )
    return mxfp4.unpacked(tensors, str(folder)) if packed else tensors


def _shards(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the paths of the files with tensors, and the tensor names in the index file."""
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if index is not None:
        files = list(index.values()) if isinstance(index, dict) else [index]
        for file in files:
            if not isinstance(file, str) or Path(file).name != file:
                expected = "names of files in the same folder"
                raise refusal(
                    file, expected, "weight_map", f"{folder}/model.safetensors.index.json"
                )
        return [folder / name for name in sorted(set(files))], list(index)
    if (folder / "model.safetensors").is_file():  # other files repeat its tensors
        return [folder / "model.safetensors"], []
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelError(
            f"{folder} has a config.json but no *.safetensors files; convert its weights with "
            "save_pretrained, or give a .gguf file."
        )
    return shards, []


def _read(reader: Any, name: str, shard: Path, *, packed: bool) -> np.ndarray:
    try:
        values = reader.get_tensor(name)
    except Exception as error:  # the library raises many kinds, also for dtypes that NumPy lacks
        raise ModelError(
            f"{shard}: {name} cannot be read ({brief(error)}); give weights in "
            "float32, float16 or bfloat16."
        ) from error
    check = mxfp4.check_bytes if packed else check_numbers
    return check(values, name, str(shard))


def _plain(name: str) -> str:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name
