"""Cost of a beam search, relative to `decode` of the same number of texts.

Run `python -m benchmarks.beams`. SmolLM2 in float32, in one pool and with a stream each. A search
of W beams and greedy decoding of W texts run the same number of steps from the same prompt. The
sides alternate. The choice of the best of W * V candidates is also measured alone, in two ways.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from jaxkv import generation

BEST = generation.make_sampler()


class Side:
    """A prompt in a cache for W sequences, from which both sides continue."""

    def __init__(
        self, model: models.Model, prompt: np.ndarray, width: int, steps: int, split: bool
    ):
        self.model, self.width, self.steps = model, width, steps
        cells = len(prompt) + steps
        cache = model.make_cache(
            cells=cells if split else len(prompt) + width * steps,
            sequences=width,
            streams=width if split else 1,
        )
        cache, self.logits, *_ = jaxkv.prefill(
            model.forward, model.params, cache, jaxkv.make_batch(prompt), donate=True
        )
        self.cache = cache
        self.forked = jaxkv.seq_cp(cache, 0, list(range(1, width))).cache if width > 1 else cache

    def search(self) -> jax.Array:
        """Search for W texts; the first tokens need no step."""
        beams = generation.beam(
            self.model.forward,
            self.model.params,
            self.cache,
            self.logits,
            num_beams=self.width,
            num_tokens=self.steps + 1,
        )
        return beams.tokens

    def decode(self) -> jax.Array:
        """Decode W texts, with other first tokens."""
        first = jax.lax.top_k(self.logits[0], self.width)[1]
        picked = jaxkv.decode(
            self.model.forward,
            self.model.params,
            self.forked,
            generation.init_decode(self.forked, tokens=first).state,
            num_tokens=self.steps,
            sampler=BEST,
        )
        return picked.tokens


def choosing(width: int, vocabulary: int) -> dict[str, Any]:
    """Return ways to find the best W of W * V candidates."""
    shape = width, vocabulary
    logits = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    @partial(jax.jit, static_argnums=1)
    def of_each_first(logits: jax.Array, rows: int) -> jax.Array:
        best, _ = jax.lax.top_k(jax.nn.log_softmax(logits).reshape(rows, -1), width)
        return jax.lax.top_k(best.reshape(-1), width)[0]

    return {
        "the best of each beam first": lambda: of_each_first(logits, width),
        "all candidates at once": lambda: of_each_first(logits, 1),
    }


def main() -> None:
    """Print the milliseconds of a step of each side, and those of the choice."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--width", type=int, nargs="+", default=[4])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    machine.main()
    model = models.load()
    prompt = np.random.default_rng(0).integers(100, 20_000, args.prompt, np.int32)
    for width in args.width:
        sides = {}
        for split, name in [(False, "one pool"), (True, "a stream each")]:
            side = Side(model, prompt, width, args.steps, split)
            sides[f"decode, {name}"], sides[f"beam, {name}"] = side.decode, side.search
        print(f"{width} texts, {args.steps} steps after {args.prompt}; milliseconds a step:")
        took = turns.take_turns(
            {name: turns.milliseconds(way, units=args.steps) for name, way in sides.items()},
            args.rounds,
        )
        turns.table(took, own=["decode, one pool", "decode, a stream each"])
        print(f"choosing {width} of {width} * {model.config.vocabulary} candidates:")
        ways = choosing(width, model.config.vocabulary)
        took = turns.take_turns(
            {name: turns.milliseconds(way, repeats=20) for name, way in ways.items()}, args.rounds
        )
        turns.table(took)


if __name__ == "__main__":
    main()
