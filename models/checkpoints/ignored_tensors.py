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
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|connector|audio_tower|"
    r"embed_vision|embed_audio)\..*"
)
"""Names of tensors for images and audio, which have no effect on tokens of text."""
_WITH_MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h", "deepseek_v32")
"""Families whose tensors `mtp.*` predict further tokens."""
_KEYS_VALUES = re.compile(r"\.self_attn\.([kv]_proj|k_norm)\.(weight|bias)$")
"""Names of tensors from which keys and values are computed."""
_T5_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Names of tensors that may repeat `shared.weight`."""


def is_ignored(name: str, tensors: Mapping[str, Tensor], config: Config) -> bool:
    """Return whether the tensor with this Hugging Face name has no effect on logits."""
    if config["model_type"] == "t5" and name in _T5_COPIES:
        shared = tensors.get("shared.weight")
        return shared is not None and tensors[name].repeats(shared)
    if name.startswith("mtp.") and config["model_type"] in _WITH_MTP:
        return True
    if name == "lm_head.weight":  # repeats the embedding
        return bool(config["tie_word_embeddings"])
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        # The multi-token prediction layers of DeepSeek follow the others. The class of V3.2 drops
        # their number, which is 1 in its files.
        is_v32 = config["model_type"] == "deepseek_v32"
        further = 1 if is_v32 else config.get("num_mtp_layers", 0)
        if 0 <= int(layer[1]) - config["num_hidden_layers"] < further:
            return True
        # Layers that attend to the keys and values of an earlier layer.
        shared = config.get("num_kv_shared_layers", 0)
        if int(layer[1]) >= config["num_hidden_layers"] - shared and _KEYS_VALUES.search(name):
            return True
    return bool(_COMPUTED.fullmatch(name) or _OTHER_SENSES.fullmatch(name))
