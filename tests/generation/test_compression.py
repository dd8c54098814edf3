"""Eviction rules of `docs/howto/compression.md` against loops of NumPy without a cache.

A token in a reference is a tuple of its position, its keys and its values in each layer. One
decision serves all heads and layers, so masses of heads and layers are added.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation
from tests.helpers.parametrize import mark_cases

LAYERS, HEADS, KV_HEADS, SIZE, VOCABULARY = 2, 4, 2, 8, 11
WIDTH = HEADS * SIZE
RANDOM = np.random.default_rng(7)
PARAMS = {
    "embed": RANDOM.normal(size=(VOCABULARY, WIDTH)) / 2,
    "q": RANDOM.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5 * 1.5,
    "kv": RANDOM.normal(size=(LAYERS, 2, WIDTH, KV_HEADS * SIZE)) / WIDTH**0.5 * 1.5,
    "out": RANDOM.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
}
WEIGHTS = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
PROMPTS = RANDOM.integers(VOCABULARY, size=(2, 20))
PROMPT, BUDGET, RECENT, SINKS, WINDOW, POOL = 20, 10, 4, 2, 5, 3


def forward(params, step):
    """The model of `Plain` in jaxkv; returns the mass of each layer, `[S, N]`."""
    x, masses = params["embed"][step.tokens], []
    rows = x.shape[:2]
    for layer in range(LAYERS):
        q = (x @ params["q"][layer]).reshape(*rows, HEADS, SIZE)
        k, v = ((x @ w).reshape(*rows, KV_HEADS, SIZE) for w in params["kv"][layer])
        step, out, mass = jaxkv.attend(step, layer, q, k, v, return_mass=True)
        masses.append(step.sum_by_stream(mass).sum(axis=1))
        x += jnp.tanh(out.reshape(*rows, WIDTH)) @ params["out"][layer]
    return step, x.reshape(-1, WIDTH)[step.outputs] @ params["embed"].T, tuple(masses)


class Plain:
    """A text in NumPy: for each layer, the tokens that are kept, as (position, key, value)."""

    def __init__(self):
        self.kept = [[] for _ in range(LAYERS)]
        self.length = 0

    def feed(self, tokens):
        """Attend from each token to the kept tokens; return logits, and masses by position."""
        masses, logits = [np.zeros(100) for _ in range(LAYERS)], []
        for token in tokens:
            x = PARAMS["embed"][token]
            for layer, kept in enumerate(self.kept):
                q = (x @ PARAMS["q"][layer]).reshape(HEADS, SIZE)
                k, v = (
                    np.repeat((x @ w).reshape(KV_HEADS, SIZE), HEADS // KV_HEADS, axis=0)
                    for w in PARAMS["kv"][layer]
                )
                kept.append((self.length, k, v))
                logit = np.array([(q * key).sum(axis=1) for _, key, _ in kept]) / SIZE**0.5
                weights = np.exp(logit - logit.max(axis=0))
                weights /= weights.sum(axis=0)
                for (position, _, _), weight in zip(kept, weights, strict=True):
                    masses[layer][position] += weight.sum()
                out = sum(
                    w[:, None] * value for w, (_, _, value) in zip(weights, kept, strict=True)
                )
                x = x + np.tanh(out.reshape(-1)) @ PARAMS["out"][layer]
            logits.append(x @ PARAMS["embed"].T)
            self.length += 1
        return np.array(logits), masses

    def keep(self, positions, layers=range(LAYERS)):
        for layer in layers:
            self.kept[layer] = [x for x in self.kept[layer] if x[0] in positions]

    def positions(self, layer=0):
        return [position for position, _, _ in self.kept[layer]]


# The rules of the page, and each rule in NumPy.


def keep_best(cache, score, budget, recent):
    position = cache.cell_positions()
    is_recent = position > cache.seq_pos_max()[:, None] - recent
    score = jnp.where(position < 0, -jnp.inf, jnp.where(is_recent, jnp.inf, score))
    rank = jnp.argsort(jnp.argsort(-score))
    return rank < budget


def streaming(cache, mass):
    del mass
    position = cache.cell_positions()
    last = cache.seq_pos_max()[:, None]
    return jaxkv.evict(cache, (position < SINKS) | (position > last - (BUDGET - SINKS))).cache


def h2o(cache, mass):
    cache = cache.with_fields(score=cache.fields["score"] + sum(mass))
    return jaxkv.evict(cache, keep_best(cache, cache.fields["score"], BUDGET, RECENT)).cache


def smooth(mass):
    return jax.lax.reduce_window(mass, -jnp.inf, jax.lax.max, (1, POOL), (1, 1), "SAME")


def snapkv(cache, mass):
    return jaxkv.evict(cache, keep_best(cache, smooth(sum(mass)), BUDGET, WINDOW)).cache


BUDGETS = 12, 7  # of the parts of a pyramid


def pyramidkv(cache, mass):
    masks = tuple(
        keep_best(part, smooth(of_layer), budget, WINDOW)
        for part, of_layer, budget in zip(cache.parts, mass, BUDGETS, strict=True)
    )
    return jaxkv.evict(cache, masks).cache


def best(scores, positions, budget, recent):
    """The last positions, and those of the highest scores."""
    last = positions[-1]
    ranked = sorted(positions, key=lambda p: -np.inf if p > last - recent else -scores[p])
    return set(ranked[:budget])


def smooth_plain(mass):
    side = POOL // 2
    return [mass[max(i - side, 0) : i + side + 1].max() for i in range(len(mass))]


class Rule:
    """A rule in NumPy, called after each step of a `Plain` text."""

    def __init__(self, name):
        self.name, self.score = name, np.zeros(100)

    def __call__(self, text, masses, is_prompt):
        positions = text.positions()
        if self.name == "streaming":
            last = positions[-1]
            text.keep({p for p in positions if p < SINKS or p > last - (BUDGET - SINKS)})
        elif self.name == "h2o":
            self.score += sum(masses)
            text.keep(best(self.score, positions, BUDGET, RECENT))
        elif is_prompt and self.name == "snapkv":
            text.keep(best(smooth_plain(sum(masses)), positions, BUDGET, WINDOW))
        elif is_prompt:
            for layer, budget in enumerate(BUDGETS):
                kept = best(smooth_plain(masses[layer]), positions, budget, WINDOW)
                text.keep(kept, [layer])


RULES = {"streaming": streaming, "h2o": h2o, "snapkv": snapkv, "pyramidkv": pyramidkv}
FAST = ["h2o", "pyramidkv"]


def make(name, **sizes):
    sizes = {"cells": 40, "sequences": 2, "streams": 2, **sizes}
    spec = jaxkv.CacheSpec.attention(LAYERS, KV_HEADS, SIZE, fields={"score": ((), "float32")})
    return jaxkv.make_cache(spec.group_layers([0], [1]) if name == "pyramidkv" else spec, **sizes)


def read_prompts(name, cache):
    """Read the prompts; a rule for prompts gets the masses of the last tokens alone."""
    if name in ("streaming", "h2o"):
        return jaxkv.prefill(forward, WEIGHTS, cache, PROMPTS.tolist(), edit=RULES[name])
    cache = jaxkv.prefill(forward, WEIGHTS, cache, PROMPTS[:, :-WINDOW].tolist()).cache
    return jaxkv.prefill(forward, WEIGHTS, cache, PROMPTS[:, -WINDOW:].tolist(), edit=RULES[name])


@pytest.mark.parametrize("name", mark_cases(RULES, FAST, core=[*RULES][::2]))
def test_rule_keeps_the_tokens_of_its_reference_at_every_step(name):
    done = read_prompts(name, make(name))
    cache, logits = done.cache, done.logits
    edit = RULES[name] if name in ("streaming", "h2o") else None
    texts, rules = [Plain(), Plain()], [Rule(name), Rule(name)]
    wanted = []
    for text, rule, prompt in zip(texts, rules, PROMPTS, strict=True):
        if name in ("snapkv", "pyramidkv"):
            text.feed(prompt[:-WINDOW])
            rows, masses = text.feed(prompt[-WINDOW:])
        else:
            rows, masses = text.feed(prompt)
        rule(text, masses, is_prompt=True)
        wanted.append(rows[-1])
    step = jax.jit(partial(generation.model_step, forward, edit=edit))
    tokens = []
    for _ in range(24):
        np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
        for layer, part in enumerate(cache.parts if name == "pyramidkv" else [cache]):
            rows = np.asarray(part.cell_positions())
            for text, row in zip(texts, rows, strict=True):
                assert sorted(row[row >= 0].tolist()) == text.positions(layer)
        tokens.append(np.argmax(wanted, axis=1))
        if name in ("streaming", "h2o"):
            assert len(texts[0].positions()) == BUDGET
        wanted = []
        for text, rule, token in zip(texts, rules, tokens[-1], strict=True):
            rows, masses = text.feed([token])
            rule(text, masses, is_prompt=False)
            wanted.append(rows[0])
        plan = jaxkv.plan_step(cache, tokens[-1].astype(np.int32))
        cache, logits = step(WEIGHTS, cache, plan.ubatch)
    assert step._cache_size() == 1
    if edit is None:
        state = generation.init_decode(done.cache, logits=done).state
        out = generation.decode(forward, WEIGHTS, done.cache, state, num_tokens=23).tokens
        np.testing.assert_array_equal(out, np.transpose(tokens)[:, 1:])
    else:
        out = jaxkv.generate(
            forward,
            WEIGHTS,
            PROMPTS.tolist(),
            cache=make(name),
            max_new_tokens=24,
            edit=edit,
        ).tokens
        np.testing.assert_array_equal(out, np.transpose(tokens))
