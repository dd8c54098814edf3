"""Recurrent caches, single and hybrid: forks, cuts, undone steps, and ubatches.

Every state names all its tokens (`tests.helpers.edit_sequences`), which detects states that are
stale, of another sequence or partly written. `test_every_argument` and `test_stateful` compare the
ranges of edits with oracles.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import Reason, make_batch
from jaxkv.cache import merge, split
from jaxkv.core.hashing import chain_hashes, hash_contents
from jaxkv.hybrid import compose_hybrid_cache
from tests.helpers import edit_sequences
from tests.helpers.caches import WIDTH, assert_identical, attention_cache, contents_of, plan_rows
from tests.helpers.edit_sequences import (
    list_states,
    make,
    make_filled_twin,
    plan_tokens,
    run_rows,
    run_ubatch,
    state_bytes,
)
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan

pytestmark = pytest.mark.core

HYBRID = {"kinds": "ra", "window": jaxkv.Window.sliding(4)}


@pytest.mark.parametrize("kept", mark_cases([0, 1, 3], [3]))
def test_seq_rm_rollback_is_exact_or_refused(kept):  # traps 63, 64, 65
    """Traps 62 to 65: after batches of every length, single steps too, and after another cut."""
    twin, states = make_filled_twin(kept=kept, counts=(8,)), kept + 1
    for count, back in product(sorted({1, 2, kept + 1, kept + 4}), range(kept + 3)):
        assert twin.decode([0] * count)
        states = min(kept + 1, states + count)
        for cut in (back, 1):
            end = twin.cache.seq_pos_max(0).item() + 1
            granted = twin.seq_rm(0, end - cut)
            assert granted == (cut < states)
            states, end = (states - cut, end - cut) if granted else (states, end)
            assert [at for at, _ in list_states(twin.cache)] == [*range(end - states, end)]
            twin.compare()


def test_version_does_not_depend_on_the_number_of_rows():
    """Rows of traced tokens are padded to all sequences, and so are rows on a mesh."""
    spec = jaxkv.CacheSpec.recurrent(layers=1, states={"x": ((), jnp.float32)})
    cache = jaxkv.make_cache(spec, sequences=4, max_rollback=1)
    token, is_last = jnp.full((4, 1), 7, jnp.int32), jnp.arange(4)[:, None] == 3
    plans = jaxkv.init_batch(cache, make_batch([7], sequences=3)), plan_rows(cache, token, is_last)
    steps = [jaxkv.apply(cache, plan.ubatch) for plan in plans]
    assert [step.valid.shape for step in steps] == [(1, 1), (4, 1)]
    assert_identical(*(step.table for step in steps))


def test_edits_of_hybrid_change_all_parts_or_none():
    twin = make_filled_twin(kept=1, counts=(6, 0), kinds="ar")
    cache, far = twin.cache, 2**31 - 1 - 3  # states after positions 4 and 5
    for after in (
        jax.jit(jaxkv.seq_rm)(cache, 0, 3)[0],
        jaxkv.seq_add(cache, 0, 0, 4, delta=far).cache,
        jaxkv.seq_add(cache, 0, 0, 4, delta=9).cache,  # the last positions would differ
        jaxkv.seq_add(cache, 0, 0, 4, delta=10).cache,  # the last position of one part only
    ):
        assert_identical(after, cache)
    assert not cache.can_seq_add(0, 0, 4, delta=far)
    after, ok = jax.jit(jaxkv.seq_rm)(cache, 0, 5)
    assert ok and twin.seq_rm(0, 5)
    assert_identical(after, twin.cache)


def test_rewind_after_an_abort_is_exact_or_refused():  # trap 74
    """Traps 71 and 72; the earlier cache is unchanged."""
    twin = make_filled_twin(kept=1, counts=(3, 2, 0), **HYBRID)
    past = twin.fork()
    plan, parts = twin.plan([0] * 11, in_parts=True)
    for ubatch, part in [*zip(plan.ubatches, parts, strict=True)][:2]:
        assert twin.step(ubatch, part)
        twin.compare()
        failed = twin.fork()
        twin.rewind(past)
        twin.compare()
        twin.return_to(failed)
    twin.return_to(past)
    assert twin.decode([0] * 5 + [1] * 3)
    twin.compare()


@partial(jax.jit, donate_argnames="cache")
def run_donated(cache, ubatch):
    """Walk with the whole cache donated, as in most loops."""
    return run_ubatch(cache, ubatch, HYBRID["kinds"])[0]


def test_a_kept_cache_goes_on_as_if_nothing_came_between():
    """Trap 90: a cache does not change with edits of a cache derived from it."""
    says = partial(run_rows, kinds=HYBRID["kinds"])
    checkpoint, other = (make_filled_twin(1, (3, 2, 0), **HYBRID).cache for _ in range(2))
    wanted = says(other, [50, 51], [60])
    cache, ok = jaxkv.seq_rm(checkpoint, 0, 2)
    assert ok
    cache = says(jaxkv.seq_cp(cache, 0, 2).cache, [70], [], [71])
    for token in (72, 73):  # the result of a step without donation may be donated
        cache = run_donated(cache, plan_tokens(cache, [token]))
    copied, ubatch = jax.tree.map(jnp.copy, checkpoint), plan_tokens(checkpoint, [50, 51], [60])
    assert_identical(run_donated(copied, ubatch), wanted)
    assert_identical(says(checkpoint, [50, 51], [60]), wanted)
    forked = jaxkv.seq_cp(checkpoint, 0, 2).cache  # it has the same buffers
    run_donated(forked, plan_tokens(forked, [80]))
    assert all(x.is_deleted() for x in jax.tree.leaves(checkpoint.buffers))


def test_read_states_of_a_stale_ubatch_is_nan():
    cache = run_rows(make(3), [1, 2])
    later = run_rows(cache, [4])
    step = jaxkv.apply(later, plan_tokens(cache, [3]))
    for layer in range(2):
        states = jaxkv.read_states(step, layer)
        assert np.isnan(states["trace"][0]).all() and states["hash"][0] == 0  # the lowest integer
        written = {n: jnp.repeat(x[:, None], 4, axis=1) for n, x in states.items()}
        step = jaxkv.write_states(step, layer, written)
    assert_identical(step.cache, later)


def test_read_states_of_a_refused_plan_is_zero():
    """Also for sequences that have a state."""
    cache, tokens = run_rows(make(3), [1, 2], [3]), np.full((3, WIDTH), 4)
    valid = np.arange(WIDTH) < [[1], [1], [0]]
    plan = plan_rows(cache, tokens, valid, tokens + 5)
    assert plan.reason.tolist() == [Reason.NOT_CONTIGUOUS, Reason.NOT_CONTIGUOUS, Reason.OK]
    _, passed = run_ubatch(cache, plan.ubatches[0])
    assert not any(np.any(x[:, 0]) for x in jax.tree.leaves(passed))


def test_init_batch_two_rows_of_one_sequence_is_refused():
    """In a cache of one sequence, where rows name no stream."""
    cache, rows = make(1, sequences=1), jnp.zeros((2, 2), jnp.int32)
    plan = jax.jit(lambda m, t: jaxkv.init_batch(m, make_batch(t, sequences=0)))(cache, rows)
    assert not plan.ok and plan.reason[0] == Reason.MIXED_ROW
    assert_identical(apply_plan(cache, plan), cache)


def test_read_states_of_a_new_sequence_ignores_old_bytes():
    """Trap 94: a fresh state is selected, not multiplied by zero."""
    table, buffers = split(make(3))
    for number in (np.nan, np.inf):
        poison = [dict(layer, trace=jnp.full_like(layer["trace"], number)) for layer in buffers]
        cache = run_rows(merge(table, tuple(poison)), [1, 2, 3])
        wanted = [(p, state_bytes([1, 2, 3][: p + 1], (0, 1))) for p in range(3)]
        assert list_states(cache) == wanted
    cache = run_rows(make(0), [1], [2], [3])  # no cell is unused
    cache = run_rows(jaxkv.seq_rm(cache, 0)[0], [4])
    assert list_states(cache) == [(0, state_bytes([4], (0, 1)))]


def test_read_states_after_a_write_while_a_cell_is_empty_reads_the_same():
    """An empty cell is used before the cell of a freed state."""
    cache = run_rows(make(0), [1, 2])
    ubatch = plan_tokens(cache, [3])
    states = jaxkv.read_states(jaxkv.apply(cache, ubatch), 0)
    full = run_rows(cache, [], [4], [5])  # no cell is empty
    assert_identical(states, jaxkv.read_states(jaxkv.apply(full, plan_tokens(full, [3])), 0))


def test_content_of_a_copied_state_is_the_sum_of_its_tokens():
    cache = jaxkv.seq_cp(run_rows(make(3, streams=3), [1, 2, 3]), 0, 2).cache
    hashes = chain_hashes(hash_contents(jnp.array([1, 2, 3]), None), jnp.arange(3))
    total = jnp.full(3, jnp.sum(hashes, dtype=jnp.uint32))
    _, same = cache.table.compare_last_tokens(jnp.arange(3), total)
    assert same.tolist() == [True, False, True]
    assert cache.table.cell[2].tolist() == [4, 1, 2, 3]  # each state has a cell of its own
    cache = run_rows(make(0, sequences=6, streams=2), [1], [2], [3])  # no copy is necessary
    shared = jax.jit(jaxkv.seq_cp)(cache, 0, 1).cache
    assert_identical(shared.table.content, cache.table.content)


def test_steps_to_keep_skips_holes_in_a_row():
    cache = make(3)
    tokens, valid = np.zeros((3, WIDTH), int), np.zeros((3, WIDTH), bool)
    valid[0, [1, 3, 4, 7]] = valid[1, 6] = True
    (ubatch,) = plan_rows(cache, tokens, valid).check().ubatches
    assert ubatch.state_write_steps(3).tolist() == [[2, 3, 4], [0, 0, 1], [0, 0, 0]]
    table = apply_plan(cache, ubatch).table
    assert table.position.tolist() == [[0, 1, 2, 3], [-1, -1, -1, 0], [-1] * 4]
    stamps = np.asarray(table.stamp)[0]
    assert len(set(stamps[table.cell[0]].tolist())) == 4 and np.all(stamps[table.cell[0]])


def test_write_states_passes_gradients():
    step = start_step(make(0))

    def loss(x):
        state = jaxkv.read_states(step, 0)
        new = {"hash": state["hash"], "trace": state["trace"] * 3 + x}
        return jnp.sum(jaxkv.write_states(step, 0, new).buffers[0]["trace"] ** 2)

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(jnp.ones((1, 2))), [[2.0, 2.0]])


def test_compose_hybrids_finds_each_layer():
    sizes = {"cells": 16, "kv_heads": 2, "head_dim": 4, "sequences": 3}
    full = attention_cache(layers=1, **sizes)
    window = attention_cache(layers=1, window=jaxkv.Window.sliding(4), **sizes)
    inner = compose_hybrid_cache((full, (0,)), (window, (1,)))
    cache = compose_hybrid_cache((inner, (1, 0)), (make(1, layers=1), (1,)))
    assert cache.num_rollback_states(1) == 1
    cache = run_rows(cache, [1, 2, 3], [4], kinds="ab")
    inner, states = cache.parts
    assert edit_sequences.stored_states(states)[0][-1] == (2, state_bytes([1, 2, 3], [1]))
    for part, layer in zip(inner.parts, (1, 0), strict=True):
        assert len(contents_of(part.buffers, [layer])) == 4
    with pytest.raises(ValueError, match="one of the recurrent layers .1., got 0"):
        cache.num_rollback_states(0)
    assert "part 1, layers 1\nsequence 0 1 2\nsequence 1 . 0\n" in jaxkv.show(cache)


def start_step(cache):
    return jaxkv.apply(cache, plan_tokens(cache, [1]))


def read_states_of_step(cache, layer=0):
    return jaxkv.read_states(start_step(cache), layer)


def write_states_of_step(cache, layer=0, **changed):
    states = {"hash": np.zeros((3, 4), np.uint32), "trace": np.zeros((3, 4, 2))}
    return jaxkv.write_states(start_step(cache), layer, states | changed)


@pytest.mark.parametrize(("call", "outcome"), mistakes("states"))
def test_states_bad_call_raises(call, outcome):
    assert_raises(call, outcome, globals())
