"""Functions that a model calls in each layer, for a ubatch that was applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.batch import Ubatch
from jaxkv.cache import Cache, merge, split
from jaxkv.core.array_utils import is_traced
from jaxkv.core.donation import explain_donation_errors
from jaxkv.core.validate import check_int32
from jaxkv.kv.buffers import Buffers
from jaxkv.table import KVView, check_made_for, static_layer_number

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree, Shaped

    from jaxkv.ops.attention.bias import Bias
    from jaxkv.ops.attention.dispatch import Implementation


@explain_donation_errors
def attend(
    cache: Cache,
    layer: int | Int32[Array, ""],
    ubatch: Ubatch,
    q: Float[Array, "R T H D"],
    k: Float[Array, "R T K D"] | None = None,
    v: Float[Array, "R T K Dv"] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Cache, Float[Array, "R T H Dv"]]:
    """Write keys and values of a ubatch into a layer, and attend to the visible cells.

    A token attends to the cells of its sequences at positions up to its own, within the window.

    Args:
      cache: a cache that `ubatch` was applied to.
      layer: 0 to L - 1, static. It may be traced if the cache is stacked, see `make_cache`.
      ubatch: the tokens. Keys and values of padding and of a refused plan are not written.
      q: queries, rotated by the layer's rope.
      k: keys, rotated by the layer's rope. Without `k` and `v` no key is written, as for layers
        that share the keys of another layer.
      v: values. Left out if they are a part of the keys (`value_dim` of `CacheSpec.attention`).
      scale: factor of the dot products; default 1 / sqrt(D).
      softcap: c in c * tanh(x / c), applied to scaled products (Gemma 2).
      sinks: a logit for each head that takes part in the softmax and has no value.
      bias: added to scaled and capped products, see below.
      causal: False makes later tokens of the ubatch visible, limited only by a symmetric window.
        The output of a token is NaN if the plan has later tokens of the same sequence in another
        ubatch; use a larger `ubatch_size`.
      visible_until: the last position visible to each token, by default its own; may be traced. It
        may be after the token (images, prefixes) or before it. A token gets NaN if its ubatch ends
        before that position. The window is counted from the token's own position.
      implementation: "tiles", "whole", "pallas", "xla" or "cudnn", see
        `jaxkv.ops.attention.dispatch`. None selects one for the platform.

    Returns:
      The cache with keys and values written, and the output in the dtype of `q`. Output rows are:

      - zeros for padding, for a refused plan, and for a token without visible cells;
      - NaN for a token that attends to a non-finite key or value; other tokens are unaffected;
      - NaN for a ubatch that is stale or was not applied, whose keys are not written either;
      - NaN for all tokens of a stream if the layer was not written after an `apply`, until `rewind`
        restores a table from before that `apply` or all tokens of the stream are removed.

    A bias is a function `(query_position, cell_position, head) -> logits` of int32 arrays of four
    dimensions that broadcast to `[P, H, T, N]`. Positions are the present ones, so it follows
    `seq_add`. It is called tile by tile, and is static and hashed: define it once, with weights as
    the leaves of a `jax.tree_util.Partial` or of a dataclass that is a pytree. A bias may also be
    an array of floats that broadcasts to `[R, T, H, N]`, for the cells in the order of `read_kv`.
    Both are differentiable. Numbers below -1.7e38 count as -1.7e38. A bias of -inf hides a cell
    from a head; NaN or inf makes the head's output NaN.

    Raises:
      ValueError: If a shape does not fit the cache, or `layer` is not in `[0, L)`.
      ValueError: If the ubatch wrote this layer before in the same trace. Outside of tracing the
        later write wins.
      ValueError: If the ubatch was planned for a cache with another spec, or the buffers were
        donated.
      ValueError: If the implementation does not support the arguments, or `softcap` is not above 0.
      ValueError: If `visible_until` and `causal=False` are both given.
      ValueError: If the ubatch is one of `init_batch(encoder=True)`, and the layer not
        cross-attention.
      TypeError: If a plan is passed as ubatch, or something else than an array of floats as array.
      TypeError: If `layer` is traced and the cache is not stacked, or `causal` is not a static
        bool.
      TypeError: If only one of `k` and `v` is given, or the cache has no attention layers.
      TypeError: If the bias does not return floats, or closes over traced values.

    Examples:
      The second token attends to both; a ubatch that was not applied gets NaN:

      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=1), cells=4)
      >>> (ubatch,) = init_batch(cache, make_batch([1, 2])).ubatches
      >>> q, v = jnp.zeros((1, 2, 1, 1)), jnp.array([2.0, 4.0]).reshape(1, 2, 1, 1)
      >>> after, out = attend(apply(cache, ubatch), 0, ubatch, q, q, v)
      >>> out[0, :, 0, 0], after.buffers.v[0][0, 0, :, 0]
      (Array([2., 3.], dtype=float32), Array([2., 4., 0., 0.], dtype=float32))
      >>> attend(cache, 0, ubatch, q, q, v)[1][0, :, 0, 0]
      Array([nan, nan], dtype=float32)

      Another layer attends to the same keys and values:

      >>> attend(after, 0, ubatch, q + 1)[1][0, :, 0, 0]
      Array([2., 3.], dtype=float32)

      A bias that falls by log 3 a position, and two tokens that attend to each other:

      >>> def nearer(query, key, head):
      ...     return (key - query) * math.log(3.0)
      >>> attend(after, 0, ubatch, q, bias=nearer)[1][0, :, 0, 0]
      Array([2. , 3.5], dtype=float32)
      >>> attend(after, 0, ubatch, q, visible_until=jnp.array([[1, 1]]))[1][0, :, 0, 0]
      Array([3., 3.], dtype=float32)

    llama.cpp: `cpy_k`, `cpy_v` and `build_attn`; its only bias is ALiBi, `f_max_alibi_bias`.
    """
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "bias": bias}
    visibility = {"causal": causal, "visible_until": visible_until}
    table, buffers = split(cache)
    check_made_for(table, ubatch)
    number = _layer_number(buffers, layer)
    table, buffers, out = table.attend(
        buffers, number, ubatch, q, k, v, implementation=implementation, **options, **visibility
    )
    if k is not None:
        cache = _record_write(cache, number, ubatch)
    return replace(cache, table=table, buffers=buffers), out


@explain_donation_errors
def write_kv(
    cache: Cache,
    layer: int | Int32[Array, ""],
    ubatch: Ubatch,
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K Dv"] | None = None,
) -> Cache:
    """Write keys and values of a ubatch into a layer, without attention.

    `write_kv`, `read_kv` and attention of your own do the same as `attend`.

    Args:
      cache: a cache that `ubatch` was applied to.
      layer: as for `attend`.
      ubatch: as for `attend`.
      k: keys, rotated by the layer's rope.
      v: values, unless they are a part of the keys.

    Returns:
      The next cache. If a key or value of a head is not finite in the buffers' dtype, the value is
      stored as zero and the key as NaN.

    Raises:
      ValueError: As `attend`.
      TypeError: As `attend`.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=1), cells=4)
      >>> (ubatch,) = init_batch(cache, make_batch([1, 2])).ubatches
      >>> k, v = jnp.ones((1, 2, 1, 1)), jnp.array([2.0, jnp.inf]).reshape(1, 2, 1, 1)
      >>> cache = write_kv(apply(cache, ubatch), 0, ubatch, k, v)
      >>> cache.buffers.k[0][0, 0, :, 0], cache.buffers.v[0][0, 0, :, 0]
      (Array([ 1., nan,  0.,  0.], dtype=float32), Array([2., 0., 0., 0.], dtype=float32))

    llama.cpp: `cpy_k` and `cpy_v`.
    """
    table, buffers = split(cache)
    check_made_for(table, ubatch)
    number = _layer_number(buffers, layer)
    table, buffers = table.write_kv(buffers, number, ubatch, k, v)
    return replace(_record_write(cache, number, ubatch), table=table, buffers=buffers)


@explain_donation_errors
def read_kv(
    cache: Cache,
    layer: int | Int32[Array, ""],
    ubatch: Ubatch,
    *,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
) -> KVView:
    """Return keys, values and mask of a layer for the tokens of a ubatch.

    Keys and values are whole streams, as stored. Tokens are P lists of T: rows of one stream are
    one list. Reshape queries and positions of the ubatch with `x.reshape(*mask.shape[:2], ...)`.

    Args:
      cache: a cache that `ubatch` was applied to, and whose layer was written.
      layer: as for `attend`.
      ubatch: the tokens that attend.
      causal: as for `attend`.
      visible_until: as for `attend`.

    Returns:
      `(k, v, mask, positions)`, see `KVView`.

      - Values are finite. Keys that are masked for all tokens may be NaN: mask logits with
        `jnp.where`, not by a product or a sum. For derivatives, replace these keys by zeros first.
      - The key of a token that was not finite is NaN.
      - Padding and a refused plan have an empty mask.
      - A stale ubatch has a full mask and NaN keys. In the other cases in which `attend` returns
        NaN, all keys of the list are NaN.

    Raises:
      ValueError: As `attend`.
      TypeError: As `attend`.

    Examples:
      Two sequences of one stream are one list. `attend` computes `ops.attention.attention` of it:

      >>> cache = make_cache(
      ...     CacheSpec.attention(layers=1, kv_heads=1, head_dim=1), cells=4, sequences=2
      ... )
      >>> (ubatch,) = init_batch(cache, make_batch([[1, 2], [3, 4]])).ubatches
      >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
      >>> cache, out = attend(apply(cache, ubatch), 0, ubatch, x, x, x)
      >>> k, v, mask, positions = read_kv(cache, 0, ubatch)
      >>> positions, mask.astype(int)[0].tolist()
      (Array([[0, 1, 0, 1]], dtype=int32), [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
      >>> bool(jnp.allclose(ops.attention.attention(x, k, v, mask), out))
      True

    llama.cpp: `get_k`, `get_v` and `build_attn_inp_kq_mask`.
    """
    table, buffers = split(cache)
    check_made_for(table, ubatch)
    return table.read_kv(
        buffers, _layer_number(buffers, layer), ubatch, causal=causal, visible_until=visible_until
    )


@explain_donation_errors
def read_states(cache: Cache, layer: int, ubatch: Ubatch) -> dict[str, Shaped[Array, "R ..."]]:
    """Return the recurrent states that the rows of a ubatch start from.

    Args:
      cache: a cache that `ubatch` was applied to, and whose layer was not written since.
      layer: 0 to L - 1, static.
      ubatch: the tokens, a row for each sequence.

    Returns:
      By name, the state of each row's sequence before the first token of the ubatch.

      - Zeros for a sequence without a state, for padding, and for a refused plan.
      - NaN (or the lowest integer) for a stale ubatch, and if the layer never wrote the state of
        the previous ubatch, or overwrote it.

    Raises:
      ValueError: If `layer` is not a layer with states, or the buffers were donated.
      ValueError: If the ubatch was planned for a cache with another spec, or by
        `init_batch(encoder=True)`.
      TypeError: If `ubatch` is not a ubatch, `layer` is not a static integer, or the cache has no
        states.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.recurrent(layers=2, states={"x": ((3,), jnp.bfloat16)}), sequences=4
      ... )
      >>> plan = init_batch(cache, make_batch([[1, 2], [3, 4]]))
      >>> read_states(apply(cache, plan), 1, plan.ubatches[0])["x"].shape
      (2, 3)

    llama.cpp: `build_rs`.
    """
    table, buffers = split(cache)
    check_made_for(table, ubatch)
    return table.read_states(buffers, static_layer_number(layer), ubatch)


@explain_donation_errors
def write_states(
    cache: Cache, layer: int, ubatch: Ubatch, states: Mapping[str, Shaped[Array, "R ..."]]
) -> Cache:
    """Write the recurrent states after the last tokens of each row.

    Args:
      cache: a cache that `ubatch` was applied to.
      layer: 0 to L - 1, static.
      ubatch: the tokens. States of padding, of a refused plan and of a stale ubatch are not
        written.
      states: by name, the states after each of the last E + 1 valid tokens of a row, the oldest
        first. `ubatch.state_write_steps(E + 1)` returns the number of tokens before each of them; a
        state with 0 is older than the ubatch and not written. If E is 0, `[R, ...]` is accepted
        too.

    Returns:
      The next cache. A layer writes the states of a ubatch once; further writes have no effect.

    Raises:
      ValueError: As `read_states`, and if names or shapes are not those of the cache.
      TypeError: As `read_states`, and if `states` is not a mapping.

    Examples:
      >>> cache = make_cache(
      ...     CacheSpec.recurrent(layers=1, states={"x": ((), jnp.float32)}), sequences=2
      ... )
      >>> plan = init_batch(cache, make_batch([[1, 2], [3, 4]]))
      >>> ubatch = plan.ubatches[0]
      >>> cache = write_states(apply(cache, plan), 0, ubatch, {"x": jnp.array([5.0, 6.0])})
      >>> plan = init_batch(cache, make_batch([7], sequences=1))
      >>> read_states(apply(cache, plan), 0, plan.ubatches[0])["x"]
      Array([6.], dtype=float32)

    llama.cpp: the copies to `r_l` and `s_l` that a model's graph makes.
    """
    table, buffers = split(cache)
    check_made_for(table, ubatch)
    return merge(*table.write_states(buffers, static_layer_number(layer), ubatch, states))


def _record_write(cache: Cache, layer: int | Int32[Array, ""], ubatch: Ubatch) -> Cache:
    """Return the cache with a note that the ubatch writes a layer; raise if it did before.

    Only while tracing, where a model step runs. Outside the later write wins.
    """
    if not isinstance(layer, int) or not is_traced(cache.table):
        return cache
    last, layers = cache.written or (None, frozenset())
    layers = layers if last is ubatch else frozenset()
    if layer in layers:
        raise ValueError(
            f"expected a ubatch to write each layer once, got layer {layer} twice; give each layer "
            "of the model its own number, and look again with attend(cache, layer, ubatch, q)"
        )
    return replace(cache, written=(ubatch, layers | {layer}))


def _layer_number(buffers: PyTree, layer: PyTree[int | Int32[Array, ""]]) -> PyTree:
    """Return a layer number, which may be traced if the layers are stacked."""
    if not (isinstance(buffers, Buffers) and buffers.stacked and is_traced(layer)):
        return static_layer_number(layer)
    if jnp.shape(layer):
        raise ValueError(
            f"expected the number of one layer, [], got {jnp.shape(layer)}; pass one integer"
        )
    return check_int32(layer, "a layer", low=0, high=buffers.layers - 1)
