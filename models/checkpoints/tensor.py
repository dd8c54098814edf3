"""Tensors in files, which are read on demand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from models.errors import ModelError


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

    def repeats(self, other: "Tensor") -> bool:
        """Return whether two tensors have the same shape and values; reads both."""
        return self.shape == other.shape and np.array_equal(self.read(), other.read())

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
