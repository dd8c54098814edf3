"""Temporary bytes and large copies of each compiled program.

Run `python -m benchmarks.copies`. It only compiles, so the numbers are the same on every machine.
`tests/attention/test_memory_bytes.py` sets bounds on them.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from benchmarks import machine
from tests.attention import test_memory_bytes as bytes_of
from tests.helpers import hlo


def main() -> None:
    """Print temporary bytes and large moves of the step and of each verb."""
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    print("versions   " + ", ".join(f"{name} {v}" for name, v in machine.versions().items()))
    programs = {
        f"step, {tokens} tokens": partial(planned_step, tokens=jnp.zeros(tokens, jnp.int32))
        for tokens in (1, 8)
    }
    moves = {name: bytes_of.MOVES[name] for name in ("update", "defrag")}
    print(f"one layer's keys are {bytes_of.LAYER / 1e6:.1f} MB; temporaries are a share of that:")
    for name, verb in (programs | bytes_of.EDITS | moves | bytes_of.ANSWERS).items():
        donated = () if name in bytes_of.ANSWERS else (0,)
        lowered = jax.jit(verb, donate_argnums=donated).lower(bytes_of.cache_shapes())
        compiled = lowered.compile()
        held = hlo.temporary_bytes(compiled)
        found = hlo.large_moves(compiled, bytes_of.LAYER // 2)
        print(
            f"  {name:18s} {held / 1e6:7.3f} MB  {held / bytes_of.LAYER:6.1%}  {len(found)} moves"
        )


def planned_step(cache: Any, tokens: jax.Array) -> Any:
    """Plan one token for each of the first sequences, and run the layers."""
    ids, there = jnp.arange(len(tokens)), jnp.ones(len(tokens), bool)
    ubatch = jaxkv.plan_step(cache, tokens, sequences=ids, active=there).ubatch
    return bytes_of.step(cache, ubatch)


if __name__ == "__main__":
    main()
