"""Caches of four sequences in one, two and four streams, and the contents of their sequences."""

import functools

import numpy as np

from tests.helpers.caches import Kind, cells_of, parse_cache, plan_rows, run_ubatch
from tests.snapshot.saved import randomize

ONE = Kind("one-stream", cells=24, sequences=4)
TWO = Kind("two-streams", cells=12, sequences=4, streams=2)
FOUR = Kind("four-streams", cells=8, sequences=4, streams=4)


@functools.cache
def fill_cache(kind, *lengths):
    """A cache in which sequences 0, 1, 2 ... have up to 8 tokens; donating it is not allowed."""
    tokens = np.random.default_rng(0).integers(1, 9, (kind.sequences, 8), np.int32)
    valid = np.arange(8) < np.pad(lengths, (0, kind.sequences - len(lengths)))[:, None]
    (ubatch,) = plan_rows(kind.make(), tokens, valid).ubatches
    return run_ubatch(kind.make(), ubatch)[0]


def parse_random(cells, kind):
    """A cache from a drawing (`parse_cache`), with different keys and values in all cells."""
    return randomize(parse_cache(cells, kind))


def texts_of(cache):
    """For each sequence the position, shift, keys and values of its tokens, sorted."""
    table, buffers = cache.table, cache.buffers
    arrays = [np.asarray(x) for x in (*buffers.k, *buffers.v)]
    texts = [[] for _ in range(table.sequences)]
    for (stream, cell), (position, owners, shift) in cells_of(table).items():
        numbers = [x[stream, :, cell].tobytes() for x in arrays]
        for seq in owners:
            texts[seq].append((position, shift, *numbers))
    return [sorted(text) for text in texts]


def assert_copied(cache, copied, parents, *bounds, merges=False):
    """Each sequence has its parent's tokens in a range; all others are unchanged.

    Within a stream a copy `merges` with the tokens of its target.
    """
    old, new = texts_of(cache), texts_of(copied)
    first, end = bounds or (0, 2**31)
    sharing = len(old) // cache.table.streams
    for seq, text in enumerate(new):
        parent = parents.get(seq, seq)
        wanted = old[parent]
        if parent != seq:
            wanted = [token for token in wanted if first <= token[0] < end]
        if merges and parent // sharing == seq // sharing:
            wanted = sorted({*wanted, *old[seq]})
        assert text == wanted, seq
