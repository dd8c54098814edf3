"""Caches on meshes: the same values as on one device."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.tree_util import Partial

import jaxkv
from jaxkv import Reason, sharding
from jaxkv.cache import merge
from jaxkv.sharding.make import make_sharded
from models.compiling import counting
from tests.attention.formula import slope
from tests.cells import state_machine
from tests.cells.test_stateful import run_machine
from tests.helpers import edit_sequences
from tests.helpers.caches import LAYERS, Kind, assert_identical, attend_signed, attention_cache
from tests.helpers.meshes import DATA_CELLS, KINDS, RULES, mesh_of, near, place_on_mesh
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases
from tests.sharding import tiny
from tests.sharding.tiny import assert_close


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_edits_on_mesh_match_oracle(kind):
    """Tokens of several sequences have no rows, so they compile more programs."""
    sets = kind.name in ("window", "striped-window")
    options = dict(counts=(3, 7), moves=(2, 2), sets=sets, in_rows=kind.streams > 1 and not sets)
    with jax.set_mesh(mesh_of(**dict(kind.axes))):
        run_machine(lambda: state_machine.AttentionMachine(kind, **options), runs=10, steps=20)


class StateVerbs(state_machine.StateMachine):
    def __init__(self, options):
        super().__init__(options)
        self.twin.cache = place_on_mesh(self.twin.cache)
        self.past = self.twin.fork()


STATES = {
    "recurrent": (dict(kinds="rr", kept=1, streams=4), dict(data=4)),
    "hybrid": (dict(kinds="ar", kept=2, streams=2, cells=12), dict(data=2, tensor=2)),
    "hybrid with a window": (dict(kinds="rb", kept=1, streams=4, cells=8, window=near), DATA_CELLS),
}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STATES)
def test_random_edits_of_states_on_mesh_match_oracle(name):
    options, axes = STATES[name]
    with jax.set_mesh(mesh_of(**axes)):
        run_machine(lambda: StateVerbs(dict(sequences=4) | options), runs=6, steps=30)


@pytest.mark.core
def test_seq_rm_on_mesh_from_the_first_position_removes_a_copied_recurrent_sequence():
    with jax.set_mesh(mesh_of(data=2)):
        twin = edit_sequences.Twin("r", kept=1, sequences=4, streams=2)
        twin.cache = place_on_mesh(twin.cache)
        assert twin.decode([0] * 3, positions=[5, 6, 7])
        assert twin.edit("seq_cp", 0, [2])  # in the stream of the other device
        twin.compare()
        assert not twin.seq_rm(2, 6, -1) and twin.seq_rm(2, 5, -1)
        twin.compare()


MODES = [
    (AxisType.Explicit, 2, {"data": 2, "tensor": 2, "cells": 2}),
    (AxisType.Auto, 4, {"data": 4, "tensor": 2}),
    (AxisType.Explicit, 1, {"cells": 4, "tensor": 2}),
]


def run_edits(params, cache):
    """A cache after prompts, edits of every kind, and a step of all sequences; and all logits."""
    forward = tiny.model_of("aa")
    prompts = jaxkv.make_batch([[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]])
    cache, first, *_ = jaxkv.prefill(forward, params, cache, prompts, ubatch_size=8)
    later, _ = jaxkv.seq_rm(cache, 1)
    cache, ok = jaxkv.rewind(later, to=cache.table)
    cache = jaxkv.seq_cp(jaxkv.seq_cp(cache, 0, 1, 0, 2).cache, 2, 0).cache
    cache, _ = jaxkv.seq_rm(cache, [0, 2], [1, 0], [2, 1])
    cache = jaxkv.seq_add(cache, 0, 2, -1, delta=-1).cache
    cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    cache = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
    cache = jaxkv.seq_select(cache, [3, 2], [2, 3]).cache
    plan = jaxkv.plan_step(cache, jnp.arange(4), sequences=jnp.array([3, 1, 0, 2]))
    ubatch, granted = plan.ubatch, plan.ok
    assert ok and granted
    step, logits = jax.jit(forward)(params, jaxkv.apply(cache, ubatch))
    return step.cache, logits, first


@pytest.mark.parametrize("mode, streams, axes", mark_cases(MODES, core=MODES[:1]), ids=str)
def test_edits_and_steps_on_mesh_match_one_device(mode, streams, axes):
    cells, rope = 16 if streams == 1 else 12, jaxkv.Rope.make(4, base=100.0)  # all shares are used
    plain = tiny.make_tiny("aa", cells=cells, streams=streams, rope=rope)
    wanted = run_edits(tiny.params(), plain)
    with jax.set_mesh(mesh_of(mode, **axes)):
        cache = place_on_mesh(plain)
        found = run_edits(tiny.replicate(tiny.params()), cache)
    assert found[0].buffers.k[0].sharding.is_equivalent_to(cache.buffers.k[0].sharding, 4)
    assert_close(found, wanted, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_stacked_step_on_mesh_matches_one_device(mode):
    cache = Kind("stacked", cells=4, sequences=2, streams=2, stacked=True).make()

    def with_layers(cache, layers):
        step = jaxkv.apply(cache, jaxkv.init_batch(cache, jaxkv.make_batch([[1, 2], [3]])))
        return jax.lax.scan(attend_signed, step, jnp.arange(layers))[0].cache

    for layers in (LAYERS - 1, LAYERS):  # the last layer lacks the tokens, or none
        wanted = with_layers(cache, layers)
        with jax.set_mesh(mesh_of(mode, data=2)):
            found = with_layers(place_on_mesh(cache), layers)
        assert_identical(jax.tree.leaves(found), jax.tree.leaves(wanted))


@pytest.mark.core
def test_init_batch_one_stream_each_device_same_slots():
    """Slots follow the ids of the sequences of a stream, in any order of rows."""
    cache = Kind("groups", cells=8, sequences=4, streams=2).make()
    batch = jaxkv.make_batch([[1], [2]], sequences=[3, 2])
    (wanted,) = jaxkv.init_batch(cache, batch).ubatches
    assert wanted.slots.tolist() == [[1], [0]]
    with jax.set_mesh(mesh_of(data=2)):
        assert_identical(jaxkv.init_batch(place_on_mesh(cache), batch).ubatches[0], wanted)
    cache = Kind("window", cells=1, sequences=4, streams=2, windows=(near,)).make()
    with jax.set_mesh(mesh_of(data=2)):
        reason = jaxkv.init_batch(place_on_mesh(cache), batch).reason
    assert reason.tolist() == [Reason.OK, Reason.OK, Reason.OK, Reason.OUT_OF_CELLS]


SPLITS = [(4, {"data": 2, "tensor": 2, "cells": 2}), (1, {"cells": 4})]


@pytest.mark.parametrize(("streams", "axes"), mark_cases(SPLITS, core=SPLITS[:1]), ids=str)
def test_derivatives_on_mesh_match_one_device(streams, axes):
    """By queries, keys, values, sinks, and biases; the first layer's has weights."""

    def loss(arrays, cache, ubatch):
        q, k, v, sinks, params, array = arrays
        step = jaxkv.apply(cache, ubatch)
        for layer, bias in enumerate([Partial(slope, params), array]):
            step, out = jaxkv.attend(step, layer, q, k, v, sinks=sinks, bias=bias)
            q, v = q + out, v + out[:, :, ::2]
        return jnp.sum(jnp.where(step.valid[..., None, None], jnp.sin(q), 0.0))

    cells = 32 // streams  # few, so that all devices have used cells
    cache = Kind("full", cells=cells, sequences=4, streams=streams).make()
    texts = [list(range(i, 6 + i)) for i in range(4)]
    (ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch(texts)).check().ubatches
    shape, rng = ubatch.valid.shape, np.random.default_rng(0)
    sizes = (*shape, 4, 4), (*shape, 2, 4), (*shape, 2, 4), (4,), (4,), (*shape, 4, cells)
    arrays = [rng.normal(size=size).astype(np.float32) for size in sizes]
    wanted = jax.jit(jax.value_and_grad(loss))(arrays, cache, ubatch)
    with jax.set_mesh(mesh_of(**axes)):
        found = jax.jit(jax.value_and_grad(loss))(arrays, place_on_mesh(cache), ubatch)
    assert all(np.abs(x).max() > 0.1 for x in jax.tree.leaves(wanted[1]))
    assert_close(found, wanted, atol=1e-5)


