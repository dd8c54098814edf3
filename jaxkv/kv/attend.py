"""What a layer asks of an attention memory: write its keys and values, and attend."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxkv.batch import Ubatch, own_rows, rows_of, specs_of
from jaxkv.kv import slots
from jaxkv.kv.buffers import Buffers, own_cells, sizes_of, with_layer, write
from jaxkv.kv.cells import Cells
from jaxkv.kv.mask import sight_of
from jaxkv.mesh import first_of, on_shares, shares
from jaxkv.ops.attention import api as attention
from jaxkv.ops.attention.api import Implementation
from jaxkv.ops.attention.softmax import Options, joined_over


def attend(
    table: Cells,
    buffers: Buffers,
    layer: int,
    ubatch: Ubatch,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    causal: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Buffers, jax.Array]:
    """Write the keys and values of a ubatch and attend, see `jaxkv.attend`.

    Tokens of a stale ubatch are written nowhere and get NaN.
    """
    if not 0 <= layer < len(buffers.k):
        raise ValueError(f"wanted a layer from 0 to {len(buffers.k) - 1}, got {layer}")
    for name, new in (("q", q), ("k", k), ("v", v)):
        if not isinstance(new, jax.Array | np.ndarray):
            raise TypeError(f"wanted an array for {name}, got {type(new)}")
    for name, new, old in (("k", k, buffers.k[layer]), ("v", v, buffers.v[layer])):
        wanted = (*ubatch.valid.shape, old.shape[1], old.shape[3])
        if new.shape != wanted:
            raise ValueError(f"wanted {name} [R, T, K, D] of {wanted}, got {new.shape}")
    rows, tokens, heads, size = k.shape
    if q.ndim != 4 or (*q.shape[:2], q.shape[3]) != (rows, tokens, size) or q.shape[2] % heads:
        raise ValueError(
            f"wanted q [R, T, H, D] of {(rows, tokens, 'H', size)}, H a multiple of {heads}, got "
            f"{q.shape}"
        )
    options = Options(scale=scale, softcap=softcap, sinks=sinks)
    arrays = buffers.k[layer], buffers.v[layer], q, k, v
    keys, values, out = _in_layer(table, ubatch, arrays, options, causal, implementation)
    return with_layer(buffers, layer, keys, values), out


@partial(jax.jit, static_argnames=("causal", "implementation"))
def _in_layer(
    table: Cells,
    ubatch: Ubatch,
    arrays: tuple[jax.Array, ...],
    options: Options,
    causal: bool,
    implementation: Implementation | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write into the buffers of a layer and attend: traced and lowered once for all layers.

    The arrays are its keys and values, and the queries, keys and values of the tokens.

    On a mesh each device writes what falls into its share, and weighs the cells that it holds. Rows
    in the order of sequences lie where their streams do; other rows are looked at by all devices.
    What was weighed of the same rows is joined by one small message.
    """
    split = shares(table.rules, **sizes_of(arrays[0]))
    rows = rows_of(ubatch, split.streams)
    apart = () if rows else split.streams
    if split.cells and implementation in ("xla", "cudnn"):
        raise ValueError(
            f"{implementation!r} does not join what devices weigh of cells that are split: leave "
            f"the implementation to jaxkv"
        )

    def of_share(
        table: Cells, ubatch: Ubatch, arrays: tuple[jax.Array, ...], options: Options
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys, values, q, k, v = arrays
        ubatch = own_rows(ubatch, split.streams, table.streams)
        where, current = slots.committed_slots(table, ubatch)
        sight = sight_of(table, ubatch, causal=causal)
        if split.cells:
            first = first_of(split.cells, keys.shape[2])
            where = own_cells(where, first, keys.shape[2])
            sight = sight.of_cells(first, keys.shape[2])
        keys, values = write(keys, values, ubatch.row_stream, where, k, v)
        lists = q.reshape(*sight.at.shape, *q.shape[2:])
        sums = attention.weigh(lists, keys, values, sight, options, implementation)
        sums = joined_over(sums, (*split.cells, *apart))
        out = attention.finished(sums, lists, options).reshape(*q.shape[:3], -1)
        if apart:
            current = jax.lax.pmin(current.astype(jnp.int32), apart) == 1
        return keys, values, jnp.where(current[:, None, None, None], out, jnp.nan)

    of_new = P(rows, None, split.kv_heads)
    in_specs = (
        P(split.streams),
        specs_of(ubatch, split.streams),
        (split.spec, split.spec, of_new, of_new, of_new),
        P(split.kv_heads),
    )
    out_specs = split.spec, split.spec, of_new
    run = on_shares(table.rules, of_share, in_specs, out_specs)
    return run(table, ubatch, arrays, options)
