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

LAYERS, CELLS, HEADS, SIZE, SEQUENCES = 3, 16384, 2, 64, 8
LAYER = CELLS * HEADS * SIZE * 4  # bytes of one layer's keys in float32, 8 MB
ROPE = jaxkv.make_rope(SIZE)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]

# The compiler of jax 0.10 can write a part of an array of bfloat16 only by going over all of it. It
# holds nothing for that, and no other dtype is rewritten.
REWRITTEN = [jnp.bfloat16] if jax.__version_info__ < (0, 12) else []


def memory_shapes(dtype=jnp.float32, *, cells=CELLS, streams=1):
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


def planned_step(memory, tokens):
    """A generation loop's body: plan, apply, run."""
    count = tokens.shape[0]
    ubatch, ok = jaxkv.plan_step(memory, tokens, jnp.arange(count), jnp.ones(count, bool))
    memory, x = step(memory, ubatch)
    return memory, x, ok


def activations(tokens):
    """Bytes of what a layer of attention computes anyway, for this many tokens."""
    logits = tokens * 2 * HEADS * CELLS * 4
    mask = tokens * CELLS * 4
    return 3 * logits + 2 * mask


def check(compiled, tokens=0, dtype=jnp.float32):
    layer = LAYER * jnp.dtype(dtype).itemsize // 4
    assert hlo.temporary_bytes(compiled) - activations(tokens) < layer / 2
    if dtype not in REWRITTEN:
        assert hlo.large_moves(compiled, max(layer // 2, activations(tokens))) == []


@pytest.mark.parametrize("dtype", [*DTYPES, jnp.int8])
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.core), 8])
def test_a_step_copies_no_layer(tokens, dtype):
    memory = memory_shapes(dtype)
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=tokens).ubatches
    compiled = jax.jit(step, donate_argnums=0).lower(memory, ubatch).compile()
    # Of 16 bits and less, tiles of cells are read, whose logits alone are held.
    check(compiled, tokens if dtype == jnp.float32 else 0, dtype)


def test_a_single_key_copies_no_layer():
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


@pytest.mark.core
@pytest.mark.parametrize("tokens", [1, pytest.param(8, marks=pytest.mark.core)])
def test_a_planned_step_in_a_loop_copies_no_layer(tokens):
    def loop(memory):
        def body(carry):
            memory, _, _ = planned_step(carry[0], jnp.zeros(tokens, jnp.int32))
            return memory, carry[1] + 1

        return jax.lax.while_loop(lambda carry: carry[1] < 4, body, (memory, 0))

    check(jax.jit(loop, donate_argnums=0).lower(memory_shapes()).compile(), tokens)


VERBS = {
    "seq_rm": lambda m: jaxkv.seq_rm(m, 0, 1, 5)[0],
    "seq_cp": lambda m: jaxkv.seq_cp(m, 0, [1, 2]),
    "seq_keep": lambda m: jaxkv.seq_keep(m, 1),
    "seq_add": lambda m: jaxkv.seq_add(m, 0, 4, -1, -2),
    "seq_div": lambda m: jaxkv.seq_div(m, 0, 0, -1, 2),
    "clear": jaxkv.clear,
    "update": lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
    "defrag": lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
    "go_back": lambda m: jaxkv.go_back(jaxkv.split(m)[0], m)[0],
}
ANSWERS = {
    "seq_pos_min": lambda m: jaxkv.seq_pos_min(m, jnp.arange(SEQUENCES)),
    "seq_pos_max": lambda m: jaxkv.seq_pos_max(m, jnp.arange(SEQUENCES)),
    "used": jaxkv.used,
    "can_resume": lambda m: jaxkv.can_resume(m, 0, 3),
    "can_seq_rm": lambda m: jaxkv.can_seq_rm(m, 0),
    "init_update": jaxkv.init_update,
    "defrag_plan": jaxkv.defrag_plan,
    "check_invariants": jaxkv.check_invariants,
    "init_batch": lambda m: jaxkv.init_batch(m, jaxkv.make_batch(jnp.zeros(32, jnp.int32))),
}


MOVES = ["update", "defrag"]  # keys or values, all others edit the table


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, jnp.float32) for name in VERBS),
        *product(MOVES, DTYPES[1:]),
        *(pytest.param(name, jnp.int8, marks=pytest.mark.core) for name in MOVES),
    ],
)
def test_a_verb_copies_no_layer(name, dtype):
    memory = memory_shapes(dtype)
    check(jax.jit(VERBS[name], donate_argnums=0).lower(memory).compile(), dtype=dtype)


COPIES = {
    "seq_cp": lambda m: jaxkv.seq_cp(m, 0, [1, SEQUENCES - 1]),
    "seq_select": lambda m: jaxkv.seq_select(m, [SEQUENCES - 1, 0], [0, SEQUENCES - 1]),
}


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "dtype", "streams"),
    [
        *product(["seq_cp"], DTYPES, [SEQUENCES, 2]),
        *product(["seq_select"], DTYPES[:1], [SEQUENCES, 2]),
        (
            "seq_cp",
            jnp.int8,
            SEQUENCES,
        ),  # in groups the table takes more than a layer
    ],
)
def test_a_copy_between_streams_copies_no_layer(name, dtype, streams):
    memory = memory_shapes(dtype, cells=CELLS // streams, streams=streams)
    compiled = jax.jit(COPIES[name], donate_argnums=0).lower(memory).compile()
    check(compiled, dtype=dtype)


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_reads_no_buffers(name):
    compiled = jax.jit(ANSWERS[name]).lower(memory_shapes()).compile()
    check(compiled)
    table, _ = jaxkv.split(memory_shapes())
    assert hlo.temporary_bytes(compiled) < 8 * jaxkv.nbytes(table)


def test_the_checks_can_fail():
    """A step that is not donated copies every layer, and both checks see it."""
    memory = memory_shapes()
    (ubatch,) = jaxkv.init_full(memory, ubatch_size=1).ubatches
    compiled = jax.jit(step).lower(memory, ubatch).compile()
    assert hlo.large_moves(compiled, LAYER // 2)

    def stacked(memory):
        return jnp.sum(jnp.flip(jnp.stack(memory.buffers.k), axis=3) * memory.buffers.v[0][None])

    compiled = jax.jit(stacked).lower(memory).compile()
    assert hlo.temporary_bytes(compiled) >= LAYER / 2 or hlo.large_moves(compiled, LAYER // 2)


def test_outside_of_jit_a_verb_keeps_the_very_same_buffers():
    memory = jaxkv.make_kv_cache(layers=1, cells=8, kv_heads=1, head_dim=2, sequences=SEQUENCES)
    for name, verb in VERBS.items():
        if name not in ("update", "defrag"):
            after = verb(memory)
            assert after.buffers.k[0] is memory.buffers.k[0], name
