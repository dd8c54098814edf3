"""Making an attention cache: its sizes checked, its table and buffers empty."""

from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec, Ropes
from jaxkv.core.constants import MAX_CELLS
from jaxkv.core.validate import check_count, check_shape
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import Placement, empty_fields
from jaxkv.kv.table import CellTable
from jaxkv.kv.tiles import TILE, check_cells
from jaxkv.ops.mla import ValueSlice
from jaxkv.ops.quantised import zeros
from jaxkv.rope import NOT_GIVEN
from jaxkv.spec import checked_streams
from jaxkv.window import Window, cells_for


def make_kv_cache(
    *,
    layers: int,
    cells: int | None = None,
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    value_dim: int | slice | Sequence[int | slice] | None = None,
    sequences: int = 1,
    streams: int = 1,
    window: Window | None = None,
    ubatch_size: int | None = None,
    max_rollback: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    rope: Ropes = NOT_GIVEN,
    placement: Placement = "scattered",
    shards: int | None = None,
    stacked: bool = False,
) -> Cache:
    """Make an empty attention cache.

    Args:
      layers: L, the attention layers.
      cells: N, the tokens that fit into each stream. With a window it may be left out: then there
        are cells for the window, a ubatch and a rollback, for each sequence of a stream.
      kv_heads: K, the key/value heads, of all layers or one number for each.
      head_dim: D, the numbers of a key, of all layers or one for each.
      value_dim: Dv, the numbers of a value, likewise; by default D. A slice, where values are some
        of the numbers of their keys, as in latent attention (MLA): they take no bytes, and models
        give keys alone. The slice leaves out at least one number of the key, and all that its rope
        turns, which come first. A dtype of 8 bits is refused.
      sequences: Q, the sequences that may be told apart.
      streams: S, a divisor of Q: how many pools of cells there are. Sequence q lives in stream
        q // (Q // S). A pool gives room to any of its sequences and forks without a copy; with its
        own stream, S = Q, a sequence costs what it holds itself, however long its neighbours are.
        Between 1 and Q, as for a pool on each of several devices, a copy from one stream to another
        may find no room, see `seq_cp`.
      window: how far back tokens look, see `jaxkv.window`. None for everything.
      ubatch_size: the most tokens that will be computed at once, by default 512; larger plans are
        refused. Only where `cells` is left out.
      max_rollback: how many tokens can be taken back (`seq_rm` of an end) though a window is full,
        by default 32. Only where `cells` is left out; more cells mean more rollback.
      dtype: of keys and values: a floating one, or int8. Those of 8 bits, int8 and float8_e4m3fn
        among them, are quantised: each head of a cell has a scale beside its codes, float32, for
        keys and for values, and one for each 128 numbers where it has more. They take 0.27 times
        the bytes of float32 at a head of 64. What is written is rounded, and nothing is
        differentiated through that: derivatives by queries are right, and those by the keys and
        values that are written are zero. Take another dtype to train.
      rope: how keys were rotated when they come in, for all layers or one for each; None where
        keys carry no position. Left out, all works that moves no keys: `seq_add`, `seq_div`,
        `generation.context_shift` and `generation.self_extend` raise.
      placement: which cells a ubatch may get: "scattered", any, the lowest first; "contiguous", one
        run of neighbours, which is refused when there is room but no run (see `compact`);
        "striped", any, a few from each of `shards` runs in turn, so that on a mesh that splits
        cells a text is spread evenly over the devices; or "tiled", any, but first those of tiles of
        64 cells that no other sequence uses, while there are any, so that on a processor one pool
        is about as fast as a stream for each sequence. N is a multiple of 64 then; below 256 cells
        it may be any number, and tiles have fewer cells, which gains nothing.
      shards: how many runs of equal length the cells are, N a multiple of it: as many as devices
        split them. Only with "striped". It orders cells and nothing else, so the cache works on
        any mesh, or none.
      stacked: whether one array holds the keys of all layers, and one their values, so that the
        number of a layer may be traced, as in a scan over layers; see below. All layers must be
        alike.

    Returns:
      The cache, all cells empty.

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
      TypeError: when a count is no integer.
      ValueError: when a count is below 1 or above 2**31 - 1, N is 2**30 or more, keys or values of
        a layer are 2**60 numbers or more, `streams` does not divide Q, `cells` is missing or given
        together with what it is counted from, there is no such placement, `shards` is missing,
        given with another one, or does not divide N, 64 does not divide an N of tiles that is 256
        or more, the dtype is neither a floating one with signs and NaN nor int8, sizes and ropes do
        not fit the layers, or the layers of a stacked cache are not alike.

    Examples:
      >>> cache = make_kv_cache(layers=2, cells=512, kv_heads=3, head_dim=64, sequences=8)
      >>> cache.buffers.k[0].shape, nbytes(cache)
      ((1, 3, 512, 64), 1583152)

      Of 8 bits, with scales:

      >>> small = make_kv_cache(
      ...     layers=2, cells=512, kv_heads=3, head_dim=64, sequences=8, dtype="int8"
      ... )
      >>> keys = small.buffers.k[0]
      >>> keys.dtype, keys.codes.shape, keys.scales.shape, nbytes(small)
      (dtype('int8'), (1, 3, 512, 64), (1, 3, 512, 1), 428080)

      A window of 128 positions, for two sequences with a stream each:

      >>> cache = make_kv_cache(
      ...     layers=2, kv_heads=3, head_dim=64, sequences=2, streams=2, window=window.sliding(128)
      ... )
      >>> cache.buffers.k[0].shape
      (2, 3, 672, 64)

      Two pools for four sequences, of which 0 and 1 share the first:

      >>> cache = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2, sequences=4, streams=2)
      >>> batch = make_batch([[1], [2], [3]], sequences=[3, 1, 0])
      >>> print(show(apply(cache, init_batch(cache, batch))))
      owner    0 1 . .
      position 0 0 . .
      owner    3 . . .
      position 0 . . .

      Two shards of four cells, as for two devices: both hold as much of a text.

      >>> cache = make_kv_cache(
      ...     layers=1, cells=8, kv_heads=1, head_dim=2, placement="striped", shards=2
      ... )
      >>> print(show(apply(cache, init_batch(cache, make_batch([1, 2, 3, 4, 5, 6])))))
      owner    0 0 0 . 0 0 0 .
      position 0 2 4 . 1 3 5 .

      One array for three layers, that a scan goes over:

      >>> cache = make_kv_cache(layers=3, cells=4, kv_heads=1, head_dim=2, stacked=True)
      >>> (ubatch,) = init_batch(cache, make_batch([1, 2])).ubatches
      >>> def layer(carry, number):
      ...     cache, x = carry
      ...     cache, out = attend(cache, number, ubatch, x, x, x)
      ...     return (cache, x + out), None
      >>> carry = apply(cache, ubatch), jnp.ones((1, 2, 1, 2))
      >>> (cache, x), _ = jax.lax.scan(layer, carry, jnp.arange(3))
      >>> cache.buffers.k[0].shape, cache.buffers.k[0][:, 0, 0, 0], x[0, 1, 0, 0]
      ((3, 1, 4, 2), Array([1., 2., 4.], dtype=float32), Array(8., dtype=float32))

      Tiles of two cells, for two sequences. The third token of 1 finds none that is empty:

      >>> cache = make_kv_cache(
      ...     layers=1, cells=8, kv_heads=1, head_dim=2, sequences=2, placement="tiled"
      ... )
      >>> batch = make_batch([[1, 2, 3, 4, 5], [6, 7, 8]], sequences=[0, 1])
      >>> print(show(apply(cache, init_batch(cache, batch))))
      owner    0 0 0 0 0 1 1 1
      position 0 1 2 3 4 2 0 1

    llama.cpp: `llama_kv_cache`, with `kv_unified` for one stream, `n_swa` for the window, and
    `type_k` and `type_v` for the dtype.
    """
    spec = CacheSpec.attention(layers, kv_heads, head_dim, value_dim, window, rope)
    layers, sequences = spec.layers, check_count(sequences, "sequences")
    streams = checked_streams(streams, sequences)
    shards = _checked_shards(placement, shards)
    _check_dtype(dtype)
    if cells is None:
        if window is None:
            raise ValueError("a cache without a window needs to be told its cells: pass cells=")
        ubatch_size = check_count(512 if ubatch_size is None else ubatch_size, "ubatch_size")
        max_rollback = check_count(
            32 if max_rollback is None else max_rollback, "max_rollback", low=0
        )
        sharing = sequences // streams
        cells = cells_for(
            window, ubatch_size=ubatch_size, max_rollback=max_rollback, sharing=sharing
        )
        unit = TILE if placement == "tiled" else shards
        cells = -(-cells // unit) * unit
    elif ubatch_size is not None or max_rollback is not None:
        raise ValueError(
            "cells are counted from ubatch_size and rollback, or given: pass cells alone, or leave "
            "it out"
        )
    heads, keys, values, ropes = map(spec.per_layer, ("kv_heads", "head_dim", "value_dim", "rope"))
    if jnp.dtype(dtype).itemsize == 1 and any(isinstance(value, ValueSlice) for value in values):
        raise ValueError(
            f"expected a dtype of 16 bits or more where values are a part of the keys, got "
            f"{jnp.dtype(dtype)}; take bfloat16"
        )
    cells = check_count(cells, "cells of a stream", high=MAX_CELLS - 1)
    if cells % shards:
        raise ValueError(
            f"wanted a number of cells that {shards} shards divide, got {cells}: take "
            f"{-(-cells // shards) * shards}"
        )
    if placement == "tiled":
        check_cells(cells)
    shapes = [(streams, heads[i], cells) for i in range(layers)]
    for shape, key, value in zip(shapes, keys, values, strict=True):
        check_shape((*shape, key), "keys")
        if not isinstance(value, ValueSlice):
            check_shape((*shape, value), "values")
    table = CellTable(
        **empty_fields(layers=layers, cells=cells, sequences=sequences, streams=streams),
        placement=placement,
        shards=shards,
        window=window,
        ubatch_size=ubatch_size,
    )
    if stacked:
        _check_alike(kv_heads=heads, head_dim=keys, value_dim=values, rope=ropes)
        shapes, keys, values = [(streams * layers, heads[0], cells)], keys[:1], values[:1]
    buffers = Buffers(
        k=tuple(zeros((*shape, n), dtype) for shape, n in zip(shapes, keys, strict=True)),
        v=tuple(
            n if isinstance(n, ValueSlice) else zeros((*shape, n), dtype)
            for shape, n in zip(shapes, values, strict=True)
        ),
        ropes=ropes,
        stacked=stacked,
    )
    return merge(table, buffers)


def _check_alike(**sizes: tuple[Any, ...]) -> None:
    """Raise a ValueError, by name, unless all layers are alike."""
    for name, of_each in sizes.items():
        if any(one != of_each[0] for one in of_each):
            raise ValueError(
                f"wanted the same {name} in all layers for stacked=True, got {of_each}: leave "
                f"stacked out, and go over the layers in Python"
            )


def _check_dtype(wanted: jax.typing.DTypeLike) -> None:
    """Raise a ValueError unless keys and values can be stored in a dtype."""
    try:
        dtype = jnp.dtype(wanted)
    except TypeError:
        raise TypeError(f"wanted a dtype for keys and values, got {wanted!r}") from None
    signs = np.array([0.0, -1.0, np.nan])  # what a stored key may have to be
    floating = jnp.issubdtype(dtype, jnp.floating) and np.array_equal(
        signs.astype(dtype).astype(float), signs, equal_nan=True
    )
    if not floating and dtype != jnp.int8:
        raise ValueError(
            f"wanted a floating dtype with signs and NaN or int8 for keys and values, got "
            f"{dtype}: of 8 bits take int8 or float8_e4m3fn, which get a scale for each head and "
            f"cell"
        )


def _checked_shards(placement: Placement, shards: int | None) -> int:
    """Return among how many shards a placement deals cells, 1 for those that do not."""
    if placement not in get_args(Placement):
        raise ValueError(f"wanted a placement of {get_args(Placement)}, got {placement!r}")
    if placement == "striped":
        if shards is None:
            raise ValueError(
                "wanted shards for striped cells, got none: pass shards=, the devices that will "
                "split the cells"
            )
        return check_count(shards, "shards")
    if shards is not None:
        raise ValueError(
            f"wanted shards only with placement='striped', got {shards} and {placement!r}: leave "
            f"shards out, or take that placement"
        )
    return 1
