"""Record what Hugging Face transformers computes with tiny random models of the Llama family.

Run where torch and transformers are installed: `python tests/data/make_llama_family.py`. It writes,
for each variant, a folder as models are published (config.json, model.safetensors) with
`logits.npz` beside them: `tokens`, and logits after every ninth. transformers 5.23, torch 2.13.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
WINDOW = dict(use_sliding_window=True, sliding_window=12, max_window_layers=1)
VARIANTS = {
    "llama_tied": (LlamaConfig, LlamaForCausalLM, dict(tie_word_embeddings=True)),
    "llama_llama3": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=LLAMA3)),
    "llama_yarn": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=YARN)),
    "llama_linear": (
        LlamaConfig,
        LlamaForCausalLM,
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    ),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=None, head_dim=8)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict()),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(head_dim=16)),
    "mistral_window": (MistralConfig, MistralForCausalLM, dict(sliding_window=12, head_dim=8)),
    "qwen2_window": (Qwen2Config, Qwen2ForCausalLM, WINDOW),
    "qwen3_window": (Qwen3Config, Qwen3ForCausalLM, WINDOW | dict(head_dim=16)),
}


def make(seed: int, config: type, model: type, **options) -> torch.nn.Module:
    """Make a random model that is sensitive to each of its weights."""
    torch.manual_seed(seed)
    net = model(config(**SIZES | options)).eval()
    with torch.no_grad():
        for parameter in net.parameters():  # norms and biases too, or they would test nothing
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # so that attention is not nearly uniform
    return net


def main() -> None:
    """Write all variants."""
    here = Path(__file__).parent
    for seed, (name, (config, model, extra)) in enumerate(VARIANTS.items()):
        net = make(seed, config, model, **extra)
        with torch.no_grad():
            tokens = torch.randint(0, 96, (1, 100))
            logits = net(tokens).logits[0]
        net.save_pretrained(here / name)
        (here / name / "generation_config.json").unlink(missing_ok=True)
        np.savez_compressed(
            here / name / "logits.npz",
            tokens=tokens[0].numpy().astype(np.int32),
            logits=logits[::9].numpy(),
        )


if __name__ == "__main__":
    main()
