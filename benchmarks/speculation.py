"""Time of `speculate` with prompt lookup, relative to `decode` of the same texts.

Run `python -m benchmarks.speculation`. SmolLM2 in float32 continues one text: a passage that the
model repeats, or a sampled text with few repetitions. Both sides start from the same cache,
generate the same number of tokens and alternate. Greedy tokens are also compared.

`--branches 1 2 4` measures trees instead, on texts with several continuations: the drafted tokens
that a step accepts with n branches, and the time per token.
"""

import argparse
from typing import Any

import jax
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from jaxkv import generation

PASSAGE = (
    "Instructions for the new office: first open the window, then water the plants, then read the "
    "letters on the desk and answer the oldest one before noon. "
)
TEXTS = {
    "a passage again": (PASSAGE * 3, generation.make_sampler()),
    "little again": ("It was a cold morning when", generation.make_sampler(temperature=1.2)),
}

FORKED = {
    "a list": "Anna likes tea. Ben likes coffee. Carl likes tea. Dora likes coffee. Emil likes",
    "code": (
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\n"
        "def mul(a, b):\n    return a * b\n\ndef div(a, b):\n"
    ),
    "sums": "1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 = 8\n5 + 5 =",
}
"""Texts in which the same words have several continuations."""


class Side:
    """A prompt in a cache, from which both ways continue."""

    def __init__(
        self,
        model: models.Model,
        text: str,
        sampler: generation.Sampler,
        tries: int,
        steps: int,
        branches: int = 1,
        ngram: int = 2,
    ):
        self.model, self.sampler, self.steps = model, sampler, steps
        tokens = model.tokenizer.prompt(text)
        cells = len(tokens) + steps + tries * branches
        cache = model.make_cache(cells=cells, sequences=branches)
        self.cache, logits, *_ = jaxkv.prefill(
            model.forward, model.params, cache, jaxkv.make_batch(tokens), donate=True
        )
        self.state = generation.init_decode(self.cache, logits=logits, sampler=sampler).state
        self.draft = generation.prompt_lookup(
            [tokens], ngram=ngram, num_draft_tokens=tries, num_branches=branches
        )

    def plainly(self) -> jax.Array:
        """Generate a token per step."""
        return self._sampled(jaxkv.decode).tokens

    def guessing(self) -> Any:
        """Generate with drafts."""
        return self._sampled(generation.speculate, drafter=self.draft)

    def _sampled(self, loop: Any, **options: Any) -> generation.DecodeResult:
        args = self.model.forward, self.model.params, self.cache, self.state
        return loop(*args, num_tokens=self.steps, sampler=self.sampler, **options)


def compare_branches(model: models.Model, args: argparse.Namespace) -> None:
    """Print for each text and number of branches the steps, their accepted tokens, and the cost."""
    best = generation.make_sampler()
    for name, text in FORKED.items():
        sides = {
            f"{branches} branches": Side(model, text, best, args.tries, args.steps, branches, 1)
            for branches in args.branches
        }
        plain = np.asarray(next(iter(sides.values())).plainly())
        print(f"{name}: {args.steps} tokens")
        for label, side in sides.items():
            made = side.guessing()
            accepted = made.num_accepted[0] / made.num_model_steps[0]
            same = "" if np.array_equal(plain, made.tokens) else ", NOT the tokens of decode"
            print(
                f"  {label}: {made.num_model_steps[0]} steps, "
                f"{accepted:.2f} tokens accepted in each{same}"
            )
        took = turns.take_turns(
            {
                label: turns.milliseconds(side.guessing, units=args.steps)
                for label, side in sides.items()
            },
            args.rounds,
        )
        turns.table(took, own=list(sides)[1:])


def main() -> None:
    """Print the milliseconds per token in both ways, and the share of accepted drafts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--branches", type=int, nargs="+")
    args = parser.parse_args()
    machine.main()
    model = models.load()
    if args.branches:
        compare_branches(model, args)
        return
    for name, (text, sampler) in TEXTS.items():
        side = Side(model, text, sampler, args.tries, args.steps)
        plain, made = np.asarray(side.plainly()), side.guessing()
        print(
            f"{name}: {args.steps} tokens in {made.num_model_steps[0]} steps, "
            f"{made.num_accepted[0]} of {made.num_drafted[0]} drafts held; milliseconds a token:"
        )
        if not sampler.is_random and not np.array_equal(plain, made.tokens):
            print("  NOT the same tokens")
        ways = {"decode": side.plainly, "speculate": side.guessing}
        took = turns.take_turns(
            {name: turns.milliseconds(way, units=args.steps) for name, way in ways.items()},
            args.rounds,
        )
        turns.table(took, own=["speculate"])


if __name__ == "__main__":
    main()
