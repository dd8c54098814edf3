"""Time of a prompt. SmolLM2 in float32, in ubatches of several sizes.

Run `python -m benchmarks.prompt`. All sides have the same weights, read the same tokens and
alternate in one process; llama.cpp and transformers take part where they are installed.
"""

import argparse
from collections.abc import Callable

import jax
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from benchmarks.peers import peers_of


def jaxkv_prompt(model: models.Model, prompt: np.ndarray, ubatch_size: int) -> Callable:
    """The whole prompt through jaxkv: an empty cache, planning, and the model."""

    def run() -> jax.Array:
        cache = model.make_cache(cells=len(prompt))
        batch = jaxkv.make_batch(prompt)
        _, logits, *_ = jaxkv.prefill(
            model.forward, model.params, cache, batch, ubatch_size=ubatch_size, donate=True
        )
        return logits

    return run


def main() -> None:
    """Print the milliseconds of a prompt on each side."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ubatch", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    machine.main()
    model = models.load()
    prompt = np.random.default_rng(0).integers(100, 20_000, args.tokens).astype(np.int32)
    sides = {f"jaxkv, ubatches of {u}": jaxkv_prompt(model, prompt, u) for u in args.ubatch}
    for name, peer in peers_of(model, "smollm2", cells=args.tokens, batch=1).items():
        sides[name] = lambda peer=peer: peer.prefill(prompt[None])
    print(f"a prompt of {args.tokens} tokens; milliseconds:")
    took = turns.take_turns({n: turns.milliseconds(s) for n, s in sides.items()}, args.rounds)
    middle = turns.table(took, own=list(sides)[:1])
    for name, time in middle.items():
        print(f"  {name}: {1e3 * args.tokens / time:.0f} tokens a second")


if __name__ == "__main__":
    main()
