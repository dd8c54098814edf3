"""Record what Hugging Face transformers computes with tiny random models of DeepSeek's kinds.

Run where torch and transformers are installed: `python tests/data/make_deepseek.py`. It writes, for
each variant, a folder as models are published (config.json, model.safetensors) with `run.npz`
beside it: `tokens`, and the `logits` after each; and `shifted`, those after each token from PROMPT
on where the tokens of GAP were forgotten before it, and those behind them moved up. It is computed
in float64, but for what transformers computes in float32 always. transformers 5.23, torch 2.13.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

TOKENS, PROMPT, GAP = 48, 30, slice(4, 12)
SIZES = dict(
    vocab_size=96,
    hidden_size=24,
    intermediate_size=28,
    moe_intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=3,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    original_max_position_embeddings=32,
    beta_fast=32.0,
    beta_slow=1.0,
)
VARIANTS = {
    "deepseek_v2": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        dict(
            q_lora_rank=None,
            n_shared_experts=2,
            topk_method="greedy",
            rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707),
        ),
    ),
    "deepseek_v2_groups": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        dict(
            q_lora_rank=14,
            n_shared_experts=1,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.6,
            rope_parameters=YARN | dict(mscale=0.9, mscale_all_dim=0.6),
        ),
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        dict(
            q_lora_rank=14,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "deepseek_v3_halves": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        dict(
            q_lora_rank=None,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_interleave=False,
            tie_word_embeddings=True,
        ),
    ),
}


def randomise(net: torch.nn.Module) -> None:
    """Move every weight, so that norms and corrections are tested too."""
    with torch.no_grad():
        named = [*net.named_parameters(), *net.named_buffers()]
        for name, values in named:
            if name.endswith("e_score_correction_bias"):
                values.copy_(0.2 * torch.randn_like(values))
            elif name.endswith("norm.weight"):
                values.add_(0.3 * torch.randn_like(values))
            elif values.ndim > 1:
                values.copy_(torch.randn_like(values) * values.shape[-1] ** -0.5)


def shifted(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits after a context shift, by the latents and rotated numbers that its cache holds."""
    cache = net(tokens[None, :PROMPT], use_cache=True).past_key_values
    forgotten = GAP.stop - GAP.start
    angles = -forgotten * net.model.rotary_emb.inv_freq
    at = -1 if isinstance(net, DeepseekV2ForCausalLM) else -2  # pairs of neighbours, or halves
    for layer in cache.layers:
        before, after = layer.values[:, :, : GAP.start], layer.values[:, :, GAP.stop :]
        a, b = after.unflatten(-1, (-1, 2) if at == -1 else (2, -1)).unbind(at)
        turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
        layer.values = torch.cat([before, torch.stack(turned, at).flatten(-2)], dim=2)
        layer.keys = torch.cat([layer.keys[:, :, : GAP.start], layer.keys[:, :, GAP.stop :]], dim=2)
    positions = torch.arange(PROMPT, TOKENS) - forgotten
    rest = tokens[None, PROMPT:]
    return net(rest, past_key_values=cache, position_ids=positions[None]).logits[0]


def main() -> None:
    """Write all variants."""
    here = Path(__file__).parent
    for seed, (name, (config, model, options)) in enumerate(VARIANTS.items()):
        torch.manual_seed(seed + 10)
        net = model(config(**SIZES | options)).eval()
        randomise(net)
        net.save_pretrained(here / name)
        (here / name / "generation_config.json").unlink(missing_ok=True)
        net.set_experts_implementation("eager")  # the others lack float64
        net.double()
        tokens = torch.randint(1, SIZES["vocab_size"], (TOKENS,))
        with torch.no_grad():
            logits = net(tokens[None], use_cache=False).logits[0]
            moved = shifted(net, tokens)
        np.savez_compressed(
            here / name / "run.npz",
            tokens=tokens.numpy().astype(np.int32),
            logits=logits.numpy().astype(np.float32),
            shifted=moved.numpy().astype(np.float32),
        )


if __name__ == "__main__":
    main()
