"""Ranges of settings, checked before a model is built."""

import math
import re
from typing import Any

from models.kinds import Kind, check, number, whole

LAYERS = 4096
"""Largest number of layers."""

_INTS = (
    (re.compile("token_id"), whole(-(2**31), 2**31 - 2)),
    (re.compile("layers"), whole(0, LAYERS)),
    (re.compile("experts"), whole(0, 2**14)),
    (re.compile("num_inputs"), whole(2, 2**8)),
    (re.compile("hidden_size_per_layer"), whole(0, 2**31 - 2)),
    # A rotary embedding is a tuple of half as many numbers as a head.
    (re.compile("d_kv|group|head|rank|state"), whole(1, 2**14)),
    (
        re.compile(
            "(hidden|intermediate|vocab)_size|width|d_ff|d_model|window(?!_layers)|position"
        ),
        whole(1, 2**31 - 2),
    ),
    (re.compile("conv"), whole(2, 1024)),
    (re.compile("theta"), whole(2, 2**31 - 2)),
    (re.compile(""), whole(0, 2**31 - 2)),
)
"""Range of the integers whose key contains the pattern; the first pattern counts."""
_FLOATS = (
    (re.compile("eps"), number(0, 1)),
    (re.compile("theta"), number(1, 1e30, above=True)),
    (re.compile("limit"), Kind(words="a number", accepts=lambda value: not math.isnan(value))),
    (re.compile(""), number(-1e9, 1e9)),
)


def check_ranges(value: Any, key: str, source: str) -> None:
    """Raise `ModelError` if a number, also inside of a list or a dict, is out of its range."""
    if isinstance(value, dict):
        for inner, one in value.items():
            check_ranges(one, str(inner), source)
    elif isinstance(value, list | tuple):
        for one in value:
            check_ranges(one, key, source)
    elif type(value) in (int, float):
        rules = _INTS if type(value) is int else _FLOATS
        check(value, next(kind for pattern, kind in rules if pattern.search(key)), key, source)
