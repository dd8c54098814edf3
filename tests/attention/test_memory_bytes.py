"""No verb and no step copies the cache: what they hold is under half of one layer's keys.

Compiled only; nothing runs. The pool is large, so that a copy of any layer would show at once.
"""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.ops.quantised import dtype_of
from tests import hlo
from tests.cases import in_lanes

LAYERS, CELLS, HEADS, SIZE, SEQUENCES = 3, 16384, 2, 64, 8
LAYER = CELLS * HEADS * SIZE * 4  # bytes of one layer's keys in float32, 8 MB
ROPE = jaxkv.make_rope(SIZE)
F32, BF16, F16, I8 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8

# The compiler of jax 0.10 can write a part of an array of bfloat16 only by going over all of it. It
# holds nothing for that, and no other dtype is rewritten.
REWRITTEN = [BF16] if jax.__version_info__ < (0, 12) else []


def memory_shapes(dtype=F32, *, cells=CELLS, streams=1):
    return jax.eval_shape(
        partial(
            jaxkv.make_kv_cache,
            layers=LAYERS,
            cells=cells,
            kv_heads=HEADS,
            head_dim=SIZE,
            sequences=SEQUENCES,
            streams=streams,
            rope=ROPE,
            dtype=dtype,
        )
    )


def step(memory, ubatch):
    """What a model does with a memory, and nothing besides."""
    memory = jaxkv.apply(memory, ubatch)
    dtype = dtype_of(memory.buffers.k[0])
    x = jnp.ones((*ubatch.valid.shape, 2 * HEADS, SIZE), dtype)
    for layer in range(LAYERS):
        q = jaxkv.rotate(x, ubatch.positions, ROPE)
        memory, out = jaxkv.attend(memory, layer, ubatch, q, q[:, :, :HEADS], x[:, :, HEADS:])
        x = x + out
    return memory, x


def activations(tokens):
    """Bytes of what a layer of attention computes anyway, for this many tokens."""
    logits = tokens * 2 * HEADS * CELLS * 4
    mask = tokens * CELLS * 4
    return 3 * logits + 2 * mask


def check(compiled, tokens=0, dtype=F32):
    layer = LAYER * jnp.dtype(dtype).itemsize // 4
    assert hlo.temporary_bytes(compiled) - activations(tokens) < layer / 2
    if dtype not in REWRITTEN:
        assert hlo.large_moves(compiled, max(layer // 2, activations(tokens))) == []


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    in_lanes(
        [(F32, 1), (F32, 8), (BF16, 8), (F16, 8), (I8, 1), (I8, 8)],
        fast=[],
        core=[(F32, 1), (F32, 8), (BF16, 8), (I8, 1)],
    ),
)
def test_step_copies_no_layer(dtype, tokens):
    memory = memory_shapes(dtype)
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=tokens).ubatches
    compiled = jax.jit(step, donate_argnums=0).lower(memory, ubatch).compile()
    # Of 16 bits and less, tiles of cells are read, whose logits alone are held.
    check(compiled, tokens if dtype == F32 else 0, dtype)


