"""Flax models on jaxkv caches, from GGUF files, Hugging Face folders or the hub.

The function `load` returns a `Model`; `python -m models` is the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.errors import ModelError
    from models.model import Model, load, load_shapes, on_mesh
    from models.mtp import mtp_drafter, mtp_head
    from models.text.tokenizer import Tokenizer

__all__ = [
    "Model",
    "ModelError",
    "Tokenizer",
    "load",
    "load_shapes",
    "mtp_drafter",
    "mtp_head",
    "on_mesh",
]

_HOMES = {"ModelError": "models.errors", "Tokenizer": "models.text.tokenizer"}
_HOMES |= dict.fromkeys(("mtp_drafter", "mtp_head"), "models.mtp")


def __getattr__(name: str) -> Any:
    """Import a name at its first use, so that Ctrl-C works before JAX is imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "models.model")), name)
