"""Construction of an attention cache: checks of sizes, an empty table and empty buffers."""

from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, merge
from jaxkv.cache_spec import CacheSpec
from jaxkv.core.constants import MAX_CELLS
from jaxkv.core.validate import check_count, check_shape
from jaxkv.kv.buffers import Buffers
from jaxkv.kv.cells import empty_fields
from jaxkv.kv.layer_kv import HeadSizes
from jaxkv.kv.placement import TILE, FirstFit, Placement, Striped
from jaxkv.kv.table import CellTable
from jaxkv.kv.tiles import Tiled
from jaxkv.ops.storage.forms import form_of_dtype
from jaxkv.ops.storage.head_rows import LANES
from jaxkv.ops.storage.storage import Stored
from jaxkv.window import num_cells_for_window

MIN_SEQUENCES_IN_TILES = 8
"""Smallest number of sequences of a stream that is in tiles by default; fewer gain no time."""

MIN_CELLS_IN_TILES = 4096
"""Smallest number of cells of a stream that is in tiles by default."""

KVDtype: TypeAlias = jax.typing.DTypeLike | tuple[jax.typing.DTypeLike, jax.typing.DTypeLike]
"""Dtype of keys and values, or a pair of both dtypes."""

HEAD_DEVICES: ContextVar[int | None] = ContextVar("HEAD_DEVICES", default=None)
"""Number of devices that split heads, set while `sharding.shapes` makes a cache."""


