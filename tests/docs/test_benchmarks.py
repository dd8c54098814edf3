"""The caches that benchmarks compare with compute the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from benchmarks import by_hand
from tests.generation.tiny import load_tiny


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["BNKD", "BKND"])
def test_cache_by_hand_gives_the_same_logits(layout):
    model = load_tiny("llama_tied")
    c = model.config
    sizes = {"layers": len(c.windows), "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    buffers = by_hand.make(layout, batch=2, cells=8, **sizes)
    ours = model.make_cache(cells=8, sequences=2, streams=2)
    forward = jax.jit(model.forward)
    for position, token in enumerate(np.array([[1, 2], [3, 4], [5, 6]])):
        plan = jaxkv.plan_step(ours, jnp.asarray(token))
        assert plan.ok
        step, wanted = forward(model.params, jaxkv.apply(ours, plan))
        ours = step.cache
        theirs = by_hand.ByHand(layout, buffers, jnp.asarray(token), jnp.int32(position))
        with by_hand.replace_attend():
            theirs, found = model.forward(model.params, theirs)
        buffers = theirs.buffers
        np.testing.assert_allclose(found, wanted, atol=1e-5)
