"""Tiny models for tests of loops, and helpers that read their results."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from jaxkv import generation, make_batch
from jaxkv.generation.filters import make_sampler
from tests.helpers.caches import attention_cache, run_model

DATA = Path(__file__).parent.parent / "data"
BEST = make_sampler()
CLOSE = dict(rtol=0, atol=2e-4)
CHANCES = np.random.default_rng(1).dirichlet(np.ones(4), size=(2, 4)).astype(np.float32)

load_tiny = functools.cache(lambda name: models.load(DATA / name))


def forward(params, step):
    del params
    return run_model(step)


def table_model(params, step):
    """Return log-probabilities of the next token from a table, `[4, 4]`."""
    x = jnp.zeros((*step.valid.shape, 1, 1))
    step, _ = jaxkv.attend(step, 0, x, x, x)
    return step, jnp.log(params)[step.tokens.reshape(-1)[step.outputs]]


def init_state(cache, **options):
    return generation.init_decode(cache, **options).state


def decode(cache, state, stop_tokens=(), *, num_tokens, sampler=BEST, **options):
    options |= dict(num_tokens=num_tokens, sampler=sampler, stop_tokens=stop_tokens)
    return jaxkv.decode(forward, None, cache, state, **options)


def speculate(drafter, cache, state, stop_tokens=(), *, num_tokens, sampler=BEST, **options):
    options |= dict(num_tokens=num_tokens, sampler=sampler, stop_tokens=stop_tokens)
    return generation.speculate(forward, None, cache, state, drafter=drafter, **options)


def run_once(forward, params, make, tokens, features=None, *, length=32):
    """Logits and features of all tokens, computed at once, with padding, in an empty cache."""
    count, padded = len(tokens), np.zeros((1, length), np.int32)
    padded[0, :count] = tokens
    if features is not None:
        features = jnp.pad(jnp.stack(features), ((0, length - count), (0, 0)))[None]
    found = run_padded(forward, make, params, padded, count, features)
    return [np.asarray(x)[:count] for x in found]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_padded(forward, make, params, tokens, count, features):
    valid = (jnp.arange(tokens.shape[1]) < count)[None]
    extra = None if features is None else {"features": features}
    batch = make_batch(tokens, valid=valid, outputs=valid, extra=extra)
    cache = make(cells=tokens.shape[1])
    plan = jaxkv.init_batch(cache, batch)
    _, *found = forward(params, jaxkv.apply(cache, plan.ubatches[0]))
    return [plan.gather_outputs([x]) for x in found]


def speculate_plainly(model, head, prompt, *, count, draft):
    """Tokens and counts of a greedy loop that computes model and head on whole texts.

    Both functions return the logits and features of all tokens; the head also gets features.
    """
    tokens, steps, drafted, accepted = [*prompt, int(model(prompt)[0][-1].argmax())], 0, 0, 0
    while (room := count - (len(tokens) - len(prompt))) > 0:
        text, features, guesses = tokens[1:], list(model(tokens[:-1])[1]), []
        while len(guesses) < min(draft, room - 1):
            logits, own = head(text, features)
            guesses.append(int(logits[-1].argmax()))
            text, features = [*text, guesses[-1]], [*features, own[-1]]
        best = model([*tokens, *guesses])[0].argmax(axis=1)[len(tokens) - 1 :].tolist()
        num_right = next((i for i, g in enumerate(guesses) if g != best[i]), len(guesses))
        tokens += best[: num_right + 1]
        steps, drafted, accepted = steps + 1, drafted + len(guesses), accepted + num_right
    return tokens[len(prompt) :], [steps, drafted, accepted]


def allow_parity(state):
    return jnp.arange(5) % 2 == state


def flip_parity(state, token):
    return 1 - token % 2


def table_cache(texts, *, each=1):
    """A cache of `table_model` in which each text has a stream of `each` sequences, and a token."""
    sizes = dict(cells=16, sequences=each * texts, streams=texts)
    cache = attention_cache(layers=1, kv_heads=1, head_dim=1, **sizes)
    batch = make_batch([[0]] * texts, sequences=np.arange(0, each * texts, each))
    return jaxkv.prefill(table_model, CHANCES[0], cache, batch)[0]


def last_of(cache, sequences):
    return cache.seq_pos_max(sequences).tolist()


def list_texts(made):
    return [row[row >= 0].tolist() for row in np.asarray(made.tokens)]


def assert_sound(cache):
    assert not sum(map(int, cache.check().values()))


def assert_chances(found, count, temperature=1.0):
    """Compare counted texts of three tokens, `[4, 4, 4]`, with `table_model`: a chi-square test."""
    chances = CHANCES[0] ** (1 / temperature)
    chances = chances / chances.sum(axis=1, keepdims=True)
    wanted = count * chances[0][:, None, None] * chances[:, :, None] * chances[None]
    assert found.sum() == count
    statistic = ((found - wanted) ** 2 / wanted).sum()
    assert statistic < 106  # the 99.95 % point of 63 degrees of freedom is 106.4
