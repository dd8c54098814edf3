"""No edit or step copies the cache: temporary bytes are below half of one layer's keys.

Nothing runs. The pool is so large that a copy of any layer exceeds the bound.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.ops.storage.forms import storage_of
from tests.helpers import hlo
from tests.helpers.caches import attention_cache, recurrent_cache
from tests.helpers.parametrize import mark_cases

LAYERS, CELLS, HEADS, SIZE, SEQUENCES = 3, 16384, 2, 64, 8
LAYER = CELLS * HEADS * SIZE * 4  # bytes of one layer's keys in float32, 8 MB
ROPE = jaxkv.Rope.make(SIZE)
pytestmark = pytest.mark.core

# XLA of jax 0.10 rewrites the whole array to update a part of it in bfloat16. This needs no
# temporary bytes, and no other dtype is rewritten.
REWRITTEN = ["bfloat16"] if jax.__version_info__ < (0, 12) else []


def cache_shapes(dtype="float32", *, streams=1, cells=CELLS, heads=HEADS, **options):
    sizes = dict(layers=LAYERS, cells=cells // streams, kv_heads=heads, head_dim=SIZE)
    options |= dict(sequences=SEQUENCES, streams=streams, rope=ROPE, dtype=dtype)
    return jax.eval_shape(partial(attention_cache, **sizes, **options))


def step(cache, ubatch):
    """The cache operations of a model alone; in a scan where layers are stacked."""
    step = jaxkv.apply(cache, ubatch)
    heads = step.buffers.k[0].shape[1]
    x = jnp.ones((*step.valid.shape, 2 * heads, SIZE), storage_of(step.buffers.k[0]).decoded_dtype)

    def of_layer(carry, layer):
        step, x = carry
        q = ROPE.rotate(x, step.positions)
        step, out = jaxkv.attend(step, layer, q, q[:, :, :heads], x[:, :, heads:])
        return (step, x + out), None

    if step.buffers.stacked:
        return jax.lax.scan(of_layer, (step, x), jnp.arange(LAYERS))[0]
    for layer in range(LAYERS):
        (step, x), _ = of_layer((step, x), layer)
    return step.cache, x


def plan_token(cache):
    return jaxkv.plan_step(cache, jnp.zeros(1, int)).ubatch


def planned_step(cache):
    return step(cache, plan_token(cache))[0]


def check(program, *args, tokens=0, dtype="float32"):
    """No layer of the first argument, which is donated, is copied.

    tokens: count of tokens that have logits and a mask over all cells.
    """
    compiled = jax.jit(program, donate_argnums=0).lower(*args).compile()
    layer = LAYER * jnp.dtype(dtype).itemsize // 4
    activations = tokens * CELLS * 4 * (3 * 2 * HEADS + 2)
    assert hlo.temporary_bytes(compiled) - activations < layer / 2
    assert compiled.memory_analysis().alias_size_in_bytes > 2 * LAYERS * layer
    if dtype not in REWRITTEN:
        assert hlo.large_moves(compiled, max(layer // 2, activations)) == []


STEPS = [("float32", 1, False)]
STEPS += [(dtype, 8, False) for dtype in ("float32", "bfloat16", "int8", "float16")]
STEPS += [("int8", 8, True), ("int8", 1, False), ("float32", 8, True)]
STEPS += [("bfloat16", 1, stacked) for stacked in (False, True)]


@pytest.mark.parametrize(
    "dtype, tokens, stacked", mark_cases(STEPS, core=[*STEPS[:4], STEPS[5], *STEPS[-2:]])
)
def test_step_copies_no_layer(dtype, tokens, stacked):
    cache = cache_shapes(dtype, stacked=stacked)
    (ubatch,) = jaxkv.init_full(cache, ubatch_size=tokens).ubatches
    # In other dtypes, and for stacked layers, keys are read by tiles; only logits are stored.
    whole = dtype in ("float32", "bfloat16") and dtype not in REWRITTEN and not stacked
    check(step, cache, ubatch, tokens=tokens if whole else 0, dtype=dtype)


def write_and_look(cache):
    """A layer that is not written is passed through."""
    step = jaxkv.apply(cache, plan_token(cache))
    x = jnp.ones((1, 1, 2 * HEADS, SIZE))
    step = jaxkv.write_kv(step, 0, x[:, :, :HEADS], x[:, :, HEADS:])
    return jaxkv.attend(step, 0, x)


def loop(cache):
    def body(carry):
        return planned_step(carry[0]), carry[1] + 1

    return jax.lax.while_loop(lambda carry: carry[1] < 4, body, (cache, 0))


def apply_edits(cache):
    for edit in EDITS.values():
        cache = edit(cache)
    return cache


@pytest.mark.parametrize(("program", "tokens"), [(write_and_look, 1), (loop, 1), (apply_edits, 0)])
def test_program_copies_no_layer(program, tokens):
    check(program, cache_shapes(), tokens=tokens)


def test_step_of_single_key_head_copies_no_layer():
    """One token, one key head, in a pool so small that attention reads it at once."""
    cache = cache_shapes(cells=2048, heads=1)
    programs = [jax.jit(planned_step, donate_argnums=which).lower(cache) for which in (0, ())]
    moves, copies = (hlo.large_moves(one.compile(), 2048 * SIZE * 4 // 2) for one in programs)
    assert moves == [] and copies  # without donation the cache is copied


def step_of_states(cache):
    plan = jaxkv.plan_step(cache, jnp.zeros(2, int), sequences=jnp.array([5, 9]))
    step = jaxkv.apply(cache, plan)
    for layer in range(2):
        x = jaxkv.read_states(step, layer)["x"]
        after = jnp.stack([x] * 3 + [x / 2 + step.tokens[..., None]], axis=1)
        step = jaxkv.write_states(step, layer, {"x": after})
    return step.cache


@pytest.mark.parametrize(("program", "share"), [(step_of_states, 2), (apply_edits, 100)])
def test_program_of_states_copies_no_layer(program, share):
    """A step needs space for the states of its rows and not of all cells; an edit needs none."""
    sizes = {"layers": 2, "sequences": 64, "max_rollback": 3}
    states = {"x": ((64, 1024), jnp.float32)}
    cache = jax.eval_shape(partial(recurrent_cache, states=states, **sizes))
    compiled = jax.jit(program, donate_argnums=0).lower(cache).compile()
    layer = 64 * 4 * 64 * 1024 * 4
    assert hlo.temporary_bytes(compiled) < layer / share
    assert hlo.large_moves(compiled, layer // 2) == []


EDITS = {
    "seq_rm": lambda m: jaxkv.seq_rm(m, 0, 1, 5)[0],
    "seq_cp": lambda m: jaxkv.seq_cp(m, 0, [1, 2]).cache,
    "seq_add": lambda m: jaxkv.seq_add(m, 0, 4, -1, delta=-2).cache,
    "seq_div": lambda m: jaxkv.seq_div(m, 0, 0, -1, divisor=2).cache,
    "rewind": lambda m: jaxkv.rewind(m, to=m.table)[0],
    "seq_keep": lambda m: jaxkv.seq_keep(m, 1).cache,
    "clear": jaxkv.clear,
}
ANSWERS = {
    "seq_pos_min": lambda m: m.seq_pos_min(jnp.arange(SEQUENCES)),
    "seq_pos_max": lambda m: m.seq_pos_max(jnp.arange(SEQUENCES)),
    "used": jaxkv.Cache.num_used_cells,
    "can_resume": lambda m: m.can_resume(0, 3),
    "init_update": jaxkv.init_update,
    "defrag_plan": jaxkv.defrag_plan,
    "check": jaxkv.Cache.check,
    "init_batch": lambda m: jaxkv.init_batch(m, jaxkv.make_batch(jnp.zeros(32, jnp.int32))),
}
# Edits that move keys and values, in one stream and between streams.
MOVES = {
    "update": lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
    "defrag": lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
    "seq_cp": lambda m: jaxkv.seq_cp(m, 0, [1, SEQUENCES - 1]).cache,
    "seq_select": lambda m: jaxkv.seq_select(m, [SEQUENCES - 1, 0], [0, SEQUENCES - 1]).cache,
}


MOVED = [
    ("update", "int8", 1, False),
    ("defrag", "float32", 1, False),
    ("update", "float32", 1, True),
    ("seq_cp", "float32", SEQUENCES, False),
    ("seq_select", "float32", 2, False),
    ("defrag", "bfloat16", 1, False),
    ("update", "float16", 1, False),
    ("defrag", "int8", 1, True),
    ("seq_cp", "int8", SEQUENCES, False),
    ("seq_cp", "float32", 2, True),
]


@pytest.mark.parametrize("name, dtype, streams, stacked", mark_cases(MOVED, core=MOVED[:5]))
def test_move_copies_no_layer(name, dtype, streams, stacked):
    check(MOVES[name], cache_shapes(dtype, streams=streams, stacked=stacked), dtype=dtype)


def test_answers_read_no_buffers():
    def answered(cache):
        return [answer(cache) for answer in ANSWERS.values()]

    compiled = jax.jit(answered).lower(cache_shapes()).compile()
    table = cache_shapes().table
    assert hlo.temporary_bytes(compiled) < 8 * table.nbytes
    assert not hlo.large_moves(compiled, LAYER // 2)
    assert compiled.memory_analysis().argument_size_in_bytes <= table.nbytes


def test_edits_outside_of_jit_keep_the_same_buffers():
    sizes = dict(layers=1, cells=8, kv_heads=1, head_dim=2, sequences=SEQUENCES)
    cache = attention_cache(**sizes, rope=None)
    for name, edit in EDITS.items():
        assert edit(cache).buffers.k[0] is cache.buffers.k[0], name
