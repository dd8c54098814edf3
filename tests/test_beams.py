"""Beam search: the beams of a search that computes every text anew, on any memory."""

from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from tests.memories import VOCABULARY, Kind, assert_identical, think

DATA = Path(__file__).parent / "data"
MODELS = ("llama_tied", "mamba2", "granite_hybrid", "recurrent_gemma")
CLOSE = dict(rtol=0, atol=2e-4)
POOL = Kind("pool", cells=30, sequences=5)
SPLIT = Kind("split", cells=16, sequences=5, split=True)
PROMPT = (7, 3, 11, 5)
WIDTH, STEPS = 3, 5

load = cache(lambda name: models.load(DATA / name))


def forward(weights, memory, ubatch):
    del weights
    return think(memory, ubatch)


# ---- a search without a cache


def computed_anew(forward, weights, make):
    """Return what gives the logits after some texts of one length, from an empty memory."""

    @jax.jit
    def run(weights, memory, rows, length):
        place = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
        batch = make_batch(rows, valid=place < length, outputs=place == length - 1)
        (ubatch,) = (plan := jaxkv.init_batch(memory, batch)).ubatches
        memory, logits = forward(weights, jaxkv.apply(memory, ubatch), ubatch)
        return plan.collect([logits])

    def logits_after(texts, rows=WIDTH, most=len(PROMPT) + STEPS):
        padded = np.zeros((rows, most), np.int32)
        for row, text in zip(padded, texts, strict=False):
            row[: len(text)] = text
        return np.asarray(run(weights, make(), padded, len(texts[0])))[: len(texts)]

    return logits_after


@cache
def tiny():
    return computed_anew(forward, None, Kind("", cells=16, sequences=WIDTH, split=True).make)


def searched(logits_after, *, width=WIDTH, steps=STEPS, stop=(), penalty=1.0):
    """Do what the docstring of `beam` says, to the end: pairs of a text and its score."""

    def rank(one):
        text, score = one
        return score / len(text) ** penalty

    living, ended = [((), np.float32(0))], []
    for _ in range(steps):
        if not living:
            break
        logits = logits_after([(*PROMPT, *text) for text, _ in living]).astype(np.float32)
        logprobs = np.asarray(jax.nn.log_softmax(logits))
        candidates = [
            ((*text, token), score + logprobs[row, token])
            for row, (text, score) in enumerate(living)
            for token in range(logits.shape[1])
        ]
        candidates.sort(key=lambda one: -one[1])
        ended += [one for one in candidates[:width] if one[0][-1] in stop]
        ended = sorted(ended, key=rank, reverse=True)[:width]
        living = [one for one in candidates if one[0][-1] not in stop][:width]
    return sorted(ended + living, key=rank, reverse=True)[:width]


def assert_found(beams, wanted):
    """The texts and scores are those of the other search."""
    texts = [row[:n] for row, n in zip(beams.tokens.tolist(), beams.lengths.tolist(), strict=True)]
    assert texts == [list(text) for text, _ in wanted]
    assert all(set(row[n:]) <= {-1} for row, n in zip(beams.tokens.tolist(), beams.lengths))
    np.testing.assert_allclose(beams.scores, [score for _, score in wanted], **CLOSE)


# ---- the same search, in a memory


def prompted(make, forward=forward, weights=None, seq=0):
    return jaxkv.prefill(forward, weights, make(), make_batch(PROMPT, sequences=seq))


search = partial(loops.beam, forward, None, width=WIDTH, steps=STEPS)


@pytest.mark.parametrize("kind", [POOL, SPLIT], ids=lambda kind: kind.name)
@pytest.mark.parametrize("penalty", [1.0, 0.0, 3.0, -1.0])
@pytest.mark.parametrize("stop", [(2, -1), (10, 13)])
def test_beams_are_those_of_a_search_without_a_cache(kind, penalty, stop):
    memory, logits = prompted(kind.make)
    after, beams = search(memory, logits, stop=list(stop), penalty=penalty)
    assert_found(beams, searched(tiny(), stop=stop, penalty=penalty))
    assert beams.reason == jaxkv.Reason.FITS
    assert not sum(jaxkv.check_invariants(after).values())
