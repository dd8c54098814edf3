"""Tensors in files, which are read on demand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor in a file.

    read: function that reads the values at each call, as stored, or as float32 if the file has
      quantised blocks. The result may be a view of the file. None if only shapes are read.
    stored: name and shape of each tensor of the file that is a part of it, for messages; empty if
      the file lacks a part.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray] | None
    stored: tuple[str, ...]

    def map(self, arrange: Callable[[np.ndarray], np.ndarray]) -> "Tensor":
        """Return the tensor with values rearranged by the function `arrange`.

        If the function does not accept the shape, the result has no dimensions.
        """
        stand_in = np.broadcast_to(np.float32(0), self.shape)  # a view of one number
        try:
            shape = arrange(stand_in).shape
        except (LookupError, ValueError):
            shape = ()
        return replace(self, shape=shape, read=lambda: arrange(self.read()))

    def repeats(self, other: "Tensor") -> bool:
        """Return whether two tensors have the same shape and, if they are read, the same values."""
        same = self.shape == other.shape
        return same and (self.read is None or np.array_equal(self.read(), other.read()))

    def split_rows(self, parts: int) -> "Tensor":
        """Split the first dimension into two dimensions `[parts, n]`, see `map`."""
        return self.map(lambda x: x.reshape(parts, -1, *x.shape[1:]))


def join(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate tensors along `axis`; the result has no dimensions if other dimensions differ."""
    if len(tensors) == 1:
        return tensors[0]
    shapes = [list(tensor.shape) for tensor in tensors]
    lengths = [shape.pop(axis) for shape in shapes if -len(shape) <= axis < len(shape)]
    if len(lengths) == len(shapes) and all(shape == shapes[0] for shape in shapes):
        shapes[0].insert(axis % len(tensors[0].shape), sum(lengths))
    else:
        shapes[0] = []
    return Tensor(
        shape=tuple(shapes[0]),
        read=lambda: np.concatenate(_of_one_dtype([tensor.read() for tensor in tensors]), axis),
        stored=tuple(name for tensor in tensors for name in tensor.stored),
    )


def _of_one_dtype(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return arrays unchanged, or as float32 if they have several dtypes.

    NumPy has no common dtype of float16 and bfloat16.
    """
    same = len({array.dtype for array in arrays}) == 1
    return arrays if same else [array.astype(np.float32) for array in arrays]


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
