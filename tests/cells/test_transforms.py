"""An edit's result is the same under each JAX transformation.

Op by op, compiled with traced ids and positions, under `vmap` over caches, in a loop: the table is
equal bit for bit, buffers and outputs up to rounding.
"""

import chex
import jax
import jax.numpy as jnp
import pytest

import jaxkv
from tests.helpers.caches import SMALL, assert_identical, fill_cache, run_ubatch
from tests.helpers.reference_caches import make_edited

pytestmark = pytest.mark.core


def apply_every_edit(cache, seq, other, p0, p1):
    moved = jaxkv.seq_add(cache, seq, p0, p1, delta=other + 1).cache
    return {
        "seq_rm": jaxkv.seq_rm(cache, seq, p0, p1),
        "seq_rm of all": jaxkv.seq_rm(cache, -1, p0, p1),
        "seq_cp": jaxkv.seq_cp(cache, seq, other, p0, p1).cache,
        "seq_keep": jaxkv.seq_keep(cache, seq).cache,
        "seq_add": moved,
        "seq_div": jaxkv.seq_div(cache, seq, p0, p1, divisor=other + 1).cache,
        "clear": jaxkv.clear(cache),
        "seq_pos_min": cache.seq_pos_min(seq),
        "seq_pos_max": cache.seq_pos_max(seq),
        "used": cache.num_used_cells(),
        "can_resume": cache.can_resume(seq, p0),
        "check_invariants": cache.check(),
        "update": jaxkv.apply(moved, jaxkv.init_update(moved)),
        "defrag": jaxkv.apply(cache, jaxkv.defrag_plan(cache)),
        "rewind": jaxkv.rewind(cache, to=moved.table),
    }


def stack_trees(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def item(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def test_edits_under_jit_and_vmap_equal_calls():
    caches, last = [make_edited(SMALL, seed) for seed in range(3)], SMALL.sequences - 1
    args = [(0, 1, 1, 3), (last, 0, -1, -1), (last // 2, last, 0, 0)]
    compiled, mapped = jax.jit(apply_every_edit), jax.jit(jax.vmap(apply_every_edit))
    together = mapped(stack_trees(caches), *map(jnp.array, zip(*args, strict=True)))
    for i, (cache, one) in enumerate(zip(caches, args, strict=True)):
        wanted, traced = apply_every_edit(cache, *one), compiled(cache, *one)
        assert_identical(traced, wanted)
        assert_identical(item(together, i), wanted)


@pytest.mark.nightly
def test_edits_without_jit_equal_calls():
    args = (make_edited(SMALL), 0, 1, 1, 3)
    with jax.disable_jit():
        plain = apply_every_edit(*args)
    assert_identical(plain, apply_every_edit(*args))


def test_plan_with_positions_without_jit_equals_plan():
    batch = jaxkv.make_batch([[1, 2], [3]], sequences=[0, 1], positions=[0, 1, 0])
    cache = jaxkv.clear(make_edited(SMALL))
    with jax.disable_jit():
        plain = jaxkv.init_batch(cache, batch)
    assert_identical(plain, jaxkv.init_batch(cache, batch))


def decode(cache, step):
    tokens, sequences, active = step
    plan = jaxkv.plan_step(cache, tokens, sequences=sequences, active=active)
    cache, logits = run_ubatch(cache, plan.ubatch)
    return cache, (logits, plan.ok, plan.ubatch.slots)


STEPS = (
    jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]),
    jnp.array([[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]]),
    jnp.array([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1]], bool),
)


def test_plan_step_under_scan_and_vmap_equals_a_loop():
    """The caches have different lengths; one is full: its second and fourth step are refused."""
    caches = [fill_cache(4), fill_cache(3, 4), fill_cache(8)]

    def scanned(cache):
        return jax.lax.scan(decode, cache, STEPS)

    together, granted = jax.jit(jax.vmap(scanned))(stack_trees(caches)), []
    for i, cache in enumerate(caches):
        outs = []
        for step in zip(*STEPS, strict=True):
            cache, out = decode(cache, step)
            outs.append(out)
        chex.assert_trees_all_close(
            item(together, i), (cache, stack_trees(outs)), rtol=1e-4, atol=1e-5
        )
        granted.append(jnp.stack([ok for _, ok, _ in outs]).tolist())
    assert granted[0] == [True] * 4 and granted[2] == [True, False, True, False]
