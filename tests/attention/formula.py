"""Attention in NumPy and float64, and random arrays for it.

P lists of T tokens attend to S streams of N cells, in the arrays of `jaxkv.ops.attention.dispatch`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxkv.core.tree_types import attach_node_types
from jaxkv.ops.attention.active_tiles import TILE
from jaxkv.ops.attention.bias import PositionBias
from jaxkv.ops.attention.softmax import AttentionOptions
from jaxkv.ops.attention.visibility import Visibility
from jaxkv.ops.storage.forms import form_of_dtype, storage_of
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.ops.storage.layer_stack import is_layer_view, make_layer_view, map_arrays

LAYER, LAYERS = 1, 3
"""The layer that tests use, and the number of layers of a stacked array."""

MOST = {"int8": 127, "float8_e4m3fn": 448}
"""The largest code of each dtype of 8 bits."""

PLAIN = AttentionOptions()


def formula(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    options: AttentionOptions = PLAIN,
    bias: Any = 0.0,
    xp: Any = np,
) -> Any:
    """Compute attention, `[P, T, H, Dv]`: in float64, or differentiable with `xp=jax.numpy`.

    k, v: `[P, K, N, D]` and `[P, K, N, Dv]` numbers, of the stream of each list.
    mask: `[P, T, N]` bool.
    bias: broadcasts to `[P, H, T, N]`; -inf hides a cell.
    """
    weights = softmax_weights(q, k, mask, options, bias, xp)
    v = xp.repeat(v, q.shape[2] // v.shape[1], axis=1)
    return xp.einsum("phtn,phnd->pthd", weights, v)


def softmax_weights(
    q: Any, k: Any, mask: Any, options: AttentionOptions = PLAIN, bias: Any = 0.0, xp: Any = np
) -> Any:
    """Compute the weights `[P, H, T, N]` of cells, with the arguments of `formula`."""
    if xp is np:
        q, k = (np.asarray(x, np.float64) for x in (q, k))
    heads, size = q.shape[2:]
    k = xp.repeat(k, heads // k.shape[1], axis=1)
    scale, cap = options.scale or size**-0.5, options.softcap
    logits = xp.einsum("pthd,phnd->phtn", q, k) * scale
    logits = (cap * xp.tanh(logits / cap) if cap else logits) + bias
    sees = xp.broadcast_to(mask[:, None] & (bias != -np.inf), logits.shape)
    sinks = xp.full(heads, -np.inf) if options.sinks is None else options.sinks
    highest = xp.max(logits, axis=3, initial=-1e30, where=sees)
    highest = xp.maximum(highest, sinks[None, :, None])
    weights = xp.where(sees, xp.exp(xp.where(sees, logits - highest[..., None], 0.0)), 0.0)
    total = weights.sum(3) + xp.exp(sinks[None, :, None] - highest)
    return weights / xp.where(total == 0, 1.0, total)[..., None]


def visible_mask(visibility: Visibility) -> np.ndarray:
    """Compute the mask `[P, T, N]` from owners, positions and window."""
    streams, at = np.asarray(visibility.streams), np.asarray(visibility.at, np.int64)[..., None]
    position = np.asarray(visibility.position, np.int64)[streams][:, None]
    owners = np.asarray(visibility.owners)[streams]
    owners = np.take_along_axis(owners, np.asarray(visibility.word)[..., None], axis=1)
    sees = owners & np.asarray(visibility.bit)[..., None] != 0
    if visibility.visible_until is not None:
        sees &= position <= np.asarray(visibility.visible_until)[..., None]
    elif visibility.causal:
        sees &= position <= at
    if visibility.window is None:
        return sees
    width = visibility.window.width
    inside = {
        "sliding": position > at - width,
        "chunked": position >= at // width * width,
        "symmetric": abs(position - at) <= width // 2,
    }
    return sees & inside[visibility.window.rule]


def bias_between(visibility: Visibility) -> Any:
    """Return the bias of a `Visibility`, in a shape that broadcasts to `[P, H, T, N]`."""
    if isinstance(visibility.bias, PositionBias):
        at = visibility.at[:, None, :, None]
        position = visibility.position[visibility.streams][:, None, None]
        # A finite bias and derivative for hidden cells.
        position = jnp.where(visible_mask(visibility)[:, None], position, at)
        heads = visibility.bias.heads[None, :, None, None]
        return visibility.bias.function.value(at, position, heads)
    return 0.0 if visibility.bias is None else visibility.bias.swapaxes(1, 2)


def numbers(stored: Any) -> jax.Array:
    """Return keys or values of all streams as numbers, `[S, K, N, D]`, from any storage form."""
    one = map_arrays(lambda x: x.all[LAYER::LAYERS] if is_layer_view(x) else x, stored)
    return storage_of(one).decode()


def quantise(x: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantise numbers `[..., D]`: return codes, and a scale for each 128 numbers."""
    x, most, codes, scales = np.asarray(x, np.float32), MOST[dtype], [], []
    for first in range(0, x.shape[-1], 128):
        group = x[..., first : first + 128]
        scale = np.abs(group).max(-1, keepdims=True) * np.float32(1 / most)
        scale[~np.isfinite(x).all(-1)] = np.nan
        there = scale > 0
        code = np.where(there, group, np.float32(0)) / np.where(there, scale, np.float32(1))
        code = np.clip(np.rint(code) if dtype == "int8" else code, -most, most)
        codes.append(code.astype(jnp.dtype(dtype)))
        scales.append(scale)
    return np.concatenate(codes, axis=-1), np.concatenate(scales, axis=-1)


