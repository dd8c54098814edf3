"""A checkpoint: one model's weights, config and tokenizer, whatever kind of file they lie in.

Every checkpoint looks like a Hugging Face one: tensors under Hugging Face names and in Hugging
Face orientation (linear weights are `[out, in]`), the config under the keys of `config.json`.
What a GGUF file stores differently is turned back while it is read, so a model never asks where
its weights came from.
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
    """A tensor of a file, which is not read yet.

    Attributes:
        shape: as the file's header has it.
        read: reads the values; nothing of them is kept.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    def turned(self, turn: Callable[[np.ndarray], np.ndarray]) -> "Tensor":
        """Returns the tensor as `turn`, a function that moves values about, arranges it.

        Raises:
            ValueError, IndexError: when the shape is not one that `turn` takes.
        """
        stand_in = np.broadcast_to(np.float32(0), self.shape)  # one number, whatever the shape
        return Tensor(shape=turn(stand_in).shape, read=lambda: turn(self.read()))

    def cut(self, parts: int) -> "Tensor":
        """Returns the tensor with its first dimension as two, the first of them `parts`.

        Raises:
            ValueError: when so many parts are not equally long.
        """
        return self.turned(lambda x: x.reshape(parts, -1, *x.shape[1:]))


def join(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Returns tensors put side by side along a dimension.

    Raises:
        ValueError: when their other dimensions differ.
    """
    if len(tensors) == 1:
        return tensors[0]
    shapes = [list(tensor.shape) for tensor in tensors]
    if any(not -len(shape) <= axis < len(shape) for shape in shapes):
        raise ValueError(f"{shapes} have no dimension {axis}")
    length = sum(shape.pop(axis) for shape in shapes)
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{[tensor.shape for tensor in tensors]} do not fit together")
    shapes[0].insert(axis % len(tensors[0].shape), length)
    return Tensor(
        shape=tuple(shapes[0]),
        read=lambda: np.concatenate([tensor.read() for tensor in tensors], axis),
    )


def check_numbers(values: np.ndarray, name: str, source: str) -> np.ndarray:
    """Returns the values of a tensor, which are to be floating-point numbers.

    Raises:
        ModelError: for integers, which mean nothing without the scales of their program.
    """
    if values.dtype.kind in "biuc":  # NumPy does not count bfloat16 among floating-point numbers
        raise ModelError(
            f"{source}: expected floating-point numbers in {name}, got {values.dtype}; give the "
            "model's unpacked weights or a .gguf file."
        )
    return values


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint:
    """Weights that are read when asked for, beside what is needed to run them.

    Attributes:
        source: where it came from, for messages.
        architecture: the family, as Hugging Face's `model_type` spells it ("llama", "qwen3", ...).
        config: the keys of `config.json`, completed by `models.checkpoints.config.complete`.
        tensors: the tensors by their Hugging Face names.
        end_tokens: the ids that the files themselves declare to end a text.
        load_tokenizer: builds the tokenizer, or raises `ModelError` when the files hold none.
        asked: the names of the tensors that were asked for so far.
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
        """Returns the Hugging Face names of the tensors."""
        return list(self.tensors)

    def layers(self) -> int:
        """Returns the number of layers whose tensors the file holds, of an encoder none."""
        names = r"(?:(?:model|backbone)\.layers|decoder\.block)\.(\d+)\."
        found = (re.match(names, name) for name in self.tensors)
        return len({layer[1] for layer in found if layer})

    def tensor(self, name: str) -> np.ndarray:
        """Reads one tensor; nothing of it is kept, so ask once.

        Args:
            name: a Hugging Face name, such as "model.layers.0.self_attn.q_proj.weight".

        Returns:
            The values as stored (float32, float16 or `ml_dtypes.bfloat16`); float32 where the
            file holds quantised blocks. May be a read-only view of the file.

        Raises:
            ModelError: when there is no such tensor.
        """
        return self.unread(name).read()

    def unread(self, name: str) -> Tensor:
        """Returns one tensor without reading it.

        Raises:
            ModelError: when there is no such tensor.
        """
        if name not in self.tensors:
            raise ModelError(
                f"{self.source} has no tensor {name!r} among its {len(self.tensors)}; "
                "look at names() for those it holds."
            )
        self.asked.add(name)
        return self.tensors[name]

    def check_all_asked(self) -> None:
        """Compare the tensors with those that were asked for.

        Raises:
            ModelError: for the first that was not, and is not known to be without effect.
        """
        for name, tensor in self.tensors.items():
            if name not in self.asked and not left_out(name, self.config):
                raise ModelError(
                    f"{self.source}: expected tensors that a {self.architecture!r} model reads, "
                    f"got {name} of shape {tensor.shape}; what it does is not computed, so give "
                    "another model."
                )

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, built at the first call."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.load_tokenizer()

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The ids after which generation ends: end of sequence and end of turn."""
        try:
            return self.end_tokens | self.tokenizer().stop_tokens
        except ModelError:  # weights without a tokenizer still run on token ids
            return self.end_tokens
