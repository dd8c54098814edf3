"""Plans of up to 8 tokens, padded to 8, so that a cache of one stream needs one program."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv import make_batch
from tests.helpers.caches import SMALL, Kind, run_ubatch

COUNT = 8
NEAR = Kind("near", cells=6, sequences=3, windows=(jaxkv.Window.sliding(4),))
BLOCKS = Kind("chunks", cells=6, sequences=3, windows=(jaxkv.Window.chunked(4),))


def plan_of(cache: Any, tokens: int | Sequence[int] = 1, sequences: Any = 0) -> jaxkv.Plan:
    """Plan tokens, or a number of them."""
    tokens = [1] * tokens if isinstance(tokens, int) else tokens
    rows = tokens, np.broadcast_to(sequences, len(tokens)), [1] * len(tokens)
    return _planned(cache, *(np.pad(np.int32(row), (0, COUNT - len(row))) for row in rows))


def run_tokens(
    cache: Any, tokens: int | Sequence[int], sequences: Any = 0
) -> tuple[Any, jax.Array]:
    """Run tokens that fit; return the cache, and the logits of each sequence's last token."""
    plan = plan_of(cache, tokens, sequences).check()
    cache, logits = run_ubatch(cache, plan.ubatches[0])
    return cache, plan.gather_outputs([logits])


@functools.cache
def make_small_cache(*counts: int) -> Any:
    """Make a small cache with `counts` tokens of sequences 0, 1, ...; at most 8 in total."""
    sequences = np.repeat(np.arange(len(counts)), counts)
    return run_tokens(SMALL.make(), range(1, 1 + len(sequences)), sequences)[0]


def list_resumable(cache: Any, seq: int = 0, visible_until: int = 10) -> list[int]:
    return [pos for pos in range(visible_until) if cache.can_resume(seq, pos)]


@jax.jit
def _planned(cache: Any, tokens: Any, sequences: Any, valid: Any) -> jaxkv.Plan:
    batch = make_batch(tokens, sequences=sequences, valid=valid != 0)
    return jaxkv.init_batch(cache, batch)
