"""Work on a table of cells, done where its streams lie: on a mesh each device does its own.

Left to a compiler, a look-up by a stream that it does not know would bring the whole table to every
device. Without a mesh these functions add nothing.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkv.batch import Ubatch, own_rows, rows_of, specs_of
from jaxkv.kv.cells import Cells
from jaxkv.mesh import on_shares, shares

T = TypeVar("T")


def on_streams(cells: Cells, work: Callable[..., Any], *args: Any) -> Any:
    """Do work on each stream by itself.

    Args:
      cells: the table.
      work: is given the streams of a device, and what the arguments have for these.
      args: `[S, ...]` or `[Q, ...]`, or trees of such arrays.

    Returns:
      What comes of it, `[S, ...]` or `[Q, ...]`, where the streams are.
    """
    streams = P(shares(cells.rules, streams=cells.streams).streams)
    return on_shares(cells.rules, work, streams, streams)(cells, *args)


def told(cells: Cells, work: Callable[..., T], *args: jax.Array) -> T:
    """Do work on each stream by itself, and tell all devices what came of it in one message.

    Args:
      cells: the table.
      work: see `on_streams`; returns arrays of int32 or bool, all of one shape.
      args: `[S, ...]` or `[Q, ...]`.
    """
    axes = shares(cells.rules, streams=cells.streams).streams

    def of_share(*args: Any) -> T:
        return gathered(work(*args), axes)

    return on_shares(cells.rules, of_share, P(axes), P())(cells, *args)


def on_rows(
    cells: Cells, ubatch: Ubatch, work: Callable[[Cells, Ubatch, tuple, tuple], Any], out_specs: Any
) -> Any:
    """Do work on the rows of a ubatch where their streams lie.

    Args:
      cells: the table.
      ubatch: its rows.
      work: is given the streams of a device, and their rows alone where rows are in the order of
        sequences, or else all rows, of which those of other streams are padding; and the axes
        that split the rows, and those along which devices have other padding.
      out_specs: how what it returns is split, made of the axes of the streams.
    """
    axes = shares(cells.rules, streams=cells.streams).streams
    rows = rows_of(ubatch, axes)
    apart = () if rows else axes

    def of_share(cells: Cells, ubatch: Ubatch) -> Any:
        return work(cells, own_rows(ubatch, axes, cells.streams), rows, apart)

    run = on_shares(cells.rules, of_share, (P(axes), specs_of(ubatch, axes)), out_specs(axes))
    return run(cells, ubatch)


def gathered(found: T, axes: tuple[str, ...]) -> T:
    """Return what devices along some axes found, int32 or bool of one shape, one after another."""
    if not axes:
        return found
    leaves, form = jax.tree.flatten(found)
    packed = jnp.stack([x.astype(jnp.int32) for x in leaves], axis=-1)
    packed = jax.lax.all_gather(packed, axes, tiled=True)
    return form.unflatten([packed[..., i].astype(x.dtype) for i, x in enumerate(leaves)])