def make_attention_cache(
    spec: CacheSpec,
    *,
    cells: int | None,
    sequences: int,
    streams: int,
    dtype: KVDtype,
    rotate: bool = False,
    ubatch_size: int,
    max_rollback: int | None,
    placement: str | Placement | None,
    stacked: bool,
    lanes: int | None,
    devices: int | None,
) -> Cache:
    """Implement `make_cache` for attention layers."""
    chosen = parse_placement(placement)
    dtypes = parse_dtypes(dtype)
    ubatch_size = check_count(ubatch_size, "ubatch_size")
    rollback = check_count(32 if max_rollback is None else max_rollback, "max_rollback", low=0)
    window_ubatch_size = None
    if spec.window is not None:
        window_cells = num_cells_for_window(
            spec.window,
            ubatch_size=ubatch_size,
            max_rollback=rollback,
            sequences_per_stream=sequences // streams,
        )
        window_cells = -(-window_cells // chosen.cell_multiple) * chosen.cell_multiple
        if cells is None or check_count(cells, "cells") > window_cells:
            cells, window_ubatch_size = window_cells, ubatch_size  # sequences need no more cells
    if cells is None:
        read = "sources" if spec.kind == "cross_attention" else "layers that see the whole text"
        raise ValueError(f"expected a number of cells for {read}, got None; pass cells=")
    cells = check_count(cells, "cells of a stream", high=MAX_CELLS - 1)
    devices = HEAD_DEVICES.get() if devices is None else devices
    if placement is None and devices is None:  # no mesh
        chosen = default_placement(cells, sharing=sequences // streams)
    chosen.check_cells(cells)
    lanes = default_lanes(devices) if lanes is None else check_count(lanes, "lanes")
    fields, buffers = _make_arrays(
        spec,
        cells=cells,
        sequences=sequences,
        streams=streams,
        dtypes=dtypes,
        rotate=bool(rotate),
        stacked=bool(stacked),
        lanes=lanes,
        devices=devices or 1,
    )
    table = CellTable(
        **fields,
        placement=chosen,
        window=spec.window,
        ubatch_size=window_ubatch_size,
    )
    return merge(table, buffers)


def parse_dtypes(dtype: KVDtype) -> tuple[jnp.dtype, jnp.dtype]:
    """Return the dtypes of keys and of values.

    >>> [x.name for x in parse_dtypes(("int8", "int4"))], [x.name for x in parse_dtypes("int8")]
    (['int8', 'int4'], ['int8', 'int8'])
    """
    pair = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    if len(pair) != 2:
        raise ValueError(
            f"expected one dtype, or a pair for keys and values, got {dtype}; pass a pair, as "
            f'("int8", "int4")'
        )
    for each in pair:
        form_of_dtype(each)  # raises for a dtype without a form
    return jnp.dtype(pair[0]), jnp.dtype(pair[1])


def default_placement(cells: int, *, sharing: int, platform: str | None = None) -> Placement:
    """Return the default of the option `placement`: tiles for large pools on a CPU.

    sharing: number of sequences that share a stream.

    >>> [default_placement(cells, sharing=8, platform="cpu").name for cells in (2048, 4096, 4100)]
    ['any', 'tiled', 'any']
    """
    platform = jax.default_backend() if platform is None else platform
    is_large = sharing >= MIN_SEQUENCES_IN_TILES and cells >= MIN_CELLS_IN_TILES
    return Tiled() if platform == "cpu" and is_large and cells % TILE == 0 else FirstFit()


def default_lanes(devices: int | None = None, platform: str | None = None) -> int:
    """Return the default of the option `lanes`: 128 on a TPU, otherwise 1.

    The default is also 1 if JAX has several devices and `devices` is unknown, because heads of
    one row cannot be split over several devices.
    """
    platform = jax.default_backend() if platform is None else platform
    is_known = devices is not None or jax.device_count() == 1
    return LANES if platform == "tpu" and is_known else 1


def choose_heads_per_row(
    lanes: int, heads: Sequence[HeadSizes], dtypes: Sequence[jnp.dtype], devices: int
) -> int:
    """Return how many heads share a row of `lanes` numbers, a divisor of each `kv_heads`.

    >>> sizes = [HeadSizes(kv_heads=8, head_dim=64, values=64)]
    >>> dtypes = [jnp.dtype("float32")]
    >>> [choose_heads_per_row(128, sizes, dtypes, devices) for devices in (1, 4, 8)]
    [2, 2, 1]
    """
    is_encoded = any(form_of_dtype(dtype).is_encoded for dtype in dtypes)
    if is_encoded or any(layer.latent for layer in heads):
        return 1
    counts = [layer.kv_heads for layer in heads]
    most = min(lanes // max(max(layer.head_dim, layer.value_dim) for layer in heads), *counts)

    def fits(n: int, count: int) -> bool:
        return count % n == 0 and (count % devices != 0 or count // n % devices == 0)

    return next(n for n in range(max(most, 1), 0, -1) if all(fits(n, count) for count in counts))


@partial(
    jax.jit,
    static_argnums=0,
    static_argnames=(
        *("cells", "sequences", "streams", "dtypes", "rotate", "stacked", "lanes", "devices"),
    ),
)
def _make_arrays(
    spec: CacheSpec,
    *,
    cells: int,
    sequences: int,
    streams: int,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    rotate: bool,
    stacked: bool,
    lanes: int,
    devices: int,
) -> tuple[dict[str, jax.Array], Buffers]:
    fields = empty_fields(
        stacked_layers=spec.layers if stacked else 0,
        cells=cells,
        sequences=sequences,
        streams=streams,
        fields=spec.fields,
    )
    buffers = _zero_buffers(spec, streams, cells, dtypes, rotate, stacked, lanes, devices)
    return fields, buffers


def _zero_buffers(
    spec: CacheSpec,
    streams: int,
    cells: int,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    rotate: bool,
    stacked: bool,
    lanes: int,
    devices: int,
) -> Buffers:
    names = "kv_heads", "head_dim", "value_dim", "rope"
    heads, keys, values, ropes = (_per_layer(spec, name) for name in names)
    head_sizes = tuple(map(HeadSizes, heads, keys, values))
    _check_head_sizes(head_sizes, dtypes, rotate=rotate)
    n = choose_heads_per_row(lanes, head_sizes, dtypes, devices)
    shapes = [(streams, count // n, cells) for count in heads]

    def row_size(size: int) -> int:
        return -(-n * size // lanes) * lanes

    for shape, sizes in zip(shapes, head_sizes, strict=True):
        check_shape((*shape, row_size(sizes.head_dim)), "keys")
        check_shape((*shape, row_size(sizes.value_dim)), "values")
    if stacked:
        for name, sizes in zip(names, (heads, keys, values, ropes), strict=True):
            if len(set(sizes)) > 1:
                raise ValueError(
                    f"expected the same {name} in all layers for stacked=True, got {sizes}; leave "
                    f"stacked out, and go over the layers in Python"
                )
        shapes = [(streams * spec.layers, heads[0] // n, cells)]

    def zeros(dtype: jnp.dtype, shape: tuple[int, int, int], size: int) -> Stored:
        return form_of_dtype(dtype).zeros((*shape, row_size(size)), dtype)

    arrays = list(zip(shapes, head_sizes, strict=False))  # one pair if layers are stacked

    return Buffers(
        k=tuple(zeros(dtypes[0], shape, sizes.head_dim) for shape, sizes in arrays),
        v=tuple(
            sizes.latent or zeros(dtypes[1], shape, sizes.value_dim) for shape, sizes in arrays
        ),
        ropes=ropes,
        head_sizes=head_sizes,
        stacked=stacked,
        rotated=rotate,
    )


def _check_head_sizes(
    head_sizes: Sequence[HeadSizes], dtypes: tuple[jnp.dtype, jnp.dtype], *, rotate: bool
) -> None:
    """Raise a ValueError if heads cannot be stored in the dtypes, or cannot be rotated."""
    encoded = [form_of_dtype(dtype).is_encoded for dtype in dtypes]
    names = " and ".join(dict.fromkeys(dtype.name for dtype in dtypes))
    if rotate and not all(encoded):
        raise ValueError(
            f"expected keys and values in 8 or 4 bits for rotate=True, got {names}; leave rotate "
            f"out"
        )
    for sizes in head_sizes:
        if sizes.latent and (any(encoded) or dtypes[0] != dtypes[1]):
            raise ValueError(
                f"expected one dtype of 16 bits or more where values are a part of the keys, got "
                f"{names}; take bfloat16"
            )
        for dtype, size in zip(dtypes, (sizes.head_dim, sizes.value_dim), strict=True):
            if rotate and size & (size - 1):
                raise ValueError(
                    f"expected heads of a power of two for rotate=True, got {size}; leave rotate "
                    f"out"
                )
            if dtype == jnp.int4 and size % 2:
                raise ValueError(f"expected heads of an even size for int4, got {size}; take int8")


def _per_layer(spec: CacheSpec, name: str) -> tuple[Any, ...]:
    value = getattr(spec, name)
    return value if isinstance(value, tuple) else (value,) * spec.layers


def parse_placement(placement: str | Placement | None) -> Placement:
    """Return a placement, which may be given by its name; None is "any".

    >>> parse_placement("striped:8")
    Striped(stripes=8)
    """
    if isinstance(placement, Placement):
        return placement
    kind, _, n = str(placement).partition(":")
    if kind == "striped" and n.isascii() and n.isdigit() and int(n):
        return Striped(int(n))
    named = {None: FirstFit(), "any": FirstFit(), "tiled": Tiled()}
    if placement is None or isinstance(placement, str) and placement in named:
        return named[placement]
    raise ValueError(
        f"expected a placement of 'any', 'tiled', 'striped:n' for n runs of cells, or an object of "
        f"a subclass of Placement, got {placement!r}; write 'striped:8' for eight devices that "
        f"split cells"
    )
