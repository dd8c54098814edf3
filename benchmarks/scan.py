"""Prompt throughput of Mamba-2: all tokens of a ubatch at once, and one after another.

Random weights in the shape of Mamba-2 130M, cut to a few layers. Both ways run the same functions
and end in the same state. Run `python -m benchmarks.scan`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxkv
from benchmarks import machine, turns
from models.families import mamba2
from models.families.caches import make_cache
from models.model import functional


def build(layers: int) -> tuple[mamba2.Config, Any, Any]:
    """The model: its config, the pure function, and random weights."""
    mixer = mamba2.Sizes(width=768, heads=24, head_dim=64, state=128)
    config = mamba2.Config(layers=layers, vocabulary=4096, eps=1e-5, mixer=mixer)
    forward, *_ = functional(mamba2, config, jnp.float32)
    module = mamba2.MODULE(config, rngs=nnx.Rngs(0))
    return config, forward, nnx.to_pure_dict(nnx.state(module))


def main() -> None:
    """Print the milliseconds per token of each way, and the ratios to the first."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--ubatch", type=int, nargs="+", default=[512, 64, 1])
    parser.add_argument("--rollback", type=int, default=0, help="earlier states that are kept")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each way")
    args = parser.parse_args()

    machine.main()
    config, forward, params = build(args.layers)
    tokens = np.random.default_rng(0).integers(0, config.vocabulary, args.tokens)

    def prompt(ubatch_size: int) -> Callable[[], np.ndarray]:
        def run() -> np.ndarray:
            cache = make_cache(mamba2.layers_of(config, jnp.float32), max_rollback=args.rollback)
            batch = jaxkv.make_batch(tokens)
            _, logits, *_ = jaxkv.prefill(
                forward, params, cache, batch, ubatch_size=ubatch_size, donate=True
            )
            return np.asarray(logits)

        return run

    print(f"Mamba-2 130M float32, {args.layers} of 24 layers, a prompt of {args.tokens} tokens,")
    print(f"{args.rollback} earlier states kept; milliseconds a token:")
    ways = {f"ubatches of {size}": prompt(size) for size in args.ubatch}
    wanted, *others = (way() for way in ways.values())
    for logits in others:
        np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-3)
    took = turns.take_turns(
        {name: turns.milliseconds(way, units=args.tokens) for name, way in ways.items()},
        args.rounds,
    )
    turns.table(took, own=list(ways)[:1])


if __name__ == "__main__":
    main()
