"""Caches after several edits, a ubatch with two tokens, and its attention by the formula."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.cache import merge
from tests.attention.formula import formula
from tests.helpers.caches import HEADS, ROPE, SIZE, parse_cache
from tests.snapshot.saved import randomize

CLOSE = dict(rtol=0, atol=2e-6)


def make_edited(kind):
    """A cache with shared cells, holes, and random keys and values."""
    share = kind.sequences // kind.streams
    lines = []
    for one in range(0, kind.sequences, share):
        other = one + min(1, share - 1)
        both = f"{one},{other}" if share > 1 else one
        lines.append(f"0{{{one}}} . 3{{{one}}} 5{{{both}}} 6{{{other}}} . 1{{{other}}}")
    table = parse_cache("|".join(lines), replace(kind, latent=None)).table
    buffers = kind.make(rope=None if kind.latent else ROPE).buffers
    return randomize(merge(table, buffers), seed=1)


def start_step(cache, sequences=(0, 1)):
    batch = jaxkv.make_batch([[1, 2]] * len(sequences), sequences=[*sequences])
    return jaxkv.apply(cache, jaxkv.init_batch(cache, batch).check())


def draw_qkv(step, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    heads = (2 * HEADS, HEADS, HEADS)
    return [jnp.asarray(rng.normal(size=(*step.valid.shape, h, SIZE)), dtype) for h in heads]


def read_bias(bias, step, visible_until=None):
    """The bias of tokens and cells, `[P, H, T, N]`; NaN for hidden cells."""
    _, _, mask, positions = jaxkv.read_kv(step, 0, visible_until=visible_until)
    at = step.positions.reshape(mask.shape[:2])[:, None, :, None]
    added = bias(at, positions[:, None, None], jnp.arange(2 * HEADS)[None, :, None, None])
    return np.asarray(jnp.where(mask[:, None], added, jnp.nan))


def by_formula(step, layer, q, bias=0.0, **options):
    """Attention of a layer by the formula, `[R, T, H, Dv]`; bias is `[P, H, T, N]`."""
    k, v, mask, positions = map(np.asarray, jaxkv.read_kv(step, layer, **options))
    if not options:  # a token attends to itself and to no later one; padding to nothing
        at, valid = (np.reshape(x, mask.shape[:2]) for x in (step.positions, step.valid))
        last = np.where(mask, positions[:, None], -1).max(-1)
        np.testing.assert_array_equal(last, np.where(valid, at, -1))
    q = np.asarray(q)
    out = formula(q.reshape(*mask.shape[:2], *q.shape[2:]), k, v, mask, bias=bias)
    return out.reshape(*q.shape[:3], -1)
