"""Mapping from the tensors of a checkpoint to parameters, without reading the tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.tensor import Tensor, join


class Sources:
    """Maker of a `Tensor` for each parameter, from the tensors of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def tensor(
        self,
        *names: str,
        parts: int | None = None,
        axis: int = 0,
        arrange: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Tensor:
        """Concatenate tensors along an axis, then rearrange the result by the function `arrange`.

        If a number `parts` is given, the first dimension of each tensor becomes `[parts, n]` before
        concatenation. If a tensor is missing, or the shapes do not fit, the result has no
        dimensions, unlike all parameters.
        """
        self.checkpoint.used_names.update(names)
        found = self.checkpoint.tensors
        if not all(name in found for name in names):
            return Tensor(shape=(), read=None, stored=())
        tensors = [found[name] for name in names]
        joined = join([tensor.split_rows(parts) for tensor in tensors] if parts else tensors, axis)
        return joined if arrange is None else joined.map(arrange)

    def norm(self, name: str) -> dict[str, Tensor]:
        """Return the tensors for an `RMSNorm`."""
        return {"weight": self.tensor(f"{name}.weight")}

    def linear(self, *names: str, bias: bool = False, **arranged: Any) -> dict[str, Tensor]:
        """Return the tensors for a `Linear` that combines the matrices of the given names.

        The options `arranged` are passed to the method `tensor`.
        """
        tree = {"weight": self.tensor(*(f"{name}.weight" for name in names), **arranged)}
        if bias:
            tree["bias"] = self.tensor(*(f"{name}.bias" for name in names), **arranged)
        return tree

    def attention(
        self,
        name: str,
        *,
        kv_heads: int,
        bias: bool = False,
        output_bias: bool | None = None,
        output: str = "o_proj",
        norms: str | None = None,
        letters: str = "qkv",
        arrange: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> dict[str, dict]:
        """Return the tensors for an `Attention`; `letters` are those of its projections.

        The name of the output projection in the checkpoint is `output`. The name of a norm is
        `norms` after "q_" or "k_"; None for no norms. The function `arrange` rearranges `qkv`.
        """
        names = (f"{name}.{letter}_proj" for letter in letters)
        tree = {
            "qkv": self.linear(*names, bias=bias, parts=kv_heads, axis=1, arrange=arrange),
            "output": self.linear(
                f"{name}.{output}", bias=bias if output_bias is None else output_bias
            ),
        }
        if norms:
            normed = [letter for letter in letters if letter in "qk"]
            tree |= {f"{letter}_norm": self.norm(f"{name}.{letter}_{norms}") for letter in normed}
        return tree

    def gated_feed(
        self,
        name: str,
        *,
        bias: bool = False,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> dict[str, dict]:
        """Return the tensors for a `Feed`; `names` are those of gate, up and down matrix."""
        gate, up, down = (f"{name}.{part}" for part in names)
        return {
            "gate_up": self.linear(gate, up, bias=bias, parts=1),
            "down": self.linear(down, bias=bias),
        }

    def experts(
        self,
        name: str,
        *,
        count: int,
        parts: tuple[str, ...] = ("gate", "up", "down"),
        router: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the tensors for `Experts`; `router` has those of a router other than one matrix.

        The checkpoint has a tensor for each expert, or a tensor for all `count` experts. A tensor
        of all experts may have their gate and up matrices.
        """
        both = f"{name}.experts.gate_up_proj"

        def all_of(part: str) -> Tensor:
            whole = f"{name}.experts.{part}_proj"
            if whole in self.checkpoint.tensors:
                return self.tensor(whole, arrange=lambda x: x.swapaxes(1, 2))
            if both in self.checkpoint.tensors and part != "down":
                half = ("gate", "up").index(part)
                return self.tensor(both, arrange=lambda x: np.split(x, 2, 1)[half].swapaxes(1, 2))
            names = (f"{name}.experts.{i}.{part}_proj.weight" for i in range(count))
            return self.tensor(*names, parts=1, arrange=lambda x: x.swapaxes(1, 2))

        if router is None:
            router = {"weight": self.tensor(f"{name}.gate.weight")}
        return {"router": router} | {part: all_of(part) for part in parts}

    def language_model(
        self,
        block: Callable[[int, str], dict],
        config: Any,
        *,
        layers: str = "model.layers",
        embedding: str = "model.embed_tokens",
        norm: str = "model.norm",
    ) -> dict[str, dict]:
        """Return the tensors for a `LanguageModel`.

        The function `block` returns the tensors of a layer, given its number and name.
        """
        head = f"{embedding}.weight" if config.tied else "lm_head.weight"
        vocabulary = {"head": self.tensor(head)}
        if not config.tied:
            vocabulary["embedding"] = self.tensor(f"{embedding}.weight")
        blocks = {i: block(i, f"{layers}.{i}") for i in range(config.layers)}
        return {"vocabulary": vocabulary, "blocks": blocks, "norm": self.norm(norm)}
