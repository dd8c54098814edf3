"""What does each compiled program hold beside its arguments, and what large arrays does it copy?

Run `python -m benchmarks.copies`. Compiled only; nothing runs, so the numbers are the same on every
machine. They are those that `tests/attention/test_memory_bytes.py` puts bounds on.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp

from benchmarks import machine
from tests import hlo
from tests import test_memory_bytes as bytes_of


def main() -> None:
    """Print temporary bytes and large moves of the step and of each verb."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    print("versions   " + ", ".join(f"{name} {v}" for name, v in machine.versions().items()))
    programs = {
        f"step, {tokens} tokens": partial(
            bytes_of.planned_step, tokens=jnp.zeros(tokens, jnp.int32)
        )
        for tokens in (1, 8)
    }
    print(f"one layer's keys are {bytes_of.LAYER / 1e6:.1f} MB; temporaries are a share of that:")
    for name, verb in (programs | bytes_of.VERBS | bytes_of.ANSWERS).items():
        donated = () if name in bytes_of.ANSWERS else (0,)
        lowered = jax.jit(verb, donate_argnums=donated).lower(bytes_of.memory_shapes())
        compiled = lowered.compile()
        held = hlo.temporary_bytes(compiled)
        moves = hlo.large_moves(compiled, bytes_of.LAYER // 2)
        print(
            f"  {name:18s} {held / 1e6:7.3f} MB  {held / bytes_of.LAYER:6.1%}  {len(moves)} moves"
        )


if __name__ == "__main__":
    main()
