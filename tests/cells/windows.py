"""A memory with a small window, and tokens that take its cells; keys and values are not written."""

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv import make_batch
from tests.memories import Kind

FOUR = Kind("four", cells=6, sequences=3, windows=(jaxkv.window.sliding(4),))


def plan_of(memory, count=1, seq=0):
    """Plan so many tokens of a sequence, 8 at most, in a memory of one stream: one program."""
    return _plan(memory, count, seq)


@jax.jit
def _plan(memory, count, seq):
    tokens, there = jnp.ones(8, jnp.int32), jnp.arange(8) < count
    return jaxkv.init_batch(memory, make_batch(tokens, sequences=0 * tokens + seq, valid=there))


def told(memory, count, seq=0):
    """Apply so many tokens of a sequence, one after another."""
    for _ in range(count):
        memory = jaxkv.apply(memory, plan_of(memory, 1, seq).check())
    return memory


def resumable(memory, seq=0, until=10):
    """The positions at which a token of a sequence would see all that it should."""
    return [pos for pos in range(until) if jaxkv.can_resume(memory, seq, pos)]


def starts_at(memory, seq):
    """Where a plan puts the next token of a sequence."""
    return plan_of(memory, 1, seq).check().ubatches[0].positions[0, 0].item()
