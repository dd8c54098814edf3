"""Record what Hugging Face transformers computes with tiny random recurrent and hybrid models.

Run where torch and transformers are installed: `python tests/data/make_recurrent.py`, with the
names of variants where not all are wanted. It writes to the folder of each: prompts of three
lengths with the 32 tokens that are generated greedily after each, one list after the other
(`tokens`, `lengths`), which of them have a logit recorded (`outputs`: every fifth of the prompt,
and all from its last on), and those `logits`.
"""

import sys

import numpy as np
import recording
import torch

PROMPTS, GENERATED, VOCABULARY = (90, 7, 33), 32, 96
VARIANTS = ["mamba2", "mamba2_biased", "granite_hybrid", "granite_hybrid_rope"]
VARIANTS += ["granite_hybrid_experts", "granite_hybrid_experts_rope", "recurrent_gemma"]
VARIANTS += ["lfm2", "falcon_h1", "falcon_h1_norm"]


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
    return tokens.numpy(), logits.numpy()


def main() -> None:
    """Write the variants that are named, or all."""
    for seed, name in enumerate(VARIANTS):
        if name not in (sys.argv[1:] or VARIANTS):
            continue
        net = recording.make(name, seed)
        randomise(net)
        runs = [run(net, torch.randint(1, VOCABULARY, (length,))) for length in PROMPTS]
        outputs = np.concatenate(
            [
                (np.arange(len(tokens)) % 5 == 0) | (np.arange(len(tokens)) >= length - 1)
                for (tokens, _), length in zip(runs, PROMPTS, strict=True)
            ]
        )
        recording.write(name, net)
        recording.record(
            name,
            tokens=np.concatenate([tokens for tokens, _ in runs]),
            lengths=[len(tokens) for tokens, _ in runs],
            outputs=outputs,
            logits=np.concatenate([logits for _, logits in runs])[outputs],
        )


if __name__ == "__main__":
    main()
