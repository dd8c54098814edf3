"""How fast is the main job? Greedy decoding of SmolLM2 in float32, against transformers.

Run `python -m benchmarks.generate`. Both sides read the same weights in the same process and take
turns (A-B-B-A), so that the ratio holds on a machine whose speed drifts. Transformers (static
cache) is optional, and named when it is absent: `pip install torch transformers`. Two forms of
jaxkv are timed: one dispatch a token, and the loop on the device that `python -m models` uses.
"""

import argparse
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import machine, peers

CHUNK = 8  # tokens of each sequence that the loop generates in one dispatch


class Stepping:
    """One token of every sequence a dispatch."""

    def __init__(self, model: models.Model, *, cells: int, batch: int):
        self.model, self.cells, self.batch = model, cells, batch
        self.everyone = jnp.arange(batch, dtype=jnp.int32)

        @partial(jax.jit, donate_argnames="memory")
        def step(weights: Any, memory: Any, token: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
            valid = jnp.ones(batch, bool)
            ubatch, ok = jaxkv.plan_step(memory, token, self.everyone, valid)
            memory, logits = model.forward(weights, jaxkv.apply(memory, ubatch), ubatch)
            return memory, jnp.argmax(logits, axis=-1).astype(jnp.int32), ok

        self._step = step

    def prefill(self, tokens: np.ndarray) -> None:
        """Start again from an empty cache with a prompt for each sequence, `[B, P]`."""
        self.memory = self.model.make_memory(cells=self.cells * self.batch, sequences=self.batch)
        self.memory, logits = jaxkv.prefill(
            self.model.step, self.model.weights, self.memory, jaxkv.make_batch(list(tokens))
        )
        self.token = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def step(self) -> None:
        """Generate one token of each sequence."""
        self.memory, self.token, ok = self._step(self.model.weights, self.memory, self.token)
        assert ok, "the cache is full"

    @property
    def chosen(self) -> np.ndarray:
        """The tokens that were picked last, `[B]`."""
        return np.asarray(self.token)


class Looping(Stepping):
    """CHUNK tokens of every sequence a dispatch; a step is one of those tokens."""

    tokens_per_step = CHUNK

    def __init__(self, model: models.Model, *, cells: int, batch: int):
        super().__init__(model, cells=cells, batch=batch)

        def pick(logits: jax.Array, sequences: jax.Array, positions: jax.Array) -> jax.Array:
            del sequences, positions
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)

        @partial(jax.jit, donate_argnames="memory")
        def chunk(weights: Any, memory: Any, running: jaxkv.Running) -> tuple:
            none = jnp.zeros(0, jnp.int32)
            return jaxkv.decode(model.forward, pick, weights, memory, running, none, steps=CHUNK)

        self._chunk = chunk

    def step(self) -> None:
        """Generate CHUNK tokens of each sequence."""
        running = jaxkv.Running(
            token=self.token,
            position=jaxkv.seq_pos_max(self.memory, self.everyone) + 1,
            sequence=self.everyone,
            active=jnp.ones(self.batch, bool),
            full=jnp.array(False),
        )
        self.memory, running, _ = self._chunk(self.model.weights, self.memory, running)
        self.token = running.token
        assert not running.full, "the cache is full"


def timed(side: Any, steps: int) -> float:
    """Milliseconds a token, after two steps that do not count."""
    per_step = getattr(side, "tokens_per_step", 1)
    for _ in range(2):
        side.step()
    start = time.perf_counter()
    for _ in range(max(steps // per_step, 1)):
        side.step()
    np.asarray(side.chosen)
    return 1e3 * (time.perf_counter() - start) / (max(steps // per_step, 1) * per_step)


def main() -> None:
    """Print the milliseconds a token of each side, and their ratios."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, default=512, help="for each sequence")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side")
    args = parser.parse_args()

    machine.main()
    model = models.load()
    weights = sum(x.nbytes for x in jax.tree.leaves(model.weights))
    ids = np.random.default_rng(0).integers(100, 20_000, (max(args.batch), args.prompt), np.int32)
    print(f"SmolLM2-135M float32, {args.cells} cells a sequence, prompts of {args.prompt} tokens;")
    print(f"every step reads {weights / 1e6:.0f} MB of weights. Milliseconds a step:")
    for batch in args.batch:
        sides = {
            "jaxkv, a dispatch a token": Stepping(model, cells=args.cells, batch=batch),
            f"jaxkv, {CHUNK} tokens a dispatch": Looping(model, cells=args.cells, batch=batch),
        }
        if peers.available():
            checkpoint = model.checkpoint
            tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
            sides["transformers, static cache"] = peers.TransformersPeer(
                tensors, checkpoint.config, cells=args.cells, batch=batch, threads=machine.threads()
            )
        else:
            print("transformers is not installed here, so there is nothing to compare with")
        took: dict[str, list[float]] = {name: [] for name in sides}
        firsts = {}
        for turn in range(args.rounds):
            order = list(sides) if turn % 2 == 0 else list(sides)[::-1]
            for name in order:
                sides[name].prefill(ids[:batch])
                firsts[name] = np.asarray(sides[name].chosen)
                took[name].append(timed(sides[name], args.steps))
        assert len({tuple(first) for first in firsts.values()}) == 1, "the sides disagree"
        base = np.median(took["transformers, static cache"]) if peers.available() else None
        for name, times in took.items():
            middle = np.median(times)
            ratio = "" if base is None else f"   {base / middle:.2f} x transformers"
            print(
                f"  batch {batch}  {name:28s} {middle:6.1f}  ({min(times):.1f} to "
                f"{max(times):.1f})  {1e3 * batch / middle:6.1f} tokens/s{ratio}"
            )


if __name__ == "__main__":
    main()
