"""Calls that raise, as data in `tests/data/mistakes`.

A case is an expression and, indented below it, its exception with a pattern of the sentence.
"""

import builtins
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.hybrid import compose_hybrid_cache
from tests.helpers import caches, edit_sequences

DATA = Path(__file__).parents[1] / "data" / "mistakes"
NAMES = {name: getattr(jaxkv, name) for name in jaxkv.__all__}
NAMES |= dict(jax=jax, jnp=jnp, np=np, jaxkv=jaxkv, partial=partial)
NAMES |= dict(edit_sequences=edit_sequences, caches=caches, compose=compose_hybrid_cache)
"""Names that all expressions may use, in addition to those of their test."""


def mistakes(name):
    """Pairs of a call and its exception."""
    lines = (DATA / f"{name}.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert not any(line.startswith(" ") for line in lines[::2]), name
    return [*zip(lines[::2], map(str.strip, lines[1::2]), strict=True)]


def assert_raises(call, outcome, names):
    error, _, message = outcome.partition(": ")
    with pytest.raises(getattr(builtins, error), match=message) as raised:
        eval(call, NAMES | names)
    assert "\n" not in str(raised.value).split("\n---")[0]
