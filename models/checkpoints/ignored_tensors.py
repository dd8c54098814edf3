"""Tensors that are not read, because they have no effect on logits."""

import re
from collections.abc import Mapping

from models.checkpoints.config import Config
from models.checkpoints.tensor import Tensor

_COMPUTED = re.compile(
    r"(.*\.)?rotary_emb\.(original_)?inv_freq|(.*\.)?rotary_emb\.(cos|sin)_cached|.*\.masked_bias"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
"""Names of tensors that older classes saved: the config determines them, or no class reads them."""
_OTHER_SENSES = re.compile(
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|connector|audio_tower|embed_vision)\..*"
)
"""Names of tensors for images and audio, which have no effect on tokens of text."""
_T5_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names of tensors that may repeat `shared.weight`."""


def is_ignored(name: str, tensors: Mapping[str, Tensor], config: Config) -> bool:
    """Return whether the tensor with this Hugging Face name has no effect on logits."""
    if config["model_type"] == "t5" and name in _T5_COPIES:
        shared = tensors.get("shared.weight")
        return shared is not None and tensors[name].repeats(shared)
    if config["model_type"] in ("qwen3_next", "nemotron_h") and name.startswith("mtp."):
        return True  # predicts further tokens
    if name == "lm_head.weight":  # repeats the embedding
        return bool(config["tie_word_embeddings"])
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        # The multi-token prediction layers of DeepSeek follow the others. The class of V3.2 drops
        # their number, which is 1 in its files.
        is_v32 = config["model_type"] == "deepseek_v32"
        further = 1 if is_v32 else config.get("num_mtp_layers", 0)
        if 0 <= int(layer[1]) - config["num_hidden_layers"] < further:
            return True
    return bool(_COMPUTED.fullmatch(name) or _OTHER_SENSES.fullmatch(name))
