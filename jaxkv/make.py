"""Making a cache of any kind from its spec, on one device or on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.partitioning import ShardingRules
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.cross_attention import as_source_table
from jaxkv.kv.make import make_attention_cache, parse_placement
from jaxkv.recurrent.table import make_recurrent_cache
from jaxkv.sharding.make import make_sharded
from jaxkv.spec import check_sequences_and_streams

X = TypeVar("X")

ByPart: TypeAlias = X | tuple["ByPart[X]", ...]
"""A value, or one for each part of a hybrid, which may be a hybrid itself."""


def make_cache(
    spec: CacheSpec,
    *,
    cells: ByPart[int | None] = None,
    sequences: int = 1,
    streams: int = 1,
    dtype: ByPart[jax.typing.DTypeLike] = jnp.float32,
    ubatch_size: ByPart[int] = 512,
    max_rollback: ByPart[int | None] = None,
    placement: ByPart[str] = "any",
    stacked: ByPart[bool] = False,
    mesh: Mesh | None = None,
    sharding_rules: ShardingRules | None = None,
) -> Cache:
    """Make an empty cache.

    What is said of one kind of layer alone counts for those, and not for others: so one call will
    do for all parts of a hybrid. A tuple gives its parts one value each.

    Args:
      spec: what the weights fix, see `CacheSpec`.
      cells: N, the tokens that fit into each stream. Layers with a window get what they need for a
        text of any length if that is less, (W + ubatch_size + max_rollback) * Q / S, and may do
        without `cells`; so may recurrent layers, which get Q / S * (E + 1). What looks at sources
        gets N for these.
      sequences: Q, the sequences that may be told apart.
      streams: S, a divisor of Q: how many pools of cells there are. Sequence q lives in stream
        q // (Q // S). A pool gives room to any of its sequences and forks without a copy; with its
        own stream, S = Q, a sequence costs what it holds itself, however long its neighbours are.
        Between 1 and Q, as for a pool on each of several devices, a copy from one stream to another
        may find no room, see `seq_cp`.
      dtype: of keys and values: a floating one, or int8. Those of 8 bits, int8 and float8_e4m3fn
        among them, are quantised: each head of a cell has a scale beside its codes, float32, for
        keys and for values, and one for each 128 numbers where it has more. They take 0.27 times
        the bytes of float32 at a head of 64. What is written is rounded, and nothing is
        differentiated through that: derivatives by queries are right, and those by the keys and
        values that are written are zero. Take another dtype to train. States have the dtypes of
        the spec.
      ubatch_size: of a window that gets what it needs: the most tokens that will be computed at
        once; larger plans are refused.
      max_rollback: of a window that gets what it needs: how many tokens can be taken back (`seq_rm`
        of an end) though the window is full, by default 32; with `max_rollback=cells` it gets N,
        and any position can be gone back to. Of recurrent layers: E, the states that are kept
        before the current one, by default 0, since each is as large as that.
      placement: of layers that attend to the text: which cells a ubatch may get: "any", the lowest
        first; "contiguous", one run of neighbours, which is refused when there is room but no run
        (see `compact`); "striped:n", any, a few from each of n runs of equal length in turn, so
        that on a mesh of n devices that split cells a text is spread evenly, where n divides N; or
        "tiled", any, but first those of tiles of 64 cells that no other sequence uses, while there
        are any, so that on a processor one pool is about as fast as a stream for each sequence. N
        is a multiple of 64 then; below 256 cells it may be any number, and tiles have fewer cells,
        which gains nothing. Placement orders cells and nothing else: any works on any mesh.
      stacked: of layers that attend to the text: whether one array holds the keys of all layers,
        and one their values, so that the number of a layer may be traced, as in a scan over
        layers; see below. All layers must be alike.
      mesh: devices that each make their share of the cache: no array is first made whole somewhere.
        Planning a batch, and all that reads or writes buffers, wants the mesh at hand,
        `jax.set_mesh(mesh)`; edits and questions do not.
      sharding_rules: which axes of the mesh split what, by default `sharding.ShardingRules()`.

    Returns:
      The cache, all cells empty: for each layer keys `[S, K, N, D]` and values `[S, K, N, Dv]` of
      `dtype`; or states `[S, Q / S * (E + 1), ...]`.

    Stacked, a model of many layers is traced and compiled as one layer, and its buffers are the
    carry of a `jax.lax.scan`, which writes them in place. `attend`, `write_kv` and `read_kv` take a
    layer as int32 then; one that is out of range and traced is written nowhere and reads NaN. All
    else is as ever, and files and meshes do not know the difference. The price: outside of `jit` a
    write copies all layers, and a derivative by the buffers is as large as all of them at each
    layer. `implementation="xla"`, `"cudnn"` or `"whole"` and `read_kv` copy a layer before
    they read it, and what jaxkv chooses on a GPU without its kernel may; on a processor tiles alone
    are read, also where all cells in one product would be faster. Writes go over all layers in
    bfloat16 and float8 on a processor with jax before 0.12, where float32, float16 or int8 do not;
    and on a TPU where heads have less than 128 numbers. There are figures in `docs/performance.md`.

    Raises:
      TypeError: when the spec is none, or a count is no integer.
      ValueError: when a count is below 1 or above 2**31 - 1, a stream has 2**30 cells or states or
        more, keys, values or states of a layer are 2**60 numbers or more, `streams` does not divide
        Q, `cells` is missing, there is no such placement, n does not divide N, 64 does not divide
        an N of tiles that is 256 or more, the dtype is neither a floating one with signs and NaN
        nor int8, or of 8 bits where values are a part of their keys, the layers of a stacked cache
        are not alike, a tuple has not one value for each part, or streams, or cells that a mesh
        splits, are no multiple of its devices. Nothing was made then.

    Examples:
      >>> spec = CacheSpec.attention(layers=2, kv_heads=3, head_dim=64)
      >>> cache = make_cache(spec, cells=512, sequences=8)
      >>> cache.buffers.k[0].shape, cache.nbytes
      ((1, 3, 512, 64), 1583152)

      Of 8 bits, with scales:

      >>> small = make_cache(spec, cells=512, sequences=8, dtype="int8")
      >>> keys = small.buffers.k[0]
      >>> keys.dtype, keys.codes.shape, keys.scales.shape, small.nbytes
      (dtype('int8'), (1, 3, 512, 64), (1, 3, 512, 1), 428080)

      A window of 128 positions, for two sequences with a stream each:

      >>> spec = CacheSpec.attention(2, 3, 64, window=Window.sliding(128))
      >>> make_cache(spec, sequences=2, streams=2).buffers.k[0].shape
      (2, 3, 672, 64)

      Two pools for four sequences, of which 0 and 1 share the first:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
      >>> cache = make_cache(spec, cells=4, sequences=4, streams=2)
      >>> batch = make_batch([[1], [2], [3]], sequences=[3, 1, 0])
      >>> print(show(apply(cache, init_batch(cache, batch))))
      owner    0 1 . .
      position 0 0 . .
      owner    3 . . .
      position 0 . . .

      Stripes in two runs of four cells, as for two devices: both hold as much of a text.

      >>> cache = make_cache(spec, cells=8, placement="striped:2")
      >>> print(show(apply(cache, init_batch(cache, make_batch([1, 2, 3, 4, 5, 6])))))
      owner    0 0 0 . 0 0 0 .
      position 0 2 4 . 1 3 5 .

      On a mesh, where each device makes half of the streams and half of the heads:

      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> spec = CacheSpec.attention(layers=1, kv_heads=2, head_dim=4)
      >>> cache = make_cache(spec, cells=8, sequences=2, streams=2, mesh=mesh)
      >>> cache.buffers.k[0].shape, cache.buffers.k[0].addressable_shards[0].data.shape
      ((2, 2, 8, 4), (1, 1, 8, 4))

      States, of which three can be gone back to, beside attention in 8 bits:

      >>> states = CacheSpec.recurrent(layers=1, states={"x": ((2,), "float32")})
      >>> both = CacheSpec.hybrid((spec, [0]), (states, [1]))
      >>> cache = make_cache(both, cells=64, dtype="int8", max_rollback=3)
      >>> keys, states = cache.buffers
      >>> keys.k[0].dtype, states[0]["x"].shape, cache.spec == both
      (dtype('int8'), (1, 4, 2), True)

    llama.cpp: `llama_kv_cache`, `llama_memory_recurrent`, `llama_kv_cache_iswa`,
    `llama_memory_hybrid`, with `n_ctx`, `n_seq_max`, `kv_unified` for one stream, `type_k` and
    `type_v` for the dtype, `n_ubatch`, `n_rs_seq` for `max_rollback` and `swa_full`.
    """
    if not isinstance(spec, CacheSpec):
        raise TypeError(
            f"expected a CacheSpec, got {type(spec)}; make one, as CacheSpec.attention(layers=2, "
            f"kv_heads=3, head_dim=64)"
        )
    if mesh is None and sharding_rules is not None:
        raise ValueError(
            f"expected a mesh for the sharding_rules, got None with {sharding_rules}; pass mesh= "
            f"too, or neither"
        )
    pools = check_sequences_and_streams(sequences, streams)
    by_part = {
        "cells": cells,
        "dtype": dtype,
        "ubatch_size": ubatch_size,
        "max_rollback": max_rollback,
        "placement": placement,
        "stacked": stacked,
    }
    make = partial(_make_from_spec, spec, pools, by_part)
    if mesh is not None:
        return make_sharded(make, mesh, sharding_rules)
    if spec.parts:
        jax.eval_shape(make)  # raises for any part before one is made
    return make()


def _make_from_spec(spec: CacheSpec, pools: Mapping[str, int], options: Mapping[str, Any]) -> Cache:
    """Make a cache for so many sequences and streams."""
    if spec.parts:
        return compose_hybrid_cache(
            *(
                (_make_from_spec(part, pools, kwargs), layers)
                for (part, layers), kwargs in zip(
                    spec.parts, _split_options(spec, options), strict=True
                )
            )
        )
    for name, value in options.items():
        if isinstance(value, tuple):
            raise ValueError(
                f"expected one {name} for a cache without parts, got {value}; pass a single one"
            )
    parse_placement(options["placement"])  # raises for one that no layer here would use, too
    match spec.kind:
        case "recurrent":
            max_rollback = 0 if options["max_rollback"] is None else options["max_rollback"]
            return make_recurrent_cache(spec, max_rollback=max_rollback, **pools)
        case "cross_attention":
            of_sources = {**options, "placement": "any", "stacked": False}
            cache = make_attention_cache(spec, **pools, **of_sources)
            return merge(as_source_table(cache.table), cache.buffers)
        case _:
            return make_attention_cache(spec, **pools, **options)


def _split_options(spec: CacheSpec, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each part of a hybrid."""
    count = len(spec.parts)
    for name, value in options.items():
        if isinstance(value, tuple) and len(value) != count:
            raise ValueError(
                f"expected one {name} for all of {count} parts or a tuple of one each, got "
                f"{value}; give each part one"
            )
    return [
        {name: x[i] if isinstance(x, tuple) else x for name, x in options.items()}
        for i in range(count)
    ]
