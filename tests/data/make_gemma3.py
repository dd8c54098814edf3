"""Record what Hugging Face transformers computes with a tiny random model of the Gemma 3 family.

Run where torch and transformers are installed: `python tests/data/make_gemma3.py`. It writes a
folder as models are published (config.json, model.safetensors) with `run.npz` beside them:
`tokens`, a prompt; `greedy`, the tokens that follow; and `logits`, of every ninth token of the
prompt and then of the token before each greedy one. transformers 5.23, torch 2.13.
"""

from pathlib import Path

import numpy as np
import torch
from make_llama_family import make
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

OPTIONS = dict(
    num_hidden_layers=4,
    num_key_value_heads=1,
    head_dim=16,
    query_pre_attn_scalar=24,
    sliding_window=12,
    sliding_window_pattern=3,
    final_logit_softcapping=1.5,
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1e6, factor=4.0),
        sliding_attention=dict(rope_type="default", rope_theta=1e4),
    ),
)
PROMPT, GREEDY = 60, 24


def main() -> None:
    """Write the folder."""
    folder = Path(__file__).parent / "gemma3"
    net = make(51, Gemma3TextConfig, Gemma3ForCausalLM, **OPTIONS)
    with torch.no_grad():
        tokens = torch.randint(0, 96, (1, PROMPT))
        for _ in range(GREEDY):
            logits = net(tokens, use_cache=False).logits[0]
            tokens = torch.cat([tokens, logits[-1:].argmax(-1)[None]], dim=1)
    best = logits[PROMPT - 1 :].topk(2).values
    print("closest call", float((best[:, 0] - best[:, 1]).min()))
    net.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(
        folder / "run.npz",
        tokens=tokens[0, :PROMPT].numpy().astype(np.int32),
        greedy=tokens[0, PROMPT:].numpy().astype(np.int32),
        logits=torch.cat([logits[:PROMPT:9], logits[PROMPT - 1 :]]).numpy(),
    )


if __name__ == "__main__":
    main()
