"""MXFP4 in safetensors files: blocks of 32 numbers of 4 bits with a shared exponent.

Each expert has a matrix, and each row of a matrix is divided into blocks. The matrices of all
experts are stored in two tensors of bytes:

- `_blocks`, `[experts, rows, blocks, 16]`. A byte has two numbers, the first in the lower bits.
- `_scales`, `[experts, rows, blocks]`. Scale `s` multiplies the numbers of a block by
  `2 ** (s - 127)`. Scale 255 makes these numbers NaN.

The format is that of "OCP Microscaling Formats (MX) Specification, version 1.0".
"""

from collections.abc import Mapping

import numpy as np

from models.checkpoints.tensor import Tensor
from models.errors import ModelError

ENDINGS = ("_blocks", "_scales")
"""Ends of the names of packed tensors."""

_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_NUMBERS, -_NUMBERS])
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1).view(np.complex64)[:, 0]
"""The two numbers of each byte, as one element, which NumPy gathers faster than a row of two."""
_FACTORS = np.append(np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32(np.nan))


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the float32 numbers `[..., 32 * n]` of blocks `[..., n, 16]` and scales `[..., n]`."""
    numbers = _PAIRS[blocks].view(np.float32)
    numbers *= _FACTORS[scales][..., None]
    return numbers.reshape(*scales.shape[:-1], -1)


def unpack_tensors(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Replace each pair of packed tensors by one tensor `[experts, 32 * blocks, rows]`.

    Raises `ModelError` if the tensor `_scales` of a pair is missing, or if its shape is not the
    shape of `_blocks` without the last dimension.
    """
    out = dict(tensors)
    for name in tensors:
        if not name.endswith("_blocks"):
            continue
        plain = name.removesuffix("_blocks")
        blocks, scales = out.pop(name), out.pop(f"{plain}_scales", None)
        if scales is None or len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16):
            raise ModelError(
                f"{source}: expected {plain}_scales of shape [a, b, c] for {name} of shape "
                f"[a, b, c, 16], got {scales and scales.stored[0]} and {blocks.stored[0]}; "
                "download it again."
            )
        out[plain] = _unpack_pair(blocks, scales)
    return out


def _unpack_pair(blocks: Tensor, scales: Tensor) -> Tensor:
    experts, rows, count = scales.shape

    def read() -> np.ndarray:
        out = np.empty((experts, rows, 32 * count), np.float32)
        pairs = zip(blocks.read(), scales.read(), strict=True)
        for expert, pair in enumerate(pairs):  # one at a time, to avoid a second copy of all
            out[expert] = unpack(*pair)
        return out.swapaxes(1, 2)

    shape = experts, 32 * count, rows
    return Tensor(shape=shape, read=read, stored=blocks.stored + scales.stored)


def check_bytes(values: np.ndarray, name: str, source: str) -> np.ndarray:
    """Return the values of a packed tensor; raise `ModelError` unless they are bytes."""
    if values.dtype != np.uint8:
        raise ModelError(
            f"{source}: expected bytes in {name}, got {values.dtype}; download it again."
        )
    return values
