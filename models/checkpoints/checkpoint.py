"""Checkpoints: weights, config and tokenizer of a model, for every file format.

Tensors have the names and orientation of Hugging Face (`[out, in]`). Configs have the keys of
`config.json`. Readers of other formats convert tensors and configs to this form.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from models.checkpoints.config import Config
from models.checkpoints.tensor import Tensor
from models.errors import ModelError
from models.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, repr=False)
class Checkpoint:
    """Tensors that are read on demand, with the config and tokenizer of a model.

    source: name of the file or folder, for messages.
    architecture: `model_type` of Hugging Face ("llama", "qwen3", ...).
    config: settings, with the keys of `config.json`.
    tensors: tensors by Hugging Face name.
    end_tokens: ids of the tokens that end a text, as declared in the files.
    named_ends: whether tokens with names such as "<|im_end|>" end a text too, as in llama.cpp.
    load_tokenizer: builds the tokenizer; raises `ModelError` if the files contain no tokenizer.
    stored_name: converts a Hugging Face name to the name in the file.
    used_names: Hugging Face names of the tensors that the model has.
    """

    source: str
    architecture: str
    config: Config
    tensors: Mapping[str, Tensor]
    end_tokens: frozenset[int]
    load_tokenizer: Callable[[], Tokenizer]
    named_ends: bool = False
    stored_name: Callable[[str], str] = str
    used_names: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"Checkpoint({self.architecture}, {len(self.tensors)} tensors, {self.source!r})"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, which is built at the first access."""
        return self.load_tokenizer()

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Ids of the tokens that end a sequence or a turn."""
        try:
            tokenizer = self.tokenizer
        except ModelError:  # weights without a tokenizer still run on token ids
            return self.end_tokens
        ends = self.end_tokens | ({tokenizer.eos} - {None})
        return ends if ends and not self.named_ends else ends | tokenizer.named_ends
