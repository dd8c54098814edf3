"""Speculation on real weights: 20 prompts, guesses looked up and of a model, windows that wrap."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from tests.cases import mostly_nightly

pytestmark = pytest.mark.nightly

BEST = loops.sampling.make_sampler()
PROMPTS = [
    "Once upon a time there was a little",
    "The capital of France is",
    "One, two, three, one, two,",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "Water is made of hydrogen and",
    "A, B, C, A, B, C, A,",
    "In the beginning",
    "The sun rises in the east and",
    "To make tea, first boil the water. To make coffee, first",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "Roses are red, violets are",
    "My name is Anna. My name is",
    "The recipe needs flour, sugar, eggs and",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n",
    "It was a dark and stormy night",
    "Monday, Tuesday, Wednesday,",
    "The cat sat on the mat. The dog sat on the",
    "Question: What is the largest planet? Answer:",
    "Thank you for your letter of",
]
STEPS = 20


def begun(model, prompts, **options):
    memory = model.make_memory(sequences=len(prompts), rollback=3, **options)
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, make_batch(prompts))
    return memory, loops.begin(BEST, memory, logits)[0]


def plain(model, memory, state):
    return jaxkv.decode(model.forward, BEST, model.weights, memory, state, steps=STEPS)[2].tokens


def guessing(model, draft, memory, state):
    run = partial(loops.speculate, model.forward, draft, BEST, model.weights, memory, state)
    return run(steps=STEPS)[3]


def drafts(kind, model, tokens):
    """Guesses looked up in the prompts, or those of the model with noise in its weights."""
    if kind == "lookup":
        return loops.lookup(tokens)
    noise = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: x + 0.02 * jnp.std(x) * noise.normal(size=x.shape).astype(x.dtype),
        model.weights,
    )
    own = model.make_memory(sequences=len(tokens), cells=1024)
    own, _ = jaxkv.prefill(model.forward, weights, own, make_batch(tokens))
    return loops.draft_model(model.forward, weights, own, texts=len(tokens))


@pytest.mark.parametrize(
    ("kind", "count"),
    mostly_nightly([("lookup", 20), ("model", 4), ("model", 20)], [("lookup", 20), ("model", 4)]),
)
def test_prompts_go_on_alike(smollm2, kind, count):
    tokens = [smollm2.tokenizer.prompt(prompt) for prompt in PROMPTS[:count]]
    memory, state = begun(smollm2, tokens, cells=1024)
    wanted = plain(smollm2, memory, state)
    made = guessing(smollm2, drafts(kind, smollm2, tokens), memory, state)
    np.testing.assert_array_equal(made.tokens, wanted)
    assert count < made.accepted.sum() < made.tried.sum()


@pytest.mark.parametrize(
    ("length", "count"),
    mostly_nightly([(None, 3), (530, 3), (None, 20), (530, 20)], [(None, 3), (530, 3)]),
)
def test_windows_take_back_what_was_guessed(gemma3, length, count):
    """With cells for the windows alone: before they wrap, and as they do."""
    prompts = [gemma3.tokenizer.prompt(prompt) for prompt in PROMPTS[:count]]
    tokens = [(prompt * (length or 1))[:length] for prompt in prompts]
    cells = len(tokens) * ((length or 32) + STEPS)
    memory, state = begun(gemma3, tokens, cells=cells, ubatch_size=64)
    wanted = plain(gemma3, memory, state)
    made = guessing(gemma3, loops.lookup(tokens), memory, state)
    np.testing.assert_array_equal(made.tokens, wanted)
    assert made.tried.sum() > 0
