"""Tokens that attend to later positions: all of these are in their ubatch, or outputs are NaN."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.window import Window
from tests.attention.formula import formula
from tests.helpers.caches import attention_cache
from tests.helpers.parametrize import mark_cases

pytestmark = pytest.mark.core

SIZE, COUNT = 4, 12
X = np.random.default_rng(0).normal(size=(COUNT, SIZE)).astype(np.float32)
IMAGE = np.arange(COUNT, dtype=np.int32)
IMAGE[3:9] = 8  # these attend to each other


def make_model(how, window):
    """A layer whose tokens attend to later positions, and the expected mask, `[B, B]`."""
    at = np.arange(COUNT)
    last = IMAGE if how == "visible_until" else np.full(COUNT, COUNT - 1)
    ahead = SIZE // 2 if window == Window.symmetric(SIZE) else COUNT
    last = np.minimum(last, at + ahead)
    first = jaxkv.window.first_seen(window, jnp.arange(COUNT))
    sees = (at >= np.asarray(first)[:, None]) & (at <= last[:, None])

    def forward(params, step):
        until = step.extra["visible_until"] if how == "visible_until" else None
        options = dict(visible_until=until, causal=until is not None)
        x = step.embeddings[:, :, None]
        step, out = jaxkv.attend(step, 0, x, x, x, **options)
        return step, out.reshape(-1, SIZE)[step.outputs]

    return forward, sees


WINDOWS = None, Window.symmetric(SIZE), Window.sliding(SIZE)
CASES = [*product(("visible_until", "causal=False"), WINDOWS, (1, 2))]
CORE = CASES[2], CASES[10]


@pytest.mark.parametrize(
    ("how", "window", "streams"), mark_cases(CASES, fast=[CASES[0], CASES[9]], core=CORE), ids=str
)
def test_token_cut_off_from_what_it_sees_reads_nan(how, window, streams):  # trap 54
    forward, sees = make_model(how, window)
    heads = X[None, :, None]
    wanted = formula(heads, *[heads.swapaxes(1, 2)] * 2, sees[None])[0, :, 0]
    for size in (16, 4):
        sizes = dict(layers=1, cells=32, kv_heads=1, head_dim=SIZE, sequences=2)
        cache = attention_cache(**sizes, streams=streams, window=window)
        options = dict(outputs=np.ones(COUNT, bool), extra={"visible_until": IMAGE})
        batch = jaxkv.make_batch(embeddings=X, sequences=1, **options)
        _, out = jaxkv.prefill(forward, None, cache, batch, ubatch_size=size)[:2]
        ends = np.minimum(np.arange(COUNT) // size * size + size, COUNT) - 1
        reach = np.max(np.where(sees, np.arange(COUNT), -1), axis=1)
        whole = reach <= ends
        assert whole.all() == (size == 16)
        np.testing.assert_array_equal(np.isnan(out).all(axis=1), ~whole)
        np.testing.assert_allclose(out[whole], wanted[whole], atol=1e-5)
