"""Checkpoints in Hugging Face folders: `config.json` and `*.safetensors` files."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints import mxfp4
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.config import Config
from models.checkpoints.hugging_face import read_config, read_tokenizer
from models.checkpoints.tensor import Tensor, check_numbers
from models.errors import ModelError, few, first_line
from models.json_file import read_json
from models.kinds import TOKEN, check, refusal, several

_MULTIMODAL = re.compile(r"^(language_model\.model|model\.language_model|model\.text_model)\.")
"""Beginnings of names of the language part in multimodal models."""
_HEADLESS = re.compile(
    r"(embed_tokens(_per_layer)?|embeddings|embedding_norm|final_layernorm|layers|norm|norm_f"
    r"|per_layer_(model_projection|projection_norm)|altup_(unembed_)?projections)\."
)
"""Beginnings of names in files of a model without its head."""
_EMBEDDINGS = ("model.embed_tokens.weight", "backbone.embeddings.weight", "shared.weight")


def open_folder(folder: Path, *, weights: bool = True, values: bool = True) -> Checkpoint:
    """Open a Hugging Face folder; tensors are read on demand.

    If `weights` is False, the checkpoint has no tensors. If `values` is False, only the shapes of
    tensors are read.
    """
    config = read_config(folder)
    top = read_json(folder / "config.json")
    packing = top.get("quantization_config")
    if packing and not (isinstance(packing, dict) and packing.get("quant_method") == "mxfp4"):
        raise ModelError(
            f"{folder} has weights that are packed for another program (quantization_config in "
            "its config.json); give the model's unpacked folder or a .gguf file."
        )
    base = "backbone." if config["model_type"] in ("mamba2", "nemotron_h") else "model."
    name = top.get("transformers_weights")
    tensors = _tensors(folder, base, name, packed=bool(packing)) if weights else {}
    if not values:
        tensors = {name: replace(tensor, read=None) for name, tensor in tensors.items()}
    if weights:
        tied = _is_tied(tensors, config)
    else:  # for T5, `tie_word_embeddings` is always true
        tied = config["tie_word_embeddings"] and config.get("scale_decoder_outputs", True)
    config = config.updated(tie_word_embeddings=tied)
    generation = read_json(folder / "generation_config.json")

    def load_tokenizer():
        from models.text.from_folder import tokenizer_from_folder

        return tokenizer_from_folder(read_tokenizer(folder), str(folder))

    return Checkpoint(
        source=str(folder),
        architecture=config["model_type"],
        config=config,
        tensors=tensors,
        end_tokens=_end_tokens(folder, generation) or _end_tokens(folder, top),
        load_tokenizer=load_tokenizer,
    )


def _is_tied(tensors: Mapping[str, Tensor], config: Config) -> bool:
    """Return whether the output head is the embedding.

    A head in the file is kept unless it repeats the embedding, also if the config says that the
    head is tied.
    """
    head = tensors.get("lm_head.weight")
    if head is None or not config["tie_word_embeddings"]:
        return config["tie_word_embeddings"]
    return any(head.repeats(tensors[name]) for name in _EMBEDDINGS if name in tensors)


def _end_tokens(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """Return the ids under the key `eos_token_id`, which is an id or a list of ids."""
    places = (config, config.get("text_config") or {})
    given = [place.get("eos_token_id") for place in places]
    found = next((ids for ids in given if ids is not None and ids != []), None)  # an id may be 0
    if found is None:
        return frozenset()
    found = found if isinstance(found, list) else [found]
    check(found, several(TOKEN, 1000), "eos_token_id", str(folder))
    return frozenset(found)


def _tensors(folder: Path, base: str, file: Any, *, packed: bool) -> dict[str, Tensor]:
    """Return the tensors of a folder.

    Args:
      folder: path of the folder.
      base: beginning of the names of all tensors but the head.
      file: `transformers_weights` of the config.
      packed: if True, MXFP4 tensors are unpacked.
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    place_of: dict[str, str] = {}
    for shard, names in _shards(folder, file):
        try:
            # The reader stays open: it maps the file, so only tensors that are read use memory.
            reader = safe_open(shard, framework="numpy")
            stored = list(reader.keys())  # it has `keys` but is not a mapping
            shapes = [tuple(reader.get_slice(name).get_shape()) for name in stored]
        except Exception as error:  # the library raises many kinds
            raise ModelError(
                f"{shard} cannot be read as safetensors ({first_line(error)}); download it again."
            ) from error
        if absent := sorted(names - set(stored)):
            raise ModelError(
                f"{folder} lists {few(absent)} in its index, which {shard.name} does not contain; "
                "download it again."
            )
        for name, shape in zip(stored, shapes, strict=True):
            plain = _language_model_name(name, base)
            if plain in tensors:
                raise ModelError(
                    f"{folder}: expected one tensor {plain}, got two, {place_of[plain]} and "
                    f"{name} in {shard.name}; remove the one that is not part of the model."
                )
            place_of[plain] = f"{name} in {shard.name}"
            tensors[plain] = Tensor(
                shape=shape,
                stored=(f"{name} {shape}",),
                read=partial(
                    _read, reader, name, shard, packed=packed and name.endswith(mxfp4.ENDINGS)
                ),
            )
    return mxfp4.unpack_tensors(tensors, str(folder)) if packed else tensors


def _shards(folder: Path, file: Any) -> list[tuple[Path, set[str]]]:
    """Return the path of each file with tensors, and the tensor names that the index lists for it.

    The given file, or else a file `model.safetensors`, is the only one that is read. Otherwise the
    index lists the files, or all files are read.
    """
    if file is not None:
        if file not in [path.name for path in folder.glob("*.safetensors")]:
            where = str(folder / "config.json")
            raise refusal(
                file, "a *.safetensors file in the same folder", "transformers_weights", where
            )
        return [(folder / file, set())]
    if (folder / "model.safetensors").is_file():
        return [(folder / "model.safetensors", set())]
    path = folder / "model.safetensors.index.json"
    index = read_json(path).get("weight_map")
    if index is None:
        shards = [(shard, set[str]()) for shard in sorted(folder.glob("*.safetensors"))]
        if not shards:
            raise ModelError(
                f"{folder} has a config.json but no *.safetensors files; convert its weights with "
                "save_pretrained, or give a .gguf file."
            )
        return shards
    names: dict[str, set[str]] = {}
    for name, file in index.items() if isinstance(index, dict) else [("", index)]:
        if not isinstance(file, str) or Path(file).name != file:
            raise refusal(file, "names of files in the same folder", "weight_map", str(path))
        names.setdefault(file, set()).add(name)
    if absent := sorted(file for file in names if not (folder / file).is_file()):
        raise ModelError(
            f"{folder} lists {few(absent)} in its index, but does not contain them; download the "
            "missing shards."
        )
    return [(folder / file, names[file]) for file in sorted(names)]


def _read(reader: Any, name: str, shard: Path, *, packed: bool) -> np.ndarray:
    try:
        values = reader.get_tensor(name)
    except Exception as error:  # the library raises many kinds, also for dtypes that NumPy lacks
        raise ModelError(
            f"{shard}: {name} cannot be read ({first_line(error)}); give weights in "
            "float32, float16 or bfloat16."
        ) from error
    check = mxfp4.check_bytes if packed else check_numbers
    return check(values, name, str(shard))


def _language_model_name(name: str, base: str) -> str:
    """Return the name that a tensor has in a file of the language model and its head."""
    if _HEADLESS.match(name):
        return base + name
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    return _MULTIMODAL.sub(base, name, count=1)
