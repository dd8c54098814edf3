"""Hugging Face transformers doing the same work on the same weights, for comparison.

It decodes greedily in float32, on the CPU and in the same process. It is optional: `pip install
torch transformers` (torch's CPU build suffices).
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np


def available() -> bool:
    """Whether torch and transformers can be imported here."""
    from importlib.util import find_spec

    return find_spec("torch") is not None and find_spec("transformers") is not None


class TransformersPeer:
    """A Llama of Hugging Face transformers; B sequences in step.

    `prefill` empties the cache and feeds a prompt to each. `step` feeds the last chosen tokens and
    chooses the next. `rewind` removes the generated tokens.

    Args:
      tensors: the weights as numpy arrays, under Hugging Face names; converted to float32.
      config: keys of `config.json`.
      cells: N, the positions that a static cache is allocated for.
      batch: B, the sequences decoded together.
      threads: torch's threads.
      cache: the kind of its cache.
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        config: Mapping[str, Any],
        *,
        cells: int,
        batch: int,
        threads: int,
        cache: Literal["static", "dynamic"] = "static",
    ):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        if config.get("model_type", "llama") != "llama":
            raise ValueError(f"the peer runs llama models, not {config['model_type']!r}")
        torch.set_num_threads(threads)
        self.torch, self.cells, self.batch, self.kind = torch, cells, batch, cache
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**_llama_config(tensors, config)))
        params = {name: torch.tensor(np.asarray(a, np.float32)) for name, a in tensors.items()}
        params.setdefault("lm_head.weight", params["model.embed_tokens.weight"])
        model.load_state_dict(params, strict=True, assign=True)
        # The table of rotations is computed, so on "meta" it has no values yet.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        self.model = model.eval()

    def prefill(self, tokens: np.ndarray) -> None:
        """Empty the cache and feed a prompt to each sequence, `[B, P]`."""
        from transformers import DynamicCache, StaticCache

        if self.kind == "static":
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.cells)
        else:
            self.cache = DynamicCache(config=self.model.config)
        self._used = 0
        self._feed(self.torch.as_tensor(np.asarray(tokens), dtype=self.torch.long))
        self._prompt, self._first = self._used, self._next

    def step(self) -> None:
        """Generate one token of each sequence."""
        self._feed(self._next[:, None])

    def rewind(self) -> None:
        """Remove the tokens generated since the prompt."""
        if self.kind == "dynamic":
            self.cache.crop(self._prompt - self._used)
        else:
            for layer in self.cache.layers:  # cells after the length are not read
                layer.cumulative_length.fill_(self._prompt)
        self._used, self._next = self._prompt, self._first

    @property
    def chosen(self) -> np.ndarray:
        """`[B]` int64, the tokens that the next step will feed."""
        return self._next.numpy()

    def _feed(self, tokens: Any) -> None:
        first, self._used = self._used, self._used + tokens.shape[1]
        positions = self.torch.arange(first, self._used)[None].expand(self.batch, -1)
        with self.torch.inference_mode():
            logits = self.model(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            self._next = logits.argmax(-1)


def _llama_config(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a `config.json`, new or old, that set the shape of a LlamaConfig."""
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
    )
    found = {key: config[key] for key in kept if config.get(key) is not None}
    found["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    found["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    found["tie_word_embeddings"] = "lm_head.weight" not in tensors
    found["attn_implementation"] = "sdpa"
    return found
