"""Attention and steps as shapes, for the compilers of TPUs and of GPUs; nothing runs."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.ops.attention.softmax import AttentionOptions
from jaxkv.ops.attention.visibility import Visibility
from jaxkv.ops.storage.forms import form_of_dtype
from tests.attention.ways import attend
from tests.helpers import hlo
from tests.helpers.caches import attention_cache

SIZES = (64, 80, 96, 128, 256)
DTYPES = ("float32", "bfloat16")
CASES = [(dtype, size) for dtype in (*DTYPES, "int8") for size in SIZES]
CASES.remove(("int8", 256))  # two scales per head and cell, which no kernel reads
LAYERS, CELLS, GROUPS, QUERIES, FORKS = 2, 8192, 8, 4, 32

# Instructions that name an array and move nothing.
_NO_WORK = ("parameter", "tuple", "get-tuple-element", "bitcast")


def compiled(platform, function, *shapes, donate=()):
    traced = jax.jit(function, donate_argnums=donate).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).compile()


def place_shapes(devices):
    """A function from shape and dtype to an array on the first of some devices."""
    where = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), P())
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def attention_shapes(of, size, dtype, *, streams=1, tokens=FORKS, cells=CELLS):
    """The shapes of queries, keys, values, and a `Visibility` with two words of owners and a
    window.

    `of` makes the shape of an array on a device of the compiler. Queries for quantised buffers are
    bfloat16.
    """
    visibility = Visibility(
        position=of((streams, cells), jnp.int32),
        owners=of((streams, 2, cells), jnp.uint32),
        streams=of((streams,), jnp.int32),
        at=of((streams, tokens), jnp.int32),
        word=of((streams, tokens), jnp.int32),
        bit=of((streams, tokens), jnp.uint32),
        window=jaxkv.Window.chunked(4096),
        causal=True,
        all_streams=True,
    )
    form = jax.eval_shape(
        partial(form_of_dtype(dtype).zeros, (streams, GROUPS, cells, size), dtype)
    )
    buffers = jax.tree.map(lambda x: of(x.shape, x.dtype), form)
    of_queries = "bfloat16" if dtype == "int8" else dtype
    return of((streams, tokens, GROUPS * QUERIES, size), of_queries), buffers, buffers, visibility


def layers_of_attention(implementation=None, **options):
    """Attention of some layers with one `Visibility`, each with separate keys and values."""

    def run(q, buffers, visibility):
        for k, v in buffers:
            q = attend(q, k, v, visibility, AttentionOptions(**options), implementation)
        return q

    return run


def works_on(program, size, heads=GROUPS, cells=CELLS):
    """Name the instructions that return keys or values of a layer: copies and writes."""
    whole = re.compile(rf"\[\d+,{heads},(?:{cells},{size}|{size},{cells})\]")
    found = [name for results, name, _ in hlo.instructions(program) if whole.search(results)]
    return [name for name in found if name not in _NO_WORK]


def of_attention(platform, of, size, dtype, tokens=FORKS):
    """A token of each of some forks with shared cells.

    Temporary bytes are compared with keys of the queries' dtype, since they store queries and sums.
    """
    q, k, v, visibility = attention_shapes(of, size, dtype, tokens=tokens)
    layers = layers_of_attention(softcap=30.0)
    program = compiled(platform, layers, q, [(k, v)] * LAYERS, visibility)
    return {
        "kernels": kernels(program),
        "works": works_on(program, size),
        "temporaries": hlo.temporary_bytes(program),
        "keys": math.prod(k.shape) * q.dtype.itemsize,
    }


def of_a_step(platform, of, dtype, size=128):
    """Plan, apply, write and attend, a token for each sequence of one stream."""
    of_new = "bfloat16" if dtype == "int8" else dtype

    sizes = dict(layers=LAYERS, cells=CELLS, kv_heads=GROUPS, head_dim=size, dtype=dtype)
    make = partial(attention_cache, **sizes, sequences=FORKS, lanes=128)

    def step(cache, tokens, q, k, v):
        valid = jnp.ones(FORKS, bool)
        plan = jaxkv.plan_step(cache, tokens, active=valid)
        step = jaxkv.apply(cache, plan)
        for layer in range(LAYERS):
            step, q = jaxkv.attend(step, layer, q, k, v)
        return step.cache, q, plan.ok

    cache = jax.tree.map(lambda x: of(x.shape, x.dtype), jax.eval_shape(make))
    new = [of((1, FORKS, heads, size), of_new) for heads in (GROUPS * QUERIES, GROUPS, GROUPS)]
    program = compiled(platform, step, cache, of((FORKS,), jnp.int32), *new, donate=0)
    shape = cache.buffers.k[0].shape
    layer = 2 * math.prod(shape) * new[0].dtype.itemsize
    return {
        "kernels": kernels(program),
        "works": works_on(program, shape[3], shape[1]),
        "temporaries": hlo.temporary_bytes(program),
        "aliased": program.memory_analysis().alias_size_in_bytes,
        "cache": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
        "layer": layer,
    }


def kernels(program):
    """Count the calls of jaxkv's kernels."""
    targets = r'custom_call_target="(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)"'
    return len(re.findall(targets, program.as_text()))
