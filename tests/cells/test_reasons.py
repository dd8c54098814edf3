"""Each cause of a refused edit has its reason, concrete and traced, and a reason costs nothing."""

import functools
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import EditResult, PlanRefusedError, Reason, generation, make_batch
from jaxkv.table import EditCheck, join_checks
from tests.cells.plans import NEAR
from tests.helpers import edit_sequences, hlo
from tests.helpers.caches import GROUPS, HEADS, SIZE, SMALL, assert_identical, parse_cache
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import add_tokens, apply_plan


@functools.cache
def six():
    return parse_cache("0{0} 1{0} 2{0} 3{0} 4{0} 5{0}", SMALL)


SIX = six()


@functools.cache
def evicted():
    """Sequence 0 has tokens up to position 9; those below 4 are evicted. The window has width 4."""
    return add_tokens(NEAR.make(), [1] * 10, each=1)


@functools.cache
def states():
    """Sequence 0 has 6 tokens, with states after the last two."""
    return edit_sequences.make_filled_twin(kept=1, counts=[6]).cache


@functools.cache
def hybrid():
    """Sequence 0 has 6 tokens and sequence 1 has 8, with states after the last 3."""
    return edit_sequences.make_filled_twin(2, [6, 8], kinds="ar", cells=20).cache


@functools.cache
def groups():
    """Sequences 0 and 1 have 6 tokens; they fill most of 10 cells, in two streams."""
    cache, counts = GROUPS.make(), [6, 0, 6, 0]
    ids = [seq for seq, count in enumerate(counts) for _ in range(count)]
    for ubatch in jaxkv.init_batch(cache, make_batch([1] * 12, sequences=ids)).ubatches:
        cache = apply_plan(cache, ubatch)
    return cache


def shared():
    return jaxkv.seq_cp(six(), 0, 1, 0, 4).cache


def shift(cache, seq, num_keep, num_discard):
    return generation.context_shift(cache, seq, num_keep=num_keep, num_discard=num_discard)


def extend(cache, seq, grouped):
    return generation.self_extend(cache, seq, grouped, group=2, width=4)


def add(cache, seq, p0, p1, delta):
    return jaxkv.seq_add(cache, seq, p0, p1, delta=delta)


def divide(cache, seq, p0, p1, divisor):
    return jaxkv.seq_div(cache, seq, p0, p1, divisor=divisor)


def grouped():
    return extend(six(), 0, 0).cache


def rewind_after_write(cache, seq):
    """Remove a sequence, write its cells again, and return to the table from before."""
    later, _ = jaxkv.seq_rm(cache, seq)
    later = apply_plan(later, jaxkv.plan_step(later, jnp.array([1]), sequences=jnp.array([1])))
    return jaxkv.rewind(later, to=cache.table)


def rewind_after_seq_rm(cache, seq):
    return jaxkv.rewind(jaxkv.seq_rm(cache, seq).cache, to=cache.table)


def unwritten():
    """In a stacked cache, layer 0 lacks the tokens of stream 1."""
    cache = replace(GROUPS, stacked=True).make()
    step = jaxkv.apply(cache, jaxkv.init_batch(cache, make_batch([1, 2], sequences=2)))
    kv = jnp.ones((*step.valid.shape, HEADS, SIZE))
    return jaxkv.write_kv(step, 1, kv, kv).cache


def insert_unwritten(cache, src, dst):
    return jaxkv.insert(cache, unwritten(), src, dst)


def insert_six(cache, src, dst):
    return jaxkv.insert(cache, SIX, src, dst)


@functools.cache
def grown():
    return parse_cache("0{0} 1{0} 2{0} 3{0} 4{0} 5{0} 6{0}", SMALL)


