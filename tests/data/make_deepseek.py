"""Record what Hugging Face transformers computes with tiny random models of DeepSeek's kinds.

Run where torch and transformers are installed: `python tests/data/make_deepseek.py`. It writes to
the folder of each variant: `tokens`, and the `logits` after each; and `shifted`, those after each
token from PROMPT on where the tokens of GAP were forgotten before it, and those behind them moved
up. It is computed in float64, but for what transformers computes in float32 always.
"""

import recording
import torch
from transformers import DeepseekV2ForCausalLM

VARIANTS = ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves"]
TOKENS, PROMPT, GAP = 48, 30, slice(4, 12)


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


@torch.no_grad()
def main() -> None:
    """Write all variants."""
    for seed, name in enumerate(VARIANTS):
        net = recording.make(name, seed + 10)
        randomise(net)
        recording.write(name, net)
        net.set_experts_implementation("eager")  # the others lack float64
        net.double()
        tokens = torch.randint(1, net.config.vocab_size, (TOKENS,))
        logits = net(tokens[None], use_cache=False).logits[0]
        recording.record(name, tokens=tokens, logits=logits, shifted=shifted(net, tokens))


if __name__ == "__main__":
    main()
