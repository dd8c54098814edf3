"""Is it faster to guess? `speculate` with prompt lookup against `decode`, the same texts.

Run `python -m benchmarks.speculation`. SmolLM2 in float32, one text: a passage that the model
repeats, and a text that is drawn and repeats little. Both sides go on from the same memory and
generate as many tokens, in turn; where nothing is drawn the tokens are compared, too.
"""

import argparse
from typing import Any

import jax
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from jaxkv import loops

PASSAGE = (
    "Instructions for the new office: first open the window, then water the plants, then read the "
    "letters on the desk and answer the oldest one before noon. "
)
TEXTS = {
    "a passage again": (PASSAGE * 3, loops.sampling.make_sampler()),
    "little again": ("It was a cold morning when", loops.sampling.make_sampler(temperature=1.2)),
}


class Side:
    """A prompt in a memory, from which both ways go on."""

    def __init__(
        self,
        model: models.Model,
        text: str,
        sampler: loops.sampling.Sampler,
        tries: int,
        steps: int,
    ):
        self.model, self.sampler, self.steps = model, sampler, steps
        tokens = model.tokenizer.prompt(text)
        memory = model.make_memory(cells=len(tokens) + steps + tries)
        self.memory, logits = jaxkv.prefill(
            model.forward, model.weights, memory, jaxkv.make_batch(tokens), donate=True
        )
        self.state, _ = loops.begin(sampler, self.memory, logits)
        self.draft = loops.lookup([tokens], tries=tries)

    def plainly(self) -> jax.Array:
        """Generate a token a step."""
        return self._picked(jaxkv.decode, self.model.forward)[2].tokens

    def guessing(self) -> Any:
        """Generate with guesses."""
        return self._picked(loops.speculate, self.model.forward, self.draft)[3]

    def _picked(self, loop: Any, *first: Any) -> tuple:
        rest = self.model.weights, self.memory, self.state
        return loop(*first, self.sampler, *rest, steps=self.steps)


def main() -> None:
    """Print the milliseconds of a token in both ways, and how the guesses went."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    machine.main()
    model = models.load()
    for name, (text, sampler) in TEXTS.items():
        side = Side(model, text, sampler, args.tries, args.steps)
        plain, made = np.asarray(side.plainly()), side.guessing()
        print(
            f"{name}: {args.steps} tokens in {made.turns[0]} steps, {made.accepted[0]} of "
            f"{made.tried[0]} guesses held; milliseconds a token:"
        )
        if not sampler.draws and not np.array_equal(plain, made.tokens):
            print("  NOT the same tokens")
        ways = {"decode": side.plainly, "speculate": side.guessing}
        took = turns.take_turns(
            {name: turns.milliseconds(way, units=args.steps) for name, way in ways.items()},
            args.rounds,
        )
        turns.table(took, own=["speculate"])


if __name__ == "__main__":
    main()