FAR = 2**31 - 3
CASES = [
    # edit, cache, arguments, reason
    (jaxkv.seq_rm, six, (0, 2, 4), "OK"),
    (jaxkv.seq_rm, six, (9, 2, 4), "OK"),  # an unknown sequence, only traced
    (jaxkv.seq_rm, six, (0, -2, 4), "ARGUMENT_OUT_OF_RANGE"),
    (jaxkv.seq_rm, six, (0, 0, -2), "ARGUMENT_OUT_OF_RANGE"),
    (jaxkv.seq_rm, evicted, (0, 6, -1), "CONTEXT_EVICTED"),
    (jaxkv.seq_rm, states, (0, 4, 5), "STATE_NOT_STORED"),  # a token follows
    (jaxkv.seq_rm, states, (0, 3, -1), "STATE_NOT_STORED"),
    (jaxkv.seq_rm, states, (0, 5, -1), "OK"),
    (jaxkv.seq_rm, hybrid, (0, 2, -1), "STATE_NOT_STORED"),
    (jaxkv.seq_rm, lambda: jaxkv.seq_cp(hybrid(), 0, 2, 4).cache, (2, 4, -1), "PARTS_DIFFER"),
    (jaxkv.seq_cp, six, (0, 1, 0, 4), "OK"),
    (jaxkv.seq_cp, six, (0, 1, -2, 4), "ARGUMENT_OUT_OF_RANGE"),
    (jaxkv.seq_cp, six, (0, 1, 0, -7), "ARGUMENT_OUT_OF_RANGE"),
    (jaxkv.seq_cp, groups, (0, 3, 0, -1), "OUT_OF_CELLS"),
    (jaxkv.seq_cp, groups, (0, 3, 0, 3), "OK"),
    (jaxkv.seq_cp, evicted, (0, 1, 0, 6), "CONTEXT_EVICTED"),
    (jaxkv.seq_cp, states, (0, 1, 0, 3), "STATE_NOT_STORED"),
    (jaxkv.seq_cp, hybrid, (0, 1, 0, -1), "PARTS_DIFFER"),
    (jaxkv.seq_select, groups, ([0], [3]), "OUT_OF_CELLS"),
    (jaxkv.seq_select, groups, ([0], [2]), "OK"),
    (insert_six, six, (0, 0), "OK"),
    (insert_six, six, (0, 1), "OK"),
    (insert_six, shared, ([0, 0], [1, 2]), "OK"),
    (insert_six, grown, (0, 1), "OUT_OF_CELLS"),
    (insert_unwritten, groups, (2, 1), "LAYER_NOT_WRITTEN"),
    (insert_unwritten, groups, (0, 1), "OK"),  # of another stream
    (jaxkv.seq_keep, six, (0,), "OK"),
    (add, six, (0, 2, -1, 3), "OK"),
    (add, six, (0, -2, -1, 3), "ARGUMENT_OUT_OF_RANGE"),
    (add, six, (0, 0, -7, 3), "ARGUMENT_OUT_OF_RANGE"),
    (add, six, (0, 2, -1, FAR), "POSITION_OUT_OF_RANGE"),
    (add, evicted, (0, 4, -1, -4), "CONTEXT_EVICTED"),
    (add, states, (0, 2, -1, -3), "POSITION_OUT_OF_RANGE"),
    (add, states, (0, 2, -1, FAR), "POSITION_OUT_OF_RANGE"),
    (add, hybrid, (0, 0, 3, 10), "PARTS_DIFFER"),
    (divide, six, (0, 2, -1, 3), "OK"),
    (divide, six, (0, 2, -1, 0), "ARGUMENT_OUT_OF_RANGE"),
    (divide, six, (0, 2, -1, -1), "ARGUMENT_OUT_OF_RANGE"),
    (divide, six, (0, -(2**31) + 1, 1, 2), "ARGUMENT_OUT_OF_RANGE"),
    (divide, six, (0, 2, -2, 2), "ARGUMENT_OUT_OF_RANGE"),
    (divide, states, (0, 2, -1, 0), "ARGUMENT_OUT_OF_RANGE"),
    (divide, evicted, (0, 6, -1, 5), "CONTEXT_EVICTED"),
    (divide, hybrid, (0, 5, 6, 5), "PARTS_DIFFER"),
    (shift, six, (0, 1, 2), "OK"),
    (shift, six, (3, 1, 2), "ARGUMENT_OUT_OF_RANGE"),
    (shift, six, (-1, 0, 1), "ARGUMENT_OUT_OF_RANGE"),
    (shift, six, (0, -1, 2), "ARGUMENT_OUT_OF_RANGE"),
    (shift, six, (0, 1, 0), "ARGUMENT_OUT_OF_RANGE"),
    (shift, six, (0, 4, 3), "TOO_FEW_TOKENS"),
    (shift, shared, (0, 1, 2), "SHARED_CELL"),
    (shift, shared, (0, 4, 3), "TOO_FEW_TOKENS"),  # the first of two causes
    (shift, six, (0, 7, 0), "ARGUMENT_OUT_OF_RANGE"),
    (shift, evicted, (0, 2, 7), "CONTEXT_EVICTED"),
    (extend, six, (0, 0), "OK"),
    (extend, six, (0, -2), "ARGUMENT_OUT_OF_RANGE"),
    (extend, six, (0, 8), "ARGUMENT_OUT_OF_RANGE"),
    (extend, six, (0, 3), "ARGUMENT_OUT_OF_RANGE"),
    (extend, lambda: add(six(), 0, 0, -1, 2**30).cache, (0, 0), "POSITION_OUT_OF_RANGE"),
    (extend, grouped, (0, 0), "DUPLICATE_POSITION"),
    (extend, shared, (0, 0), "SHARED_CELL"),
    (extend, evicted, (0, 2), "CONTEXT_EVICTED"),
    (rewind_after_seq_rm, six, (0,), "OK"),
    (rewind_after_write, six, (0,), "OVERWRITTEN"),
]


