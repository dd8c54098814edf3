"""Cost of dispatch: 1, 8 and 32 tokens per dispatch, against a Python loop.

Run `python -m benchmarks.loop`. All sides decode greedily with SmolLM2 in float32. The Python loop
plans, applies, runs and samples in separate calls, and reads every token on the CPU.
"""

import argparse
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from jaxkv import generation
from jaxkv.generation.model_step import compiled_step

BEST = generation.make_sampler()


class Side:
    """B prompts in a separate cache, from which each run starts again."""

    def __init__(self, model: models.Model, prompts: np.ndarray, *, tokens: int):
        self.model, self.tokens, self.batch = model, tokens, len(prompts)
        cells = prompts.shape[1] + tokens
        cache = model.make_cache(cells=cells, sequences=self.batch, streams=self.batch)
        cache, logits, *_ = jaxkv.prefill(
            model.forward, model.params, cache, jaxkv.make_batch(list(prompts)), donate=True
        )
        self.table, self.buffers = cache.table, cache.buffers
        self.first = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def in_python(self) -> np.ndarray:
        """Separate calls, with a read of each token."""
        table, token, chosen = self.table, np.asarray(self.first), []
        step = compiled_step(self.model.forward)
        for _ in range(self.tokens):
            cache = jaxkv.Cache(table=table, buffers=self.buffers)
            plan = jaxkv.init_batch(cache, jaxkv.make_batch(token[:, None])).check()
            table, self.buffers, logits = step(
                self.model.params, table, self.buffers, plan.ubatches[0]
            )
            token = np.asarray(plan.gather_outputs([logits])).argmax(-1).astype(np.int32)
            chosen.append(token)
        return np.stack(chosen, 1)

    def on_device(self, steps: int) -> Callable[[], np.ndarray]:
        """`steps` tokens per dispatch."""

        def run() -> np.ndarray:
            cache, chosen = jaxkv.Cache(table=self.table, buffers=self.buffers), []
            state = generation.init_decode(cache, tokens=self.first).state
            for _ in range(self.tokens // steps):
                picked = jaxkv.decode(
                    self.model.forward,
                    self.model.params,
                    cache,
                    state,
                    num_tokens=steps,
                    donate=True,
                    sampler=BEST,
                )
                cache, state = picked.cache, picked.state
                chosen.append(np.asarray(picked.tokens))
            self.buffers = cache.buffers
            return np.concatenate(chosen, 1)

        return run


def main() -> None:
    """Print the milliseconds per token for each number of tokens per dispatch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    machine.main()
    model = models.load()
    ids = np.random.default_rng(0).integers(100, 20_000, (max(args.batch), args.prompt), np.int32)
    for batch in args.batch:
        side = Side(model, ids[:batch], tokens=args.tokens)
        ways = {f"{n} tokens a dispatch": side.on_device(n) for n in (1, 8, 32)}
        ways["a loop in Python"] = side.in_python
        texts = {name: way().tolist() for name, way in ways.items()}
        assert all(text == texts["a loop in Python"] for text in texts.values()), "they disagree"
        print(f"batch {batch}, {args.tokens} tokens after {args.prompt}; milliseconds a token:")
        took = turns.take_turns(
            {name: turns.milliseconds(way, units=args.tokens) for name, way in ways.items()},
            args.rounds,
        )
        turns.table(took, own=["8 tokens a dispatch"])


if __name__ == "__main__":
    main()
