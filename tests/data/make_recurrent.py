"""Record what Hugging Face transformers computes with tiny random recurrent and hybrid models.

Run where torch and transformers are installed: `python tests/data/make_recurrent.py`, with the
names of variants where not all are wanted. It writes, for each, a folder as models are published
(config.json, model.safetensors) with `run.npz` beside it: prompts of three lengths with the 32
tokens that are generated greedily after each, one list after the other (`tokens`, `lengths`), which
of them have a logit recorded (`outputs`: every fifth of the prompt, and all from its last on), and
those `logits`. transformers 5.23, torch 2.13.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

PROMPTS = (90, 7, 33)
GENERATED = 32
VOCABULARY = 96
GRANITE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=8,
    shared_intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_n_heads=8,
    mamba_n_groups=2,
    mamba_d_state=16,
    mamba_d_head=8,
    mamba_chunk_size=32,
    embedding_multiplier=3.0,
    residual_multiplier=0.5,
    attention_multiplier=0.25,
    logits_scaling=2.0,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
)
TWO = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
THREE = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
FALCON = dict(
    vocab_size=VOCABULARY,
    hidden_size=24,
    intermediate_size=28,
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_d_ssm=32,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=2,
    mamba_d_state=8,
    mamba_chunk_size=32,
    mamba_norm_before_gate=False,
    embedding_multiplier=3.0,
    lm_head_multiplier=0.6,
    key_multiplier=1.7,
    attention_in_multiplier=0.8,
    attention_out_multiplier=1.3,
    ssm_in_multiplier=1.2,
    ssm_out_multiplier=0.7,
    ssm_multipliers=[0.9, 1.1, 0.8, 1.4, 0.6],
    mlp_multipliers=[1.5, 0.7],
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)
VARIANTS = {
    "mamba2": (
        Mamba2Config,
        Mamba2ForCausalLM,
        dict(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=8,
            state_size=16,
            n_groups=2,
            chunk_size=32,
        ),
    ),
    "mamba2_biased": (
        Mamba2Config,
        Mamba2ForCausalLM,
        dict(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_heads=4,
            head_dim=16,
            state_size=24,
            n_groups=1,
            conv_kernel=3,
            use_bias=True,
            use_conv_bias=False,
            tie_word_embeddings=True,
            chunk_size=32,
        ),
    ),
    "granite_hybrid": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE | TWO | dict(num_local_experts=0),
    ),
    "granite_hybrid_rope": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE
        | THREE
        | dict(num_local_experts=0, position_embedding_type="rope", mamba_n_groups=1),
    ),
    "granite_hybrid_experts": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE | THREE | EXPERTS,
    ),
    "granite_hybrid_experts_rope": (
        GraniteMoeHybridConfig,
        GraniteMoeHybridForCausalLM,
        GRANITE | TWO | EXPERTS | dict(position_embedding_type="rope", tie_word_embeddings=False),
    ),
    "recurrent_gemma": (
        RecurrentGemmaConfig,
        RecurrentGemmaForCausalLM,
        dict(
            vocab_size=VOCABULARY,
            hidden_size=32,
            lru_width=32,
            intermediate_size=96,
            num_hidden_layers=3,
            block_types=["recurrent", "attention"],
            num_attention_heads=4,
            num_key_value_heads=1,
            attention_window_size=16,
            logits_soft_cap=10.0,
        ),
    ),
    "lfm2": (
        Lfm2Config,
        Lfm2ForCausalLM,
        dict(
            vocab_size=VOCABULARY,
            hidden_size=24,
            intermediate_size=30,
            block_multiple_of=8,
            block_ffn_dim_multiplier=0.9,
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ),
    "falcon_h1": (FalconH1Config, FalconH1ForCausalLM, FALCON | dict(num_hidden_layers=2)),
    "falcon_h1_norm": (
        FalconH1Config,
        FalconH1ForCausalLM,
        FALCON
        | dict(
            num_hidden_layers=1,
            head_dim=8,
            mamba_rms_norm=True,
            mamba_conv_bias=False,
            tie_word_embeddings=True,
        ),
    ),
}


def randomise(net: torch.nn.Module) -> None:
    """Move every weight, so that norms, biases and gates are tested too."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim == 1 or name.endswith("gate_bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "conv" in name and parameter.ndim == 3:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)


def run(net: torch.nn.Module, prompt: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The prompt with what is generated after it, and the logits of all of that."""
    with torch.no_grad():
        tokens = prompt
        for _ in range(GENERATED):
            logits = net(tokens[None], use_cache=False).logits[0]
            tokens = torch.cat([tokens, logits[-1].argmax()[None]])
        logits = net(tokens[None], use_cache=False).logits[0]
        # With its cache it computes in another way. The two have to agree, or nothing is known.
        cached = net(prompt[None], use_cache=True)
        name = "past_key_values" if hasattr(cached, "past_key_values") else "cache_params"
        if getattr(cached, name, None) is not None:
            steps = [cached.logits[0]]
            for token in tokens[len(prompt) :]:
                cached = net(token[None, None], use_cache=True, **{name: getattr(cached, name)})
                steps.append(cached.logits[0])
            assert (torch.cat(steps) - logits).abs().max() < 1e-4
    return tokens.numpy().astype(np.int32), logits.numpy()


def main() -> None:
    """Write the variants that are named, or all."""
    here = Path(__file__).parent
    for seed, (name, (config, model, options)) in enumerate(VARIANTS.items()):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        print(name)
        torch.manual_seed(seed)
        net = model(config(**options)).eval()
        randomise(net)
        runs = [run(net, torch.randint(1, VOCABULARY, (length,))) for length in PROMPTS]
        wanted = [
            (np.arange(len(tokens)) % 5 == 0) | (np.arange(len(tokens)) >= length - 1)
            for (tokens, _), length in zip(runs, PROMPTS, strict=True)
        ]
        net.save_pretrained(here / name)
        (here / name / "generation_config.json").unlink(missing_ok=True)
        outputs = np.concatenate(wanted)
        np.savez_compressed(
            here / name / "run.npz",
            tokens=np.concatenate([tokens for tokens, _ in runs]),
            lengths=np.array([len(tokens) for tokens, _ in runs]),
            outputs=outputs,
            logits=np.concatenate([logits for _, logits in runs])[outputs],
        )


if __name__ == "__main__":
    main()