def quantise_to_int4(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Quantise numbers `[..., D]`: return two codes in a byte, and a scale for each 32 numbers."""
    x = np.asarray(x, np.float32)
    codes, scales = np.zeros(x.shape, np.int64), []
    for first in range(0, x.shape[-1], 32):
        group = x[..., first : first + 32]
        largest = np.take_along_axis(group, abs(group).argmax(-1, keepdims=True), -1)
        scale = np.clip(largest / np.float32(-8), -(2.0**124), 2.0**124).astype(jnp.bfloat16)
        scale[~np.isfinite(x).all(-1)] = np.nan
        by = scale.astype(np.float32)
        there = abs(by) > 0
        code = np.where(there, group, np.float32(0)) / np.where(there, by, np.float32(1))
        codes[..., first : first + 32] = np.clip(np.rint(code), -8, 7)
        scales.append(scale)
    packed = codes[..., ::2] % 16 + 16 * (codes[..., 1::2] % 16)
    return packed.astype(np.uint8).view(np.int8), np.concatenate(scales, axis=-1)


def read_int4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers of packed codes."""
    codes = np.stack([packed.view(np.uint8) % 16, packed.view(np.uint8) // 16], axis=-1)
    codes = ((codes.reshape(*packed.shape[:-1], -1) + 8) % 16).astype(np.float32) - 8
    return codes * np.repeat(scales.astype(np.float32), 32, axis=-1)[..., : codes.shape[-1]]


def rotate_heads(x: Any) -> np.ndarray:
    """Multiply heads by a matrix of Sylvester, and return float32."""
    matrix = np.ones((1, 1))
    while len(matrix) < np.shape(x)[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.asarray(x @ matrix / np.sqrt(len(matrix)), np.float32)


def round_to_storage(x: Any, dtype: str, *, rotate: bool = False) -> np.ndarray:
    """Return the numbers that a cache of a dtype stores for keys or values."""
    if rotate:
        return rotate_heads(round_to_storage(rotate_heads(x), dtype))
    if dtype == "int4":
        return read_int4(*quantise_to_int4(x))
    codes, scales = quantise(x, dtype)
    return codes.astype(np.float32) * np.repeat(scales, 128, axis=-1)[..., : codes.shape[-1]]


class Case(NamedTuple):
    q: jax.Array
    k: Any
    v: Any
    visibility: Visibility

    def wanted(self, options: AttentionOptions = PLAIN) -> np.ndarray:
        keys = numbers(self.k)
        values = self.v.slice_values(keys) if isinstance(self.v, ValueSlice) else numbers(self.v)
        keys, values = (np.asarray(x)[np.asarray(self.visibility.streams)] for x in (keys, values))
        bias = np.asarray(bias_between(self.visibility), np.float64)
        return formula(self.q, keys, values, visible_mask(self.visibility), options, bias)

    def wanted_mass(self, options: AttentionOptions = PLAIN) -> np.ndarray:
        keys = np.asarray(numbers(self.k))[np.asarray(self.visibility.streams)]
        bias = np.asarray(bias_between(self.visibility), np.float64)
        mask = visible_mask(self.visibility)
        return softmax_weights(self.q, keys, mask, options, bias).sum(2)


def slope(weights: jax.Array, query: jax.Array, key: jax.Array, head: jax.Array) -> jax.Array:
    """A bias with weights `[H]`; not finite for cells at later positions."""
    return weights[head] * jnp.log1p((query - key).astype(jnp.float32))


def places(weights: jax.Array) -> PositionBias:
    function = attach_node_types(Partial(slope, weights))
    return PositionBias(function=function, heads=jnp.arange(len(weights)))


def visibility(
    seed=0, *, streams=3, lists=None, tokens=3, cells=40, holes=0.3, last=60, bias=None, heads=4,
    window=None, causal=True, visible_until=False,
) -> Visibility:  # fmt: skip
    """Make random tokens and cells: any positions, two words of owners, whole tiles empty.

    The last token of the last list is padding. `bias`: "function", "array", "array of all heads".
    """
    rng = np.random.default_rng(seed)
    lists = np.arange(streams) if lists is None else np.array(lists)
    shape, run = (len(lists), tokens), TILE if cells > TILE else 8
    owners = rng.integers(0, 8, (streams, 2, cells)).astype(np.uint32)
    empty = np.repeat(rng.random((streams, -(-cells // run))) < holes, run, axis=1)[:, :cells]
    owners[np.broadcast_to(empty[:, None], owners.shape)] = 0
    bit = np.uint32(1) << rng.integers(0, 3, shape).astype(np.uint32)
    bit[-1, -1] = 0
    at = rng.integers(0, last, shape)
    added = rng.normal(size=(*shape, heads, cells)).astype(np.float32)
    added[rng.random(added.shape) < 0.2], added[0, 0, 0] = -np.inf, -np.inf
    biases = {"array": added, "array of all heads": added[:, :, :1]}
    biases["function"] = places(jnp.linspace(-1, 1, heads))
    ahead = (at + rng.integers(-9, 1 if bias == "function" else 9, shape)).astype(np.int32)
    made = Visibility(
        position=rng.integers(0, last, (streams, cells)).astype(np.int32),
        owners=owners,
        streams=lists.astype(np.int32),
        at=at.astype(np.int32),
        word=rng.integers(0, 2, shape).astype(np.int32),
        bit=bit,
        window=window,
        causal=causal,
        all_streams=len(lists) == streams,
        visible_until=ahead if visible_until else None,
        bias=biases.get(bias),
    )
    return jax.tree.map(jnp.asarray, made)


def make_case(
    seed=0, *, heads=4, groups=2, size=8, value_dim=None, dtype="float32", queries="float32",
    factor=1.0, stacked=False, **options,
) -> Case:  # fmt: skip
    """Make random queries, keys and values for a random `Visibility`.

    value_dim: numbers of a value, or `ValueSlice`.
    dtype: dtype of keys and values, or a pair of both.
    factor: multiplies the queries.
    """
    rng = np.random.default_rng(seed)
    looks = visibility(seed, heads=heads, **options)
    streams, cells = looks.position.shape
    q = jnp.asarray(factor * rng.normal(size=(*looks.at.shape, heads, size)), queries)

    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)

    def stored(numbers, dtype):
        shape = (streams * (LAYERS if stacked else 1), groups, cells, numbers)
        x = jnp.asarray(rng.normal(size=shape), jnp.float32)
        like = storage_of(form_of_dtype(dtype).zeros((1,), dtype))
        x = like.encode(x.astype(like.decoded_dtype))
        return jax.tree.map(lambda y: make_layer_view(y, LAYER, LAYERS), x) if stacked else x

    k = stored(size, dtypes[0])
    v = value_dim if isinstance(value_dim, ValueSlice) else stored(value_dim or size, dtypes[1])
    return Case(q, k, v, looks)
