"""Flax models that keep their keys and values in a jaxkv memory, and the weights to run them.

`load` takes a GGUF file, a Hugging Face folder or a hub id; `python -m models` is the command line.
"""

from models.errors import ModelError
from models.model import Model, load, load_shapes, on_mesh
from models.text.tokenizer import Tokenizer

__all__ = ["Model", "ModelError", "Tokenizer", "load", "load_shapes", "on_mesh"]
