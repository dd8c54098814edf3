"""Log-probabilities of given tokens equal those of each text computed alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv.generation.trie import MIN_SHARED, trie_of_texts
from models.compiling import counting
from tests.generation.tiny import DATA, load
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mostly_nightly

MODELS = sorted(
    path.name
    for path in DATA.iterdir()
    if (path / "config.json").exists() and not path.name.startswith("t5")
)
FEW = ["gemma3", "granite_hybrid", "llama_tied"]
SPEC = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=1)
TABLE = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (16, 16)))
RNG = np.random.default_rng(0)


def draw(*lengths):
    return [RNG.integers(0, 16, length).tolist() for length in lengths]


FIRST, THEN, OTHER = draw(MIN_SHARED + 2, MIN_SHARED + 1, 7)
TREE = [[*FIRST, 1, 2], [*FIRST, *THEN, 1], [*FIRST, *THEN, 2, 3, 4], OTHER, FIRST, OTHER]
"""Texts with two common beginnings, one after the other, a short one, and two equal texts."""
PROMPTS, ANSWERS = draw(5, 9), [*draw(3, 7, 0, 4)]


def alone(forward, spec, params, text):
    """Log-probabilities of a text but its first token, by `prefill`."""
    cache = jaxkv.make_cache(spec, cells=64)
    batch = jaxkv.make_batch([text], outputs=np.ones(len(text), bool))
    logits = jaxkv.prefill(forward, params, cache, batch, ubatch_size=64).logits
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return logprobs[jnp.arange(len(text) - 1), jnp.array(text[1:])]


def rows(parts, width):
    return jnp.stack([jnp.pad(part, (0, width - len(part))) for part in parts])


def expected(forward, spec, params, texts, prompts=None):
    """The result of `score`, each text computed alone."""
    if prompts is None:
        parts = [jnp.pad(alone(forward, spec, params, text), (1, 0)) for text in texts]
    else:
        group = len(texts) // len(prompts)
        whole = [prompts[i // group] + text for i, text in enumerate(texts)]
        parts = [
            alone(forward, spec, params, text)[len(text) - len(answer) - 1 :]
            for text, answer in zip(whole, texts, strict=True)
        ]
    return rows(parts, max(map(len, texts)))


@pytest.mark.core
@pytest.mark.parametrize("texts, prompts", [(TREE, None), (ANSWERS, PROMPTS)], ids=["tree", "prompts"])
@pytest.mark.parametrize("name", mostly_nightly(MODELS, few=FEW))
def test_score_and_its_gradient_equal_texts_alone(name, texts, prompts):
    model = load(name)
    weights = RNG.normal(size=(len(texts), max(map(len, texts)))).astype(np.float32)

    def loss(scoring, params):
        logprobs = scoring(params, texts, prompts=prompts)
        return jnp.sum(logprobs * weights), logprobs

    spec, forward = model.cache_spec, model.forward
    ours = partial(loss, partial(jaxkv.score, forward, spec=spec))
    theirs = partial(loss, partial(expected, forward, spec))
    (_, found), slopes = jax.value_and_grad(ours, has_aux=True)(model.params)
    (_, wanted), steps = jax.jit(jax.value_and_grad(theirs, has_aux=True))(model.params)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    for one, other in zip(jax.tree.leaves(slopes), jax.tree.leaves(steps), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * float(jnp.abs(other).max()) + 1e-7)
