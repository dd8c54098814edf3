"""Conversion of GGUF tensors to the form of Hugging Face; some tensors are stored as halves."""

from collections.abc import Callable, Mapping

from models.checkpoints.tensor import Tensor
from models.errors import ModelError


def convert_tensors(
    tensors: Mapping[str, Tensor],
    source: str,
    *,
    join_halves: Callable[[Tensor, Tensor], Tensor],
    convert: Callable[[str, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Join each pair of tensors named `x.gate` and `x.up`, and convert all tensors.

    Raises `ModelError` if a tensor `x.gate` has no second half `x.up`.
    """
    out = {}
    for name, tensor in tensors.items():
        if name.endswith(".up"):
            continue
        if name.endswith(".gate"):
            name = name.removesuffix(".gate")
            if f"{name}.up" not in tensors:
                raise ModelError(
                    f"{source}: expected a second half of {tensor.stored[0]}, got none; download "
                    "it again."
                )
            tensor = join_halves(tensor, tensors[f"{name}.up"])
        out[name] = convert(name, tensor)
    return out
