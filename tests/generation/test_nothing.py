"""Calls with empty arguments return empty results or raise one sentence; none fails later."""

import functools
import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models.generate
import models.search
import models.serving
from jaxkv import CacheSpec, generation, make_batch, serving, snapshot
from jaxkv.ops.attention import attention
from jaxkv.serving import PrefixStore
from tests.generation.tiny import BEST, init_state, table_model
from tests.helpers.caches import attention_cache
from tests.helpers.mistakes import DATA, NAMES, assert_raises, mistakes

pytestmark = pytest.mark.core

NONE, FLAGS, EMPTY = np.zeros(0, np.int32), np.zeros(0, bool), make_batch([])
SIZES = dict(layers=1, kv_heads=1, head_dim=1, rope=None)
make = partial(attention_cache, cells=16, sequences=2, **SIZES)
MODEL = table_model, jnp.eye(16)
# These take no lists, or the result of a call above.
OTHERS = """attend clear evict extract insert rewind init_full init_update generate model_step
read_kv read_states save show warm_up write_kv write_states"""


@functools.cache
def prefill_prompt():
    """Sequence 0 of three tokens, and 1 of none."""
    return jaxkv.prefill(*MODEL, make(), make_batch([1, 2, 3])).cache


def with_source():
    source = CacheSpec.cross_attention(layers=1, kv_heads=1, head_dim=1)
    spec = CacheSpec.hybrid((CacheSpec.attention(**SIZES), [0]), (source, [1]))
    return jaxkv.make_cache(spec, cells=(16, 8), sequences=2)


def store():
    return PrefixStore(prefill_prompt(), sequences=[1])


def serve(requests):
    engine = serving.Engine(*MODEL, make())
    for request in requests:
        engine.submit(request)
    return [*engine.results()]


def attend_rows(rows, cells=3):
    keys = jnp.zeros((rows, 1, cells, 2))
    return attention(jnp.zeros((rows, 1, 1, 2)), keys, keys, jnp.ones((rows, 1, cells), bool))


def decode(m, texts=NONE, stop_tokens=()):
    options = dict(num_tokens=2, stop_tokens=stop_tokens)
    return jaxkv.decode(*MODEL, m, init_state(m, tokens=texts), **options)[2:4]


def speculate(m):
    options = dict(drafter=generation.prompt_lookup([]), num_tokens=2, sampler=BEST)
    return generation.speculate(*MODEL, m, init_state(m, tokens=NONE), **options)[2:7]


def beam(m, logits, width=1):
    return generation.beam(*MODEL, m, logits, num_beams=width, num_tokens=1)


@pytest.mark.parametrize(("call", "outcome"), mistakes("nothing"))
def test_calls_of_nothing_give_nothing_or_one_sentence(call, outcome):
    """For calls that do not raise, the shapes of all results are recorded."""
    names = NAMES | globals() | {"m": prefill_prompt(), "models": models}
    if outcome.startswith("["):
        assert [np.shape(x) for x in jax.tree.leaves(eval(call, names))] == eval(outcome)
    else:
        assert_raises(call, outcome, names)


def test_calls_of_nothing_are_all_that_are_public():
    """Their headings are the names of the called functions."""
    modules = jaxkv, generation, serving, snapshot
    public = [(name, getattr(one, name)) for one in modules for name in one.__all__]
    names = {name for name, one in public if inspect.isfunction(one)}
    called = re.findall(r"^# (\w+)$", (DATA / "nothing.txt").read_text(), re.M)
    assert names - {*called} == {*OTHERS.split()}
