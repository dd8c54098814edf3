"""Going back in recurrent memories: cuts to a state that was kept, undone steps, kept memories.

See `tests.histories` for the model whose states name all the tokens that they have seen.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.cases import in_lanes
from tests.histories import (
    bytes_of,
    kept_of,
    make,
    planned,
    positions_of,
    states_of,
    tell,
    told,
    walk,
)
from tests.memories import WIDTH, assert_identical, plan_rows

core = pytest.mark.core
HYBRID = {"kinds": "ra", "window": jaxkv.window.sliding(4)}
alone_or_beside_attention = pytest.mark.parametrize(
    "options",
    [pytest.param({"kinds": "rr"}, marks=core), pytest.param(HYBRID, marks=pytest.mark.nightly)],
)

# ---------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("kept", in_lanes([0, 1, 3], fast=[3]))
def test_seq_rm_rollback_is_exact_or_refused(kept):
    """Traps 62 to 65: after batches of every length, single steps too, and after another cut."""
    twin, states = told(kept=kept, counts=(8,)), kept + 1
    for count, back in product(sorted({1, 2, kept + 1, kept + 4}), range(kept + 3)):
        assert twin.decode([0] * count)
        states = min(kept + 1, states + count)
        for cut in (back, 1):
            end = jaxkv.seq_pos_max(twin.memory, 0).item() + 1
            granted = twin.seq_rm(0, end - cut)
            assert granted == (cut < states)
            states, end = (states - cut, end - cut) if granted else (states, end)
            assert positions_of(twin.memory) == [*range(end - states, end)]
            twin.compare()


@core
def test_seq_pos_min_of_hybrid_is_where_it_can_be_cut():
    """Trap 86."""
    twin = told(kept=1, counts=(10,), kinds="ar")
    assert jaxkv.seq_pos_min(twin.memory, 0) == 8 and jaxkv.seq_pos_max(twin.memory, 0) == 9
    assert twin.seq_rm(0, 9) and not twin.seq_rm(0, 8)
    twin.compare()


@core
def test_seq_rm_before_the_first_position_is_refused():
    """A sequence may begin anywhere, and its first state is the first that can be returned to."""
    tokens, places = np.full((3, WIDTH), 5), np.broadcast_to(np.arange(WIDTH), (3, WIDTH))
    valid = (places < 3) & (np.arange(3) == 0)[:, None]
    (ubatch,) = plan_rows(make(3), tokens, valid, places + 100).check().ubatches
    memory, _ = walk(make(3), ubatch)
    assert positions_of(memory) == [100, 101, 102]
    assert not jaxkv.seq_rm(memory, 0, 50)[1] and jaxkv.seq_rm(memory, 0, 101)[1]
    assert states_of(tell(memory, [4]))[-1] == (103, bytes_of([5, 5, 5, 4], (0, 1)))


# ------------------------------------------------------------------------------------ steps undone


@alone_or_beside_attention
def test_go_back_after_an_abort_is_exact_or_refused(options):
    """Traps 71 and 72; and the memory before is a value."""
    twin = told(kept=1, counts=(3, 2, 0), **options)
    past = twin.fork()
    plan, parts = twin.plan([0] * 11, in_parts=True)
    for ubatch, part in [*zip(plan.ubatches, parts, strict=True)][:2]:
        assert twin.step(ubatch, part)
        twin.compare()
        failed = twin.fork()
        twin.go_back(past)
        twin.compare()
        twin.return_to(failed)
    twin.return_to(past)
    assert twin.decode([0] * 5 + [1] * 3)
    twin.compare()


@partial(jax.jit, donate_argnames="buffers", static_argnames="kinds")
def step(table, buffers, ubatch, kinds):
    """Only the buffers are donated, so the caller keeps the old table."""
    memory, _ = walk(jaxkv.join(table, buffers), ubatch, kinds)
    return jaxkv.split(memory)


@core
def test_go_back_with_donated_buffers_finds_shared_states():
    """Trap 71: states that a second sequence holds are never written over."""
    twin = told(kept=1, counts=(3, 0, 0), kinds="ar")
    alone = jaxkv.split(twin.memory)[0]
    twin.both("seq_cp", 0, [2])
    known = kept_of(*twin.parts()[:2])
    table, buffers = jaxkv.split(jax.tree.map(jnp.copy, twin.memory))
    old = table
    plan, _ = twin.plan([0] * 11, in_parts=True)
    for ubatch in plan.ubatches:
        table, buffers = step(table, buffers, ubatch, "ar")
    twin.memory, ok = jaxkv.go_back(old, jaxkv.join(table, buffers))
    assert ok
    assert kept_of(*twin.parts()[:2]) == known
    _, ok = jaxkv.go_back(alone, jaxkv.join(table, buffers))
    assert ok  # the same cells: what is shared is there for all


def test_go_back_then_the_same_step_gives_the_same():
    memory = tell(make(3), [1, 2])
    ubatch = planned(memory, [3])
    later, passed = walk(memory, ubatch)
    back, ok = jaxkv.go_back(jaxkv.split(memory)[0], later)
    assert ok
    assert_identical(jaxkv.apply(back, ubatch), back)  # what was written since is known: stale
    again, same = walk(back, planned(back, [3]))
    assert_identical(same, passed)
    assert states_of(again) == states_of(later)


@core
def test_go_back_ignores_writes_in_other_streams():
    memory = tell(make(3, streams=3), [1, 2])
    back, ok = jaxkv.go_back(jaxkv.split(memory)[0], tell(memory, [], [3]))
    assert ok
    assert states_of(back) == states_of(memory) and positions_of(back) == [0, 1]


# -------------------------------------------------------------------------- memories that are kept


@partial(jax.jit, donate_argnames="memory", static_argnames="kinds")
def consume(memory, ubatch, kinds="rr"):
    """The whole memory is donated, as most loops do it."""
    return walk(memory, ubatch, kinds)[0]


@alone_or_beside_attention
def test_a_kept_memory_goes_on_as_if_nothing_came_between(options):
    """Also trap 90: no edit of a memory that came of another is seen in that one."""
    kinds = options["kinds"]
    checkpoint, other = (told(kept=1, counts=(3, 2, 0), **options).memory for _ in range(2))
    wanted = tell(other, [50, 51], [60], kinds=kinds)
    memory, ok = jaxkv.seq_rm(checkpoint, 0, 2)
    assert ok
    memory = tell(jaxkv.seq_cp(memory, 0, 2), [70], [], [71], kinds=kinds)
    for token in (72, 73):  # what a step without donation returned may be donated
        memory = consume(memory, planned(memory, [token]), kinds)
    assert_identical(tell(checkpoint, [50, 51], [60], kinds=kinds), wanted)
    copied, ubatch = jax.tree.map(jnp.copy, checkpoint), planned(checkpoint, [50, 51], [60])
    assert_identical(consume(copied, ubatch, kinds), wanted)
    assert_identical(tell(checkpoint, [50, 51], [60], kinds=kinds), wanted)
    forked = jaxkv.seq_cp(checkpoint, 0, 2)  # it has the same buffers
    consume(forked, planned(forked, [80]), kinds)
    assert all(x.is_deleted() for x in jax.tree.leaves(jaxkv.split(checkpoint)[1]))