make = partial(attention_cache, layers=2, cells=16, kv_heads=2, head_dim=4)


def with_rules():
    cache = make()
    return merge(cache.table.with_sharding_rules(RULES), cache.buffers)


def attend_without_mesh():
    step = jaxkv.apply(make(), jaxkv.init_batch(make(), jaxkv.make_batch([1])))
    q = jnp.ones((1, 1, 2, 4))
    jaxkv.attend(replace(step, table=with_rules().table), 0, q, q, q)


def allocate(sharding_rules=RULES, **options):
    make_sharded(partial(make, sequences=2, **options), mesh_of(data=2, cells=4), sharding_rules)


def layout(**options):
    return sharding.device_bytes(jax.eval_shape(make), mesh_of(tensor=2), RULES, **options)


PAIRS = [("kv_heads", "tensor")]
TINY = jaxkv.CacheSpec.attention(layers=1, kv_heads=2, head_dim=2)


@pytest.mark.parametrize(("call", "outcome"), mistakes("sharding"))
def test_sharding_bad_argument_raises(call, outcome):
    assert_raises(call, outcome, globals())


def test_fitted_splits_cells_of_heads_that_do_not_divide():
    cache = jax.eval_shape(partial(make, kv_heads=6))
    mesh = mesh_of(tensor=4)
    whole = sharding.device_bytes(cache, mesh, RULES)
    assert whole.whole == ("kv_heads (6) are not split by tensor",)
    assert whole.check(whole.total).buffers == cache.buffers.nbytes
    with pytest.raises(ValueError, match="expected at most .* on each of 4 devices"):
        whole.check(whole.total - 1)
    finer, rules = sharding.fit_mesh(cache, mesh, RULES)
    assert dict(finer.shape) == {"tensor": 2, "cells": 2} and rules == RULES
    assert sharding.device_bytes(cache, finer, rules).buffers == whole.buffers // 4
    copies, rules = sharding.fit_mesh(cache, mesh, RULES, surplus="replicate")
    assert dict(copies.shape) == {"tensor": 2, "copies": 2} and rules == RULES
    with pytest.raises(ValueError, match="surplus='cells'"):
        sharding.fit_mesh(cache, mesh, RULES, surplus="refuse")


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_program_on_mesh_is_compiled_once_for_results_of_edits(mode):
    """On explicit axes, the `PartitionSpec` of a result may end with None, unlike a new cache."""
    mesh, run = mesh_of(mode, data=2, tensor=2), jax.jit(partial(jax.tree.map, jnp.copy))
    with jax.set_mesh(mesh):
        cache = place_on_mesh(tiny.make_tiny("ar", cells=8, sequences=2, streams=2))
        away = jaxkv.extract(sharding.move(cache, mesh), 0, cells=8).cache
        edited = jaxkv.seq_rm(cache, 0, 1).cache, jaxkv.insert(cache, away, 0, 1).cache
        run(cache)
        with counting(traces=True) as heard:
            results = [*map(run, edited)]
        assert heard() == 0
    assert_identical(results, [*edited])


def test_program_on_mesh_gets_the_shardings_of_its_own_result():
    """A first call is slow for another `PartitionSpec`, also if only a trailing None differs."""
    cut = jax.jit(lambda cache: jaxkv.seq_rm(cache, 0, 1).cache)
    with jax.set_mesh(mesh_of(data=2, tensor=2)):
        cache = place_on_mesh(tiny.make_tiny("ar", cells=8, sequences=2, streams=2))
        cut(cut(cache))
    assert cut._cache_size() == 1