@pytest.mark.core
def test_step_of_single_key_head_copies_no_layer():
    """One token, one key head, in a pool so small that all of it is read at once."""
    cells, heads = 2048, 1
    make = partial(jaxkv.make_kv_cache, layers=LAYERS, cells=cells, kv_heads=heads, head_dim=SIZE)

    def step(memory, token):
        ubatch, _ = jaxkv.plan_step(memory, token, jnp.zeros(1, jnp.int32), jnp.ones(1, bool))
        memory, x = jaxkv.apply(memory, ubatch), jnp.ones((1, 1, 4, SIZE))
        for layer in range(LAYERS):
            memory, out = jaxkv.attend(memory, layer, ubatch, x, x[:, :, :1], x[:, :, 1:2])
            x = x + out
        return memory, x

    shapes = jax.eval_shape(make), jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes).compile()
    assert hlo.large_moves(compiled, cells * heads * SIZE * 4 // 2) == []


@pytest.mark.parametrize("tokens", in_lanes([1, 8], fast=[], core=[1]))
def test_planned_step_in_a_loop_copies_no_layer(tokens):
    """The body of a loop that generates: plan, apply, run."""

    def loop(memory):
        def body(carry):
            memory, turn = carry
            ids, there = jnp.arange(tokens), jnp.ones(tokens, bool)
            ubatch, _ = jaxkv.plan_step(memory, jnp.zeros(tokens, jnp.int32), ids, there)
            return step(memory, ubatch)[0], turn + 1

        return jax.lax.while_loop(lambda carry: carry[1] < 4, body, (memory, 0))

    check(jax.jit(loop, donate_argnums=0).lower(memory_shapes()).compile(), tokens)


EDITS = {
    "seq_rm": lambda m: jaxkv.seq_rm(m, 0, 1, 5)[0],
    "seq_cp": lambda m: jaxkv.seq_cp(m, 0, [1, 2]),
    "seq_add": lambda m: jaxkv.seq_add(m, 0, 4, -1, -2),
    "seq_div": lambda m: jaxkv.seq_div(m, 0, 0, -1, 2),
    "go_back": lambda m: jaxkv.go_back(jaxkv.split(m)[0], m)[0],
    "seq_keep": lambda m: jaxkv.seq_keep(m, 1),
    "clear": jaxkv.clear,
}
ANSWERS = {
    "seq_pos_min": lambda m: jaxkv.seq_pos_min(m, jnp.arange(SEQUENCES)),
    "seq_pos_max": lambda m: jaxkv.seq_pos_max(m, jnp.arange(SEQUENCES)),
    "used": jaxkv.used,
    "can_resume": lambda m: jaxkv.can_resume(m, 0, 3),
    "init_update": jaxkv.init_update,
    "defrag_plan": jaxkv.defrag_plan,
    "check_invariants": jaxkv.check_invariants,
    "init_batch": lambda m: jaxkv.init_batch(m, jaxkv.make_batch(jnp.zeros(32, jnp.int32))),
}
# What moves keys and values, in one stream and between streams.
MOVES = {
    "update": lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
    "defrag": lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
    "seq_cp": lambda m: jaxkv.seq_cp(m, 0, [1, SEQUENCES - 1]),
    "seq_select": lambda m: jaxkv.seq_select(m, [SEQUENCES - 1, 0], [0, SEQUENCES - 1]),
}


@pytest.mark.core
def test_edits_of_the_table_copy_no_layer():
    def edited(memory):
        for edit in EDITS.values():
            memory = edit(memory)
        return memory

    check(jax.jit(edited, donate_argnums=0).lower(memory_shapes()).compile())


IN_STREAM = [*product(("update", "defrag"), [F32, BF16, F16, I8], [1])]
BETWEEN = [*product(["seq_cp", "seq_select"], [F32], [SEQUENCES, 2])]
# In groups of int8 the table takes more than a layer.
NARROW = [*product(["seq_cp"], [BF16, F16, I8], [SEQUENCES])]


@pytest.mark.parametrize(
    ("name", "dtype", "streams"),
    in_lanes(
        [*IN_STREAM, *BETWEEN, *NARROW],
        fast=[],
        core=[*IN_STREAM[:1], *IN_STREAM[3:6], *BETWEEN[:3], NARROW[2]],
    ),
)
def test_move_copies_no_layer(name, dtype, streams):
    memory = memory_shapes(dtype, cells=CELLS // streams, streams=streams)
    check(jax.jit(MOVES[name], donate_argnums=0).lower(memory).compile(), dtype=dtype)


@pytest.mark.core
def test_answers_read_no_buffers():
    def answered(memory):
        return [answer(memory) for answer in ANSWERS.values()]

    compiled = jax.jit(answered).lower(memory_shapes()).compile()
    table, _ = jaxkv.split(memory_shapes())
    assert hlo.temporary_bytes(compiled) < 8 * jaxkv.nbytes(table)
    assert not hlo.large_moves(compiled, LAYER // 2)
    assert compiled.memory_analysis().argument_size_in_bytes <= jaxkv.nbytes(table)


@pytest.mark.core
def test_checks_see_copies_of_what_is_not_donated():
    memory = memory_shapes()
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=1).ubatches
    compiled = jax.jit(step).lower(memory, ubatch).compile()
    assert hlo.large_moves(compiled, LAYER // 2)

    def stacked(memory):
        return jnp.sum(jnp.flip(jnp.stack(memory.buffers.k), axis=3) * memory.buffers.v[0][None])

    compiled = jax.jit(stacked).lower(memory).compile()
    assert hlo.temporary_bytes(compiled) >= LAYER / 2 or hlo.large_moves(compiled, LAYER // 2)


@pytest.mark.core
def test_edits_outside_of_jit_keep_the_same_buffers():
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=2, sequences=SEQUENCES)
    for name, edit in EDITS.items():
        assert edit(memory).buffers.k[0] is memory.buffers.k[0], name
