"""Record what Hugging Face transformers computes with tiny random models of the Llama family.

Run where torch and transformers are installed: `python tests/data/make_llama_family.py`. It writes
to the folder of each variant: `tokens`, and logits after every ninth (`logits.npz`); of Gemma 3
(`run.npz`) `tokens`, a prompt; `greedy`, the tokens that follow; and `logits`, of every ninth token
of the prompt and then of the token before each greedy one.
"""

import recording
import torch

VARIANTS = ["llama_tied", "llama_llama3", "llama_yarn", "llama_linear", "mistral", "qwen2", "qwen3"]
VARIANTS += ["mistral_window", "qwen2_window", "qwen3_window"]
PROMPT, GREEDY = 60, 24


def make(name: str, seed: int) -> torch.nn.Module:
    """Make a random model that is sensitive to each of its weights."""
    net = recording.make(name, seed)
    for parameter in net.parameters():  # norms and biases too, or they would test nothing
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
        else:
            parameter.mul_(4.0)  # so that attention is not nearly uniform
    return net


@torch.no_grad()
def main() -> None:
    """Write all variants, and Gemma 3."""
    for seed, name in enumerate(VARIANTS):
        net = make(name, seed)
        tokens = torch.randint(0, 96, (1, 100))
        logits = net(tokens).logits[0]
        recording.write(name, net)
        recording.record(name, "logits.npz", tokens=tokens[0], logits=logits[::9])

    net = make("gemma3", 51)
    tokens = torch.randint(0, 96, (1, PROMPT))
    for _ in range(GREEDY):
        logits = net(tokens, use_cache=False).logits[0]
        tokens = torch.cat([tokens, logits[-1:].argmax(-1)[None]], dim=1)
    best = logits[PROMPT - 1 :].topk(2).values
    print("closest call", float((best[:, 0] - best[:, 1]).min()))
    recording.write("gemma3", net)
    recording.record(
        "gemma3",
        tokens=tokens[0, :PROMPT],
        greedy=tokens[0, PROMPT:],
        logits=torch.cat([logits[:PROMPT:9], logits[PROMPT - 1 :]]),
    )


if __name__ == "__main__":
    main()
