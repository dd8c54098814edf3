"""Others doing the same work on the same weights, for benchmarks to take turns with.

Hugging Face transformers decodes greedily with its static cache: the same checkpoint, float32, on
the CPU, in the same process, so that runs can alternate (A-B-B-A) on a machine whose speed drifts.
It is optional: `pip install torch transformers` (torch's CPU build is enough). Alone,

    python -m benchmarks.peers --batch 1 8 --cells 512 --prompt 64 --compiled

opens SmolLM2 and prints its milliseconds per step.
"""

import argparse
import time
from collections.abc import Mapping
from typing import Any

import numpy as np


def available() -> bool:
    """Whether torch and transformers can be imported here."""
    from importlib.util import find_spec

    return find_spec("torch") is not None and find_spec("transformers") is not None


class TransformersPeer:
    """A Llama of Hugging Face transformers with a static cache; B sequences in step.

    Tokens go in with `prefill`, then each `step` feeds the tokens chosen last and chooses the next
    by argmax. `prefill` starts again from an empty cache of the same size.

    Args:
        tensors: the weights as numpy arrays, under Hugging Face names; converted to float32.
        config: keys of `config.json`.
        cells: N, the positions the static cache is allocated for.
        batch: B, the sequences decoded together.
        threads: torch's threads; its own default if not given.
        compiled: whether steps go through `torch.compile` (needs a C++ compiler; the first step
            after the first prefill is then slow).
    """

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        config: Mapping[str, Any],
        *,
        cells: int,
        batch: int,
        threads: int | None = None,
        compiled: bool = False,
    ):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

        if config.get("model_type", "llama") != "llama":
            raise ValueError(f"the peer runs llama models, not {config['model_type']!r}")
        if threads:
            torch.set_num_threads(threads)
        self.torch, self.cells, self.batch = torch, cells, batch
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**_llama_config(tensors, config)))
        weights = {name: torch.tensor(np.asarray(a, np.float32)) for name, a in tensors.items()}
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        model.load_state_dict(weights, strict=True, assign=True)
        # The table of rotations is computed, not stored, so on "meta" it has no values yet.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        self.model = model.eval()
        self.cache = StaticCache(config=model.config, max_cache_len=cells)
        self._forward = torch.compile(model.forward) if compiled else model.forward
        self._used = 0
        self._next = None

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Empties the cache and feeds a prompt to every sequence.

        Args:
            tokens: `[B, P]` integers; P at most the cells.

        Returns:
            `[B, V]` float32, the logits after the last token.
        """
        torch = self.torch
        tokens = torch.as_tensor(np.asarray(tokens), dtype=torch.long)
        if tokens.ndim != 2 or tokens.shape[0] != self.batch:
            raise ValueError(f"tokens must be [{self.batch}, P], not {list(tokens.shape)}")
        if tokens.shape[1] > self.cells:
            raise ValueError(f"{tokens.shape[1]} tokens do not fit into {self.cells} cells")
        with torch.inference_mode():
            self.cache.reset()
        self._used = 0
        return self._feed(tokens, self.model.forward)

    def step(self) -> np.ndarray:
        """Feeds the tokens chosen last and chooses the next ones.

        Returns:
            `[B]` int64, the tokens chosen, each the argmax of its sequence's logits.
        """
        if self._next is None:
            raise RuntimeError("prefill comes before the first step")
        if self._used == self.cells:
            raise RuntimeError(f"all {self.cells} cells are used; prefill starts again")
        self._feed(self._next[:, None], self._forward)
        return self._next.numpy()

    @property
    def chosen(self) -> np.ndarray:
        """`[B]` int64, the tokens that the next step will feed."""
        return self._next.numpy()

    def _feed(self, tokens, forward) -> np.ndarray:
        # The positions are given, since transformers would derive them from the cache's length
        # with a tensor that torch.compile must guard on.
        torch = self.torch
        first, self._used = self._used, self._used + tokens.shape[1]
        positions = torch.arange(first, self._used)[None].expand(self.batch, -1)
        with torch.inference_mode():
            logits = forward(
                input_ids=tokens,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            self._next = logits.argmax(-1)
        return logits.numpy()


def _llama_config(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that shape a LlamaConfig, taken from a `config.json`, new or old."""
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


def milliseconds_per_step(peer, prompt: np.ndarray, *, steps: int, warm: int = 3) -> np.ndarray:
    """Times single decode steps after a prompt and a few steps that are not counted.

    Args:
        peer: whatever has `prefill` and `step`.
        prompt: `[B, P]` tokens.
        steps: steps that are counted.
        warm: steps before them.

    Returns:
        `[steps]` float64, milliseconds of each.
    """
    peer.prefill(prompt)
    for _ in range(warm):
        peer.step()
    took = np.empty(steps)
    for i in range(steps):
        start = time.perf_counter()
        peer.step()
        took[i] = 1e3 * (time.perf_counter() - start)
    return took


def main() -> None:
    """Prints what transformers takes for a step of SmolLM2."""
    from models.checkpoint import open_checkpoint

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", nargs="?", default="smollm2", help="what models.checkpoint opens")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--compiled", action="store_true", help="torch.compile as well")
    args = parser.parse_args()

    checkpoint = open_checkpoint(args.model)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    ids = np.random.default_rng(0).integers(100, 20_000, (max(args.batch), args.prompt))
    for batch in args.batch:
        for compiled in [False, True] if args.compiled else [False]:
            peer = TransformersPeer(
                tensors,
                checkpoint.config,
                cells=args.cells,
                batch=batch,
                threads=args.threads,
                compiled=compiled,
            )
            start = time.perf_counter()
            took = milliseconds_per_step(peer, ids[:batch], steps=args.steps)
            print(
                f"transformers {'torch.compile' if compiled else 'eager':13} batch {batch} "
                f"cells {args.cells} prompt {args.prompt}: median {np.median(took):.1f} ms/step, "
                f"fastest {took.min():.1f}, {time.perf_counter() - start:.0f} s in all",
                flush=True,
            )


if __name__ == "__main__":
    main()
