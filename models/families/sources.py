"""Where the weights of a model come from: tensors of a checkpoint, arranged for its layers.

Nothing is read here. A tree of sources looks like the tree of the model's weights; their shapes are
compared first, and then each source is read and put on the device before the next, so that loading
takes little more memory than the weights do.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from models.checkpoints.checkpoint import Checkpoint, Tensor, join
from models.errors import ModelError


class Sources:
    """Names tensors of one checkpoint, and how they make a weight."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def tensor(
        self,
        *names: str,
        parts: int | None = None,
        axis: int = 0,
        turn: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Tensor:
        """Returns tensors side by side along `axis`, then moved about by `turn`.

        With `parts`, each has its first dimension cut into as many before, so that they lie side by
        side part by part.

        Raises:
          ModelError: when one is not there, or has a shape that does not go with the others.
        """
        tensors = [self.checkpoint.unread(name) for name in names]
        try:
            joined = join([tensor.cut(parts) for tensor in tensors] if parts else tensors, axis)
            return joined if turn is None else joined.turned(turn)
        except (LookupError, ValueError) as error:
            shapes = ", ".join(str(tensor.shape) for tensor in tensors)
            raise ModelError(
                f"{self.checkpoint.source} has {' and '.join(names)} of shape {shapes}, which do "
                f"not make one weight ({error}); is it damaged? Download it again."
            ) from error

    def norm(self, name: str) -> dict[str, Tensor]:
        """Returns the weight of an `RMSNorm`."""
        return {"weight": self.tensor(f"{name}.weight")}

    def linear(
        self,
        *names: str,
        bias: bool = False,
        **arranged: Any,
    ) -> dict[str, Tensor]:
        """Returns the weights of a `Linear` that does what several matrices do.

        Args:
          names: the matrices, `[outputs, inputs]`.
          bias: whether they have biases.
          arranged: how they and their biases lie, see `tensor`.
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
        bias: bool,
        output_bias: bool = False,
        output: str = "o_proj",
    ) -> dict[str, dict]:
        """Returns the weights of an `Attention`, as most families name them."""
        names = (f"{name}.{letter}_proj" for letter in "qkv")
        return {
            "qkv": self.linear(*names, bias=bias, parts=kv_heads, axis=1),
            "output": self.linear(f"{name}.{output}", bias=output_bias),
        }

    def gated_feed(self, name: str, *, bias: bool = False) -> dict[str, dict]:
        """Returns the weights of a `GatedFeed`, as most families name them."""
        names = f"{name}.gate_proj", f"{name}.up_proj"
        return {
            "gate_up": self.linear(*names, bias=bias, parts=1),
            "down": self.linear(f"{name}.down_proj", bias=bias),
        }

    def vocabulary(self, embedding: str, *, tied: bool) -> dict[str, Tensor]:
        """Returns the weights of a `Vocabulary`."""
        if tied:
            return {"head": self.tensor(embedding)}
        return {"head": self.tensor("lm_head.weight"), "embedding": self.tensor(embedding)}
