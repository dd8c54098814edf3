"""`make_cache`: an empty cache of any kind, on one device or on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.partitioning import ShardingRules, check_mesh, check_sharding_rules
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.kv.cross_attention import as_source_table
from jaxkv.kv.make import KVDtype, make_attention_cache, parse_placement
from jaxkv.kv.placement import Placement
from jaxkv.recurrent.table import make_recurrent_cache
from jaxkv.sharding.make import make_sharded
from jaxkv.spec import check_sequences_and_streams

X = TypeVar("X")

ByPart: TypeAlias = X | tuple["ByPart[X]", ...]
"""One value, or a tuple with one value for each part of a hybrid cache; tuples may be nested."""


def make_cache(
    spec: CacheSpec,
    *,
    cells: ByPart[int | None] = None,
    sequences: int = 1,
    streams: int = 1,
    dtype: ByPart[KVDtype] = jnp.float32,
    rotate: ByPart[bool] = False,
    ubatch_size: ByPart[int] = 512,
    max_rollback: ByPart[int | None] = None,
    placement: ByPart[str | Placement | None] = None,
    stacked: ByPart[bool] = False,
    lanes: ByPart[int | None] = None,
    mesh: Mesh | None = None,
    sharding_rules: ShardingRules | None = None,
) -> Cache:
    """Make an empty cache.

    An option for one kind of layer has no effect on layers of other kinds. For a hybrid spec, an
    option may be a tuple with one value for each part.

    Args:
      spec: layers, heads and windows of the model (`CacheSpec`).
      cells: N, the number of cells of each stream. A batch that needs more cells than are free is
        refused (`init_batch`). With a window of width W, the default is (W + ubatch_size +
        max_rollback) * Q / S. It is rounded up to a multiple of 64 with the placement "tiled", and
        to a multiple of n with "striped:n". The default is enough for sequences of any length; a
        larger number is reduced to the default. Recurrent layers ignore `cells`. Cross-attention
        layers have N cells for encoder sources.
      sequences: Q, the number of sequence ids.
      streams: S, the number of streams, a divisor of Q. Sequence q is in stream q // (Q // S).
        Sequences of one stream share the cells of the stream, and fork without a copy. With S = Q,
        the cost of attention for a sequence does not depend on other sequences.
      dtype: dtype of keys and values: a floating dtype, int8 or int4. A pair, such as ("int8",
        "int4"), has the dtypes of keys and of values; for a hybrid spec, write a tuple of pairs.
        Recurrent states have the dtypes of the spec. Keys and values of 8 or 4 bits are quantised.
        Gradients with respect to quantised keys and values are zero; train with another dtype.
      rotate: If True, keys and values of 8 or 4 bits are stored after a rotation by a Hadamard
        matrix, which spreads numbers of large magnitude over the head. Results have a smaller
        rounding error. Each update of a shifted key adds a rounding error, as with int4.
      ubatch_size: with a window, the largest number of tokens in a ubatch. With the default N,
        `init_batch` raises ValueError for a larger ubatch.
      max_rollback: with a window, how many last tokens of a sequence can always be removed if N is
        the default; 32 if `max_rollback` is not given. If `max_rollback` equals `cells`, N is
        not reduced. Any number of last tokens can then be removed until a ubatch evicts cells
        because too few cells are empty. With recurrent layers, `max_rollback` is E, the number of
        earlier states to store, each as large as the current state; default 0.
      placement: order in which free cells of attention layers are taken, without effect on results.
        None selects "tiled" on a CPU without a mesh, if 8 or more sequences share a stream, N is at
        least 4,096, and N is a multiple of 64. Otherwise, None selects "any".

        - "any" takes the first free cells.
        - "striped:n" divides a stream into n runs of N / n cells, and takes cells from one run
          after the other, up to 64 at a time.
        - "tiled" gives a sequence whole empty tiles of at most 64 cells. If no tile is empty, the
          sequence gets any free cells. N below 256 may be any number; a larger N must be a
          multiple of 64.
        - An object of a subclass of `Placement` sorts cells by a rule of your
          own (`docs/howto/own_placement.md`).

      stacked: If True, one array stores the keys of all attention layers, and another array the
        values. All layers must have equal sizes. `attend`, `write_kv` and `read_kv` then accept a
        traced int32 layer number. Calls with a number out of range write nothing and return NaN. A
        write copies all layers in three cases: outside of `jit`; on a CPU with bfloat16 or float8
        before jax 0.12; on a TPU with rows of fewer than 128 numbers.
      lanes: the size of a stored row is a multiple of this number, without effect on the results of
        functions. Small heads share a row, unless the dtype has at most 8 bits or values are slices
        of the keys. With 1, each head has a row without padding. The default on a TPU is 128. The
        default is 1 on other platforms; on a TPU it is also 1 if there are several devices but no
        `mesh`.
      mesh: mesh of devices; each device makes its share of the cache. On a mesh, planning and all
        functions that use buffers require `jax.set_mesh`; edits and queries of the table do not.
      sharding_rules: mesh axes that split the cache; default `sharding.ShardingRules()`.

    Returns:
      The empty cache. An attention layer has keys `[S, K, N, D]` and values `[S, K, N, Dv]`, or
      rows of n heads, `[S, K / n, N, row size]`. A recurrent layer has states
      `[S, Q / S * (E + 1), ...]`.

    Raises:
      ValueError: If S does not divide Q, or a count is not from 1 (`max_rollback`: 0) to 2**31 - 1.
      ValueError: If attention layers without a window have no `cells`.
      ValueError: If a stream has 2**30 cells or more, or a layer has 2**60 numbers or more.
      ValueError: If the placement is unknown, or does not support the number of cells N.
      ValueError: If the dtype is neither int8, int4 nor a signed floating dtype with NaN.
      ValueError: If the dtype has less than 16 bits, or is a pair of two dtypes, and values are
        slices of the keys.
      ValueError: If the dtype is int4, and a head size is odd.
      ValueError: If `rotate` is True, and a dtype has 16 bits or more or a head size is not a power
        of two.
      ValueError: If layers of a stacked cache have different sizes or ropes.
      ValueError: If a tuple does not have one value for each part.
      ValueError: If the devices of the mesh cannot get equal shares of streams or cells.
      ValueError: If a mesh axis would split two dimensions, such as streams and heads.
      ValueError: If `sharding_rules` is given, but no `mesh`.

    Examples:
      >>> spec = CacheSpec.attention(layers=2, kv_heads=3, head_dim=64)
      >>> cache = make_cache(spec, cells=512, sequences=8)
      >>> cache.buffers.k[0].shape, cache.nbytes
      ((1, 3, 512, 64), 1583140)
      >>> cache = make_cache(spec, cells=512, sequences=8, dtype=("int8", "int4"), rotate=True)
      >>> cache.buffers.k[0].codes.dtype, cache.buffers.v[0].packed.shape, cache.nbytes
      (dtype('int8'), (1, 3, 512, 32), 329764)

    llama.cpp: `llama_kv_cache`, `llama_memory_recurrent`, `llama_kv_cache_iswa` and
    `llama_memory_hybrid`, with the parameters `n_ctx`, `n_seq_max`, `kv_unified` (one stream),
    `type_k` and `type_v` (dtype; `q8_0` is as int8, and `q4_0` as int4), `n_ubatch`, `n_rs_seq`
    (`max_rollback`) and `swa_full`.
    """
    if not isinstance(spec, CacheSpec):
        raise TypeError(
            f"expected a CacheSpec, got {type(spec)}; make one, as CacheSpec.attention(layers=2, "
            f"kv_heads=3, head_dim=64)"
        )
    rules = ShardingRules() if sharding_rules is None else check_sharding_rules(sharding_rules)
    if mesh is not None:
        check_mesh(mesh)
    elif sharding_rules is not None:
        raise ValueError(
            f"expected a mesh for the sharding_rules, got None with {sharding_rules}; pass mesh= "
            f"too, or neither"
        )
    pools = check_sequences_and_streams(sequences, streams)
    by_part = {
        "cells": cells,
        "dtype": dtype,
        "rotate": rotate,
        "ubatch_size": ubatch_size,
        "max_rollback": max_rollback,
        "placement": placement,
        "stacked": stacked,
        "lanes": lanes,
    }
    devices = None if mesh is None else rules.devices(mesh, "kv_heads")
    make = partial(_make_from_spec, spec, pools, by_part, devices)
    if mesh is not None:
        return make_sharded(make, mesh, rules)
    if spec.parts:
        jax.eval_shape(make)  # raises for an invalid part before any array is made
    return make()


def _make_from_spec(
    spec: CacheSpec, pools: Mapping[str, int], options: Mapping[str, Any], devices: int | None
) -> Cache:
    if spec.parts:
        return compose_hybrid_cache(
            *(
                (_make_from_spec(part, pools, kwargs, devices), layers)
                for (part, layers), kwargs in zip(
                    spec.parts, _split_options(spec, options), strict=True
                )
            )
        )
    for name, value in options.items():
        if isinstance(value, tuple) and name != "dtype":
            raise ValueError(
                f"expected one {name} for a cache without parts, got {value}; pass a single one"
            )
    parse_placement(options["placement"])  # raises even if no layer uses the placement
    match spec.kind:
        case "recurrent":
            max_rollback = 0 if options["max_rollback"] is None else options["max_rollback"]
            return make_recurrent_cache(spec, max_rollback=max_rollback, **pools)
        case "cross_attention":
            of_sources = {**options, "placement": "any", "stacked": False}
            cache = make_attention_cache(spec, **pools, **of_sources, devices=devices)
            return merge(as_source_table(cache.table), cache.buffers)
        case _:
            return make_attention_cache(spec, **pools, **options, devices=devices)


def _split_options(spec: CacheSpec, options: Mapping[str, Any]) -> list[dict[str, Any]]:
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