def assert_reason(result, cache, name):
    assert Reason(result.reason).name == name
    assert result.reason.dtype == jnp.int32 and result.reason.shape == result.ok.shape == ()
    assert result.ok == (name == "OK")
    if name not in ("OK", "OVERWRITTEN"):
        assert_identical(result.cache, cache)


FAST = [case for case in CASES if case[1] in (six, shared)]


@pytest.mark.parametrize(
    ("edit", "make", "args", "name"),
    mark_cases(CASES, FAST, core=[case for case in CASES if case not in FAST]),
)
def test_refused_edit_has_the_reason_of_its_cause(edit, make, args, name):
    cache = make()
    assert_reason(jit_edit(edit)(cache, *jax.tree.map(jnp.asarray, args)), cache, name)
    try:
        result = edit(cache, *args)
    except ValueError as error:  # concrete arguments outside of their ranges
        assert name == "ARGUMENT_OUT_OF_RANGE" or "got 9" in str(error)
    else:
        assert_reason(result, cache, name)


@functools.cache
def jit_edit(edit):
    return jax.jit(edit)


def test_every_reason_of_an_edit_has_a_case_and_advice():
    names = {name for *_, name in CASES} - {"OK"}
    of_edits = {reason.name for reason in Reason if "init_batch" not in reason.edit_advice}
    assert names == of_edits
    for reason in Reason:
        assert reason == Reason.OK or ("expected" in reason.advice and "; " in reason.advice)
        assert "{" not in reason.edit_advice and reason.edit_advice.count("; ") == 1


def test_lists_of_ranges_have_a_reason_each():
    cache = six()
    ids, starts = np.array([0, 0, 0]), np.array([4, -2, 3])
    cache, ok = result = jax.jit(jaxkv.seq_rm)(cache, ids, starts)
    names = [Reason(code).name for code in result.reason.tolist()]
    assert names == ["OK", "ARGUMENT_OUT_OF_RANGE", "OK"]
    assert ok.tolist() == [True, False, True] and result[0] is cache is result.cache
    with pytest.raises(PlanRefusedError, match=r"^range 1: ARGUMENT_OUT_OF_RANGE, expected .*; ch"):
        result.check()


def test_edit_result_is_a_pytree_that_unpacks_in_two():
    cache = six()
    doubled = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    starts = jnp.array([3, -2])
    result = jax.vmap(lambda cache, start: jaxkv.seq_rm(cache, 0, start))(doubled, starts)
    assert isinstance(result, EditResult) and result.reason.shape == (2,)
    assert result.ok.tolist() == [True, False]

    def step(result, start):
        cache, ok = result
        return jaxkv.seq_rm(cache, 0, start), ok

    last, flags = jax.lax.scan(step, jaxkv.seq_rm(cache, 0, 5), starts)
    assert flags.tolist() == [True, True] and not last.ok
    with pytest.raises(PlanRefusedError, match="^ARGUMENT_OUT_OF_RANGE, expected"):
        last.check()
    assert_identical(last.cache, jaxkv.seq_rm(jaxkv.seq_rm(cache, 0, 5).cache, 0, 3).check())
    with pytest.raises(TypeError, match=r"got a result .*; pass the cache in it"):
        jaxkv.clear(last)
    with pytest.raises(TypeError, match=r"use result\.ok"):
        jax.jit(lambda cache: jaxkv.seq_rm(cache, 0).check())(cache)


def without_reasons(*checks):
    """`join_checks` without the computation of a reason."""
    oks = [ok for ok, _ in checks]
    return EditCheck(functools.reduce(jnp.logical_and, oks, jnp.array(True)), jnp.int32(0))


LOOPS = {
    "seq_add": (hybrid, partial(add, p0=2, p1=-1, delta=1)),
    "context_shift": (evicted, partial(shift, num_keep=1, num_discard=2)),
    "self_extend": (evicted, partial(extend, grouped=0)),
}


@pytest.mark.parametrize("name", mark_cases(LOOPS, core=["seq_add", "context_shift"]))
def test_reason_that_a_loop_ignores_adds_no_instruction(name, monkeypatch):
    make, edit = LOOPS[name]
    cache = make()

    def count(fields):
        def step(cache, seq):
            result = edit(cache, seq)
            return result.cache, [getattr(result, field) for field in fields]

        jax.clear_caches()  # programs of the edits are cached
        compiled = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(4))).lower(cache)
        return len(hlo.instructions(compiled.compile()))

    ignored, used = count(["ok"]), count(["ok", "reason"])
    modules = [module for name, module in sys.modules.items() if name.startswith("jaxkv.")]
    for module in modules:
        if getattr(module, "join_checks", None) is join_checks:
            monkeypatch.setattr(module, "join_checks", without_reasons)
    assert count(["ok"]) == ignored != used
    jax.clear_caches()
