"""A store on a mesh: what is forked, copied and let go of is what it is on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from jaxkv import prefix
from jaxkv.loops.batching import Engine, Request
from models.compiling import counting
from tests.cases import mostly_nightly
from tests.meshes import mesh_of, placed
from tests.sharding.test_sharding_loops import AXES, KINDS, model_of, whole

HOLDERS = [1, 3]


def weights():
    return jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)), jnp.float32)


def by_hand(layers, make, place):
    """A prefix that another stream may hold, what follows it, and what is left when it goes."""
    forward, memory = model_of(layers), place(make())
    store = prefix.make_store(memory, holders=HOLDERS)
    run = dict(forward=forward, weights=whole(weights()))
    memory, _ = jaxkv.prefill(**run, memory=memory, batch=jaxkv.make_batch([1, 2, 3, 4]))
    memory, store, miss = prefix.remember(memory, store, [1, 2, 3, 4], 0)
    seen = [miss, prefix.held(memory, store)]
    for seq in (0, 2):
        memory, store, found = prefix.reuse(memory, store, [1, 2, 3, 4, 5, 6], seq)
        batch = jaxkv.make_batch([5, 6], sequences=seq)
        memory, logits = jaxkv.prefill(**run, memory=memory, batch=batch)
        seen += [found, np.asarray(logits)]
    memory, store = prefix.evict(memory, store, cells=0)
    return [*seen, jaxkv.used(memory).item()]


def by_engine(layers, make, place):
    """Requests that begin alike, and nothing compiled after the warm-up."""
    forward, memory = model_of(layers), place(make())
    store = prefix.make_store(memory, holders=HOLDERS)
    options = dict(chunk=8, steps=2, allow=(), store=store)
    engine = Engine(forward, whole(weights()), memory, **options)
    engine.warm_up()
    found = []
    with counting() as compiled:
        for last in ([], [5], [5, 6], [7]):
            engine.submit(Request(prompt=[1, 2, 3, 4, *last], limit=2))
            (result,) = engine.results()
            found.append((result.found, result.tokens.tolist()))
        assert compiled() == 0
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("kind", mostly_nightly(KINDS, few=["hybrid"]))
@pytest.mark.parametrize(
    ("way", "mode"),
    [(by_hand, AxisType.Auto), (by_engine, AxisType.Explicit)],
    ids=["by hand, auto", "engine, explicit"],
)
def test_a_store_on_a_mesh(way, kind, mode):
    wanted = way(*KINDS[kind], lambda memory: memory)
    with jax.set_mesh(mesh_of(mode, **AXES)):
        got = way(*KINDS[kind], placed)
    for one, other in zip(got, wanted, strict=True):
        if isinstance(other, np.ndarray):
            np.testing.assert_allclose(one, other, atol=1e-4)
        else:
            assert one == other
