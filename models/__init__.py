"""Flax models that keep their keys and values in a jaxkv cache, and the weights to run them.

`load` takes a GGUF file, a Hugging Face folder or a hub id; `python -m models` is the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.errors import ModelError
    from models.model import Model, load, load_shapes, on_mesh
    from models.text.tokenizer import Tokenizer

__all__ = ["Model", "ModelError", "Tokenizer", "load", "load_shapes", "on_mesh"]

_HOMES = {"ModelError": "models.errors", "Tokenizer": "models.text.tokenizer"}


def __getattr__(name: str) -> Any:
    """Import a name when it is asked for: the command line answers Ctrl-C before JAX is there."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "models.model")), name)
