"""Whatever JAX does to a verb, its answer is the same.

Op by op, compiled with traced ids and positions, over a batch of whole memories, in a loop: the
table comes out the same bit for bit, and buffers and outputs but for rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from tests.memories import SMALL, assert_identical, filled, over_kinds, run, think
from tests.twins import lived_in

pytestmark = pytest.mark.core


def everything(memory, seq, other, p0, p1):
    """Each verb and question, with one set of arguments."""
    moved = jaxkv.seq_add(memory, seq, p0, p1, other + 1)
    return {
        "seq_rm": jaxkv.seq_rm(memory, seq, p0, p1),
        "seq_rm of all": jaxkv.seq_rm(memory, -1, p0, p1),
        "seq_cp": jaxkv.seq_cp(memory, seq, other, p0, p1),
        "seq_keep": jaxkv.seq_keep(memory, seq),
        "seq_add": moved,
        "seq_div": jaxkv.seq_div(memory, seq, p0, p1, other + 1),
        "clear": jaxkv.clear(memory),
        "seq_pos_min": jaxkv.seq_pos_min(memory, seq),
        "seq_pos_max": jaxkv.seq_pos_max(memory, seq),
        "used": jaxkv.used(memory),
        "can_seq_rm": jaxkv.can_seq_rm(memory, seq, p0, p1),
        "can_resume": jaxkv.can_resume(memory, seq, p0),
        "check_invariants": jaxkv.check_invariants(memory),
        "init_update": jaxkv.init_update(moved),
        "defrag_plan": jaxkv.defrag_plan(memory),
        "go_back": jaxkv.go_back(jaxkv.split(moved)[0], memory),
    }


def arguments(kind):
    last = kind.sequences - 1
    return [(0, 1, 1, 3), (last, 0, -1, -1), (last // 2, last, 0, 0), (1, 1, 2, -1)]


compiled = jax.jit(everything)


@over_kinds
def test_compiled_with_traced_arguments_is_as_called(kind):
    memory = lived_in(kind)
    for args in arguments(kind):
        plain = everything(memory, *args)
        for name, result in compiled(memory, *args).items():
            assert_identical(result, plain[name]), name


def test_op_by_op_is_as_called():
    memory = lived_in(SMALL)
    args = (0, 1, 1, 3)
    plain = everything(memory, *args)
    with jax.disable_jit():
        for name, result in everything(memory, *args).items():
            assert_identical(result, plain[name]), name


@over_kinds
def test_vmap_over_whole_memories_is_a_loop(kind):
    memories = [lived_in(kind, seed) for seed in range(3)]
    args = arguments(kind)[:3]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    together = jax.jit(jax.vmap(everything))(stacked, *map(jnp.array, zip(*args, strict=True)))
    for i, (memory, one) in enumerate(zip(memories, args, strict=True)):
        alone = compiled(memory, *one)
        for name in alone:
            assert_identical(jax.tree.map(lambda x, i=i: x[i], together[name]), alone[name])


# ---------------------------------------------------------------- planning, and a step of a model


def decode(memory, tokens, sequences, valid):
    """One token for each sequence: plan, apply, compute."""
    ubatch, ok = jaxkv.plan_step(memory, tokens, sequences, valid)
    memory, logits = think(memory, ubatch)
    return memory, (logits, ok, ubatch.slots)


STEPS = (
    jnp.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]),
    jnp.array([[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]]),
    jnp.array([[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1]], bool),
)


def assert_close(one, other):
    """Integers are the same, floats but for rounding."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


def looped(memory):
    outs = []
    for step in zip(*STEPS, strict=True):
        memory, out = decode(memory, *step)
        outs.append(out)
    return memory, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)


def test_scan_is_unrolled():
    """The fourth step has two tokens too many: it is refused inside the loop as outside."""
    memory = filled(4)

    def body(memory, step):
        return decode(memory, *step)

    plain = looped(memory)
    assert plain[1][1].tolist() == [True, True, True, True]
    assert_close(jax.jit(lambda memory: jax.lax.scan(body, memory, STEPS))(memory), plain)
    full = filled(8)
    refused = looped(full)
    assert refused[1][1].tolist() == [True, False, True, False]
    assert_close(jax.jit(lambda memory: jax.lax.scan(body, memory, STEPS))(full), refused)


def test_vmap_of_a_step_is_a_loop():
    """Each memory has its own fill and its own tokens, and one of them is full."""
    memories = [filled(4), filled(3, 4), filled(4, 4, 3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *memories)
    steps = [tuple(x[i] for x in STEPS) for i in (0, 1, 3)]
    together = jax.jit(jax.vmap(decode))(stacked, *map(jnp.stack, zip(*steps, strict=True)))
    for i, (memory, step) in enumerate(zip(memories, steps, strict=True)):
        alone = decode(memory, *step)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), alone)
    assert together[1][1].tolist() == [True, True, False]


def test_planning_with_traced_tokens_ids_and_positions_is_as_called():
    @jax.jit
    def traced(memory, tokens, sequences, positions):
        batch = make_batch(tokens, sequences=sequences, positions=positions)
        return jaxkv.init_batch(memory, batch, ubatch_size=4)

    memory = filled(4, 3)
    ids, tokens = np.array([0, 1, 1, 2], np.int32), np.array([1, 2, 3, 4], np.int32)
    for positions in ([4, 3, 4, 0], [4, 3, 4, 100], [4, 4, 5, 0], [5, 3, 3, 0]):
        positions = np.array(positions, np.int32)
        batch = make_batch(tokens, sequences=ids, positions=positions)
        plain = jaxkv.init_batch(memory, batch, ubatch_size=4)
        plan = traced(memory, tokens, ids, positions)
        for name in ("ok", "reason", "fits", "expected", "found"):
            assert_identical(getattr(plan, name), getattr(plain, name))
        (one,), (other,) = plan.ubatches, plain.ubatches
        for name in ("tokens", "positions", "sequences", "slots", "valid", "after"):
            assert_identical(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("ubatch_size", [1, 4])
def test_ubatches_of_any_size_give_the_same(ubatch_size):
    tokens = [1, 2, 3, 4, 5, 6, 7]
    outputs = [True] * 7
    _, whole = run(filled(3), make_batch(tokens, outputs=outputs), ubatch_size=8)
    _, parts = run(filled(3), make_batch(tokens, outputs=outputs), ubatch_size=ubatch_size)
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)
