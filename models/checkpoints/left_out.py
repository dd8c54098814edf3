"""The tensors of a file that are not read, and why the logits are the same without them."""

import re
from collections.abc import Mapping
from typing import Any

_COMPUTED = re.compile(
    r"(.*\.)?rotary_emb\.(original_)?inv_freq|(.*\.)?rotary_emb\.(cos|sin)_cached|.*\.masked_bias"
)
"""Buffers that older classes saved: they follow from the config."""
_OTHER_SENSES = re.compile(
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|audio_tower|embed_vision)\..*"
)
"""Parts of models that also see or hear, for which a text has no tokens."""
_T5 = {
    "encoder.embed_tokens.weight",  # these two are shared.weight again
    "decoder.embed_tokens.weight",
    # Saved by an older class, and read by none.
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
}


def left_out(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is known to be without effect; the name is that of Hugging Face."""
    if config["model_type"] == "t5" and name in _T5:
        return True
    if name == "lm_head.weight":  # the embedding again
        return bool(config["tie_word_embeddings"])
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        # The layers of DeepSeek V3 that guess further tokens are after all others.
        further = config.get("num_nextn_predict_layers") or 0
        if 0 <= int(layer[1]) - config["num_hidden_layers"] < further:
            return True
    return bool(_COMPUTED.fullmatch(name) or _OTHER_SENSES.fullmatch(name))
