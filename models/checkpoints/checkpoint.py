"""Checkpoints: weights, config and tokenizer of a model, for every file format.

Tensors have the names and orientation of Hugging Face (`[out, in]`). Configs have the keys of
`config.json`. Readers of other formats convert tensors and configs to this form.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from models.checkpoints.left_out import left_out
from models.errors import ModelError
from models.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file: the shape, and a function that reads the values at each call."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def map(self, turn: Callable[[np.ndarray], np.ndarray]) -> "Tensor":
        """Return the tensor with values rearranged by the function `turn`.

        Raises a ValueError or IndexError if the function does not accept the shape.
        """
        stand_in = np.broadcast_to(np.float32(0), self.shape)  # a view of one number
        return Tensor(shape=turn(stand_in).shape, read=lambda: turn(self.read()))

    def cut(self, parts: int) -> "Tensor":
        """Split the first dimension into two dimensions `[parts, n]`.

        Raises a ValueError if its length is not a multiple of `parts`.
        """
        return self.map(lambda x: x.reshape(parts, -1, *x.shape[1:]))


def join(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along `axis`; raise a ValueError if other dimensions differ."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        raise ValueError(f"shapes {shapes} have no dimension {axis}")
    length = sum(shape.pop(axis) for shape in shapes)
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"shapes {[tensor.shape for tensor in tensors]} differ")
    shapes[0].insert(axis % len(tensors[0].shape), length)
    return Tensor(
        shape=tuple(shapes[0]),
        read=lambda: np.concatenate([tensor.read() for tensor in tensors], axis),
    )


def check_numbers(values: np.ndarray, name: str, source: str) -> np.ndarray:
    """Return the values of a tensor; raise `ModelError` if they are integers.

    A tensor of integers contains packed weights, which are not supported.
    """
    if values.dtype.kind in "biuc":  # NumPy does not count bfloat16 among floating-point numbers
        raise ModelError(
            f"{source}: expected floating-point numbers in {name}, got {values.dtype}; give the "
            "model's unpacked weights or a .gguf file."
        )
    return values


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint:
    """Tensors that are read on demand, with the config and tokenizer of a model.

    source: name of the file or folder, for messages.
    architecture: `model_type` of Hugging Face ("llama", "qwen3", ...).
    config: keys of `config.json`, completed by `models.checkpoints.config.complete`.
    tensors: tensors by Hugging Face name.
    end_tokens: ids of the tokens that end a text, as declared in the files.
    load_tokenizer: builds the tokenizer; raises `ModelError` if the files contain no tokenizer.
    asked: names of the tensors that were requested.
    """

    source: str
    architecture: str
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    end_tokens: frozenset[int]
    load_tokenizer: Callable[[], Tokenizer]
    asked: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"Checkpoint({self.architecture}, {len(self.tensors)} tensors, {self.source!r})"

    def names(self) -> list[str]:
        """Return the Hugging Face names of the tensors."""
        return list(self.tensors)

    def layers(self) -> int:
        """Return the number of decoder layers with tensors in the file."""
        names = r"(?:(?:model|backbone)\.layers|decoder\.block)\.(\d+)\."
        found = (re.match(names, name) for name in self.tensors)
        return len({layer[1] for layer in found if layer})

    def tensor(self, name: str) -> np.ndarray:
        """Read the values of a tensor; each call reads the file again.

        Args:
          name: Hugging Face name, such as "model.layers.0.self_attn.q_proj.weight".

        Returns:
          Stored values (float32, float16 or `ml_dtypes.bfloat16`), or float32 for quantised blocks.
          The array may be a read-only view of the file.

        Raises:
          ModelError: If the checkpoint has no tensor of this name.
        """
        return self.unread(name).read()

    def unread(self, name: str) -> Tensor:
        """Return a tensor without reading the values; raise `ModelError` if the name is unknown."""
        if name not in self.tensors:
            raise ModelError(
                f"{self.source} has no tensor {name!r} among its {len(self.tensors)}; "
                "names() lists them."
            )
        self.asked.add(name)
        return self.tensors[name]

    def check_all_asked(self) -> None:
        """Raise `ModelError` if a tensor was not requested, although it has an effect on logits."""
        for name, tensor in self.tensors.items():
            if name not in self.asked and not left_out(name, self.config):
                raise ModelError(
                    f"{self.source}: expected tensors that a {self.architecture!r} model reads, "
                    f"got {name} of shape {tensor.shape}; its effect is not computed, so give "
                    "another model."
                )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which is built at the first call."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.load_tokenizer()

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Ids of the tokens that end a sequence or a turn."""
        try:
            return self.end_tokens | self.tokenizer().stop_tokens
        except ModelError:  # weights without a tokenizer still run on token ids
            return self.end_tokens
