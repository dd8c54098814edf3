"""Differences between the GGUF files of an architecture and the form of Hugging Face."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from models.checkpoints.config import Config
from models.checkpoints.gguf.metadata import Metadata
from models.checkpoints.tensor import Tensor, join

Settings = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
    "nextn.embed_tokens": "mtp.embed_tokens",
    "nextn.shared_head_head": "mtp.lm_head",
}
"""Names of tensors of the first layer that predicts further tokens (MTP), besides `layer`."""


def stack(name: str, first: Tensor, second: Tensor, config: Config) -> Tensor:
    """Join two matrices, one above the other; names and settings have no effect."""
    del name, config
    return join([first, second], axis=-2)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Names, settings and tensors of the GGUF files of one architecture.

    A key of `layer` and its value stand for the weight and the bias, unless they have a suffix. If
    two tensors of a file are one in Hugging Face's form, their values end in `.first` and
    `.second`.

    family: `model_type` of Hugging Face.
    layer: Hugging Face name of each tensor of a layer, after the name of the layer.
    outside: Hugging Face name of each tensor outside of layers.
    layers: beginning of the names of layers.
    eps: key of the epsilon of norms.
    by_layer: keys whose value may be a list with one number for each layer. A single number becomes
      such a list.
    predicts: whether the last layers (`nextn_predict_layers`) may predict further tokens. The
      Hugging Face names of their tensors begin with "mtp.".
    settings: returns settings to add or to replace, given metadata, the settings that are common to
      all architectures, and the shapes of tensors.
    convert: converts a tensor with a Hugging Face name and, after conversion of halves, returns it
      in Hugging Face's form.
    join: joins the two tensors `.first` and `.second` of a Hugging Face name.
    """

    family: str
    layer: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    eps: str = "attention.layer_norm_rms_epsilon"
    by_layer: tuple[str, ...] = ()
    predicts: bool = False
    settings: Callable[[Metadata, Settings, Shapes], Settings] = lambda get, config, shapes: {}
    convert: Callable[[str, Tensor, Config], Tensor] = lambda name, tensor, config: tensor
    join: Callable[[str, Tensor, Tensor, Config], Tensor] = stack

    def hugging_face_name(self, name: str, count: int) -> str | None:
        """Return the Hugging Face name of a tensor; None if the architecture has no such tensor.

        The argument `count` is the number of layers that do not predict further tokens.
        """
        found = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,3})\.(.+)", name)
        if name.startswith(("v.", "a.", "mm.")):  # of images and audio
            return f"vision_tower.{name}"
        if found is None:
            return self.outside.get(name)
        number, part = int(found[1]), found[2]
        predicts = self.predicts and number >= count
        names = {**self.layer, **_HEAD} if predicts and number == count else self.layer
        base, _, suffix = part.rpartition(".")
        plain = names.get(part)
        if plain is None and base in names and suffix in ("weight", "bias"):
            plain = f"{names[base]}.{suffix}"
        if predicts:
            plain = plain or part
            return plain if plain.startswith("mtp.") else f"mtp.layers.{number - count}.{plain}"
        return plain and f"{self.layers}.{number}.{plain}"

    def stored_name(self, count: int, plain: str) -> str:
        """Return the name in the file of a Hugging Face tensor, or of its first half."""
        number = int((re.search(r"\d+", plain) or [0])[0])
        number += count if plain.startswith("mtp.") else 0
        parts = [f"blk.{number}.{part}" for part in (*self.layer, *_HEAD)]
        names = [f"{part}{suffix}" for part in parts for suffix in ("", ".weight", ".bias")]
        found = {self.hugging_face_name(name, count): name for name in (*self.outside, *names)}
        return found.get(f"{plain}.first", found.get(plain, plain))


def even_rows_first(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: its even rows, and then its odd rows.

    A file of some architectures has the two rows of a rotation next to each other. Hugging Face
    rotates row i with row i + D/2.
    """
    if not tensor.shape or tensor.shape[0] % (2 * heads):  # the size of a head is even
        return replace(tensor, shape=())
    order = np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return replace(tensor, read=lambda: tensor.read()[order])


def less_one(tensor: Tensor) -> Tensor:
    """Subtract 1 from the weights of a norm, which are 1 larger in files of some architectures."""
    return replace(tensor, read=lambda: (x := tensor.read()) - x.dtype.type(1))
