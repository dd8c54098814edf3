"""What a model calls in its layers, for a ubatch that has been applied."""

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
    """Write the keys and values of a ubatch into a layer and attend over what its tokens see.

    Args:
      cache: a cache that the ubatch has been applied to.
      layer: 0 to L - 1, static; of a stacked cache it may be traced, see `make_cache`.
      ubatch: the tokens. Those that the table does not hold (padding, a refused plan) are written
        nowhere.
      q: queries, rotated by the layer's rope.
      k: keys, rotated by the layer's rope. Without keys and values the tokens look
        at what the layer holds and nothing is written, as for layers that share those of another.
      v: values; left out where they are a part of the keys (`value_dim` of
        `make_cache`).
      scale: what the products of queries and keys are multiplied by; by default 1 / sqrt(D).
      softcap: what those products stay below: c * tanh(x / c) (Gemma 2).
      sinks: a logit of each head that takes its share of the attention and gives nothing.
      bias: what is added to products that are scaled and capped, before the softmax; see below.
      causal: False lets tokens see those that come after them; of windows only a symmetric one
        limits that. A token that would see one of a later ubatch of its plan gets NaN: plan with a
        larger `ubatch_size`.
      visible_until: the last position that each token sees; by default its own. It
        may lie after the token, as for images and prefixes, or before it, and may be traced. A
        token gets NaN where its ubatch ends before that position. A window reaches back from the
        token's own position as ever, and a symmetric one ahead no further than without it.
      implementation: how attention is computed, "tiles", "whole", "pallas", "xla" or "cudnn",
        see `jaxkv.ops.attention.dispatch`; None leaves it to jaxkv.

    Returns:
      The cache with the keys and values written, and `[R, T, H, Dv]`, in the dtype of `q`. A token
      that sees nothing gets zeros, and so does one of a refused plan. A token that sees a key or
      value that is not finite in the buffers' dtype gets NaN, and no other token does. A stale
      ubatch, whose stream was edited since it was planned or applied, is written nowhere and gets
      NaN, and so does one that was never applied. A layer that was not written after an `apply`
      gives NaN to all tokens of the stream, until the cache goes back to a table from before
      that `apply` (`rewind`) or all tokens of the stream are removed.

    A bias is a function of the position of a token, that of a cell and the number of a query head.
    The three are int32 of four dimensions, `[P, H, T, N]` where not 1, and broadcast together; so
    does the result, floats. It is called where logits are computed, so that no array of all tokens
    and cells is held, and gets the present positions, so that it follows `seq_add`. It is
    static and hashed: define it once. Weights are its leaves and not closed over:
    `jax.tree_util.Partial(function, params)`, or a dataclass that is a pytree. A bias may also be
    an array of floats, `[R, T, H, N]` where not 1, for the cells of each row's stream as `read_kv`
    numbers them. Both have derivatives. A number below -1.7e38 counts as -1.7e38. Where it is -inf,
    a bias hides a cell from a head; where it is NaN or inf, the head of a token that sees the
    cell gets NaN.

    Raises:
      ValueError: when shapes do not fit the cache, the layer is none of it, or known to be written
        by this ubatch before, the ubatch was planned of a cache of another spec, the buffers were
        donated, the implementation cannot do it, `softcap` is not above 0, or `visible_until` comes
        with `causal=False`; or it is a ubatch of `init_batch(encoder=True)`, and the layer is of
        the text.
      TypeError: when a plan is passed and no ubatch, a list and no array, or an array that is not
        of floats; when the layer is no integer that is known while tracing, though the cache is
        not stacked, or `causal` no such bool; when a bias is not of floats, or closes over what is
        traced.

    Examples:
      Two tokens; the second one sees both, and a ubatch that was never applied sees NaN:

      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=1), cells=4)
      >>> (ubatch,) = init_batch(cache, make_batch([1, 2])).ubatches
      >>> q, v = jnp.zeros((1, 2, 1, 1)), jnp.array([2.0, 4.0]).reshape(1, 2, 1, 1)
      >>> after, out = attend(apply(cache, ubatch), 0, ubatch, q, q, v)
      >>> out[0, :, 0, 0], after.buffers.v[0][0, 0, :, 0]
      (Array([2., 3.], dtype=float32), Array([2., 4., 0., 0.], dtype=float32))
      >>> attend(cache, 0, ubatch, q, q, v)[1][0, :, 0, 0]
      Array([nan, nan], dtype=float32)

      Another layer of the model looks at the same keys and values, with queries of its own:

      >>> attend(after, 0, ubatch, q + 1)[1][0, :, 0, 0]
      Array([2., 3.], dtype=float32)

      A bias that falls by log 3 a position, and two tokens that see each other:

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
    """Write the keys and values of a ubatch into a layer, and attend to nothing.

    With `read_kv` and attention of the caller's own it does what `attend` does.

    Args:
      cache: a cache that the ubatch has been applied to.
      layer: 0 to L - 1, static; of a stacked cache it may be traced, see `make_cache`.
      ubatch: the tokens. Those that the table does not hold (padding, a refused plan) are written
        nowhere, and nothing of a stale ubatch is.
      k: keys, rotated by the layer's rope.
      v: values, unless they are a part of the keys.

    Returns:
      The cache with the keys and values written. Of a head whose key or value is not finite in the
      buffers' dtype, the value is stored as zero and the key as NaN.

    Raises:
      ValueError: as `attend` does.
      TypeError: as `attend` does.

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
    """Return what the tokens of a ubatch see of a layer, for attention of the caller's own.

    Keys and values are those of whole streams, as they lie in the buffers, so that holes, forks and
    windows are the mask's business. Tokens come as P lists of T: rows of one stream are one list.
    Queries and positions of the ubatch are brought into lists by `x.reshape(*mask.shape[:2], ...)`.

    Args:
      cache: a cache that the ubatch has been applied to, and whose layer has been written.
      layer: 0 to L - 1, static; of a stacked cache it may be traced, see `make_cache`.
      ubatch: the tokens that look.
      causal: False lets tokens see those that come after them.
      visible_until: the last position that each token sees, see `attend`.

    Returns:
      `(k, v, mask, positions)`, see `KVView`. Values are finite. A key that no token sees may be
      anything, NaN too: hide it by a choice (`jnp.where`) and not by a product or a
      sum; and where derivatives are wanted, put zeros in its place before the product. A token
      that was not finite has a NaN key. Padding and a refused plan see nothing; tokens of a stale
      ubatch see all cells, and NaN in each. Where `attend` gives NaN for another reason, all keys
      of the list are NaN.

    Raises:
      ValueError: as `attend` does.
      TypeError: as `attend` does.

    Examples:
      Two sequences of one pool are one list. What `attend` does is `ops.attention.attention` of it:

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
    """Read the states that the rows of a ubatch go on from.

    Args:
      cache: a cache that the ubatch has been applied to, and whose layer it has not written yet.
      layer: 0 to L - 1, static.
      ubatch: the tokens, a row for each sequence.

    Returns:
      By name, `[R, ...]`, the state of each row's sequence before the first token of the ubatch.
      Zeros where the sequence had none, and for a row that the table did not take in (padding, a
      refused plan). NaN, or the lowest integer, where the state must not be used: for a stale
      ubatch, and where the layer never wrote the state or has written over it.

    Raises:
      ValueError: when the layer is none of the cache, the ubatch was planned for a cache of another
        spec, the buffers were donated, or it is a ubatch of `init_batch(encoder=True)`.
      TypeError: when it is no ubatch, the layer is no integer that is known while tracing, or the
        cache keeps no states.

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
    """Write the states that the rows of a ubatch leave, after `read_states` of the same layer.

    Args:
      cache: a cache that the ubatch has been applied to.
      layer: 0 to L - 1, static.
      ubatch: the tokens. A row that the table did not take in (padding, a refused plan) is written
        nowhere, and nothing of a stale ubatch is.
      states: by name, `[R, E + 1, ...]`, the states after the last E + 1 valid tokens of each row,
        the oldest first: after so many tokens as `ubatch.state_write_steps(E + 1)` says.
        Where that is 0 the state is older than the ubatch, and not written. `[R, ...]` will do
        where E is 0. Fewer than E + 1 are refused: the table lists what a ubatch leaves, so it must
        be there.

    Returns:
      The cache with the states written. A layer takes in the states of a ubatch once: written
      again, they change nothing.

    Raises:
      ValueError: as `read_states` does, and when names or shapes are not those of the cache.
      TypeError: as `read_states` does, and when `states` is no mapping.

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
    """Return the cache with a note that the ubatch writes a layer; raise if it did so before."""
    if not isinstance(layer, int):  # traced
        return cache
    last, layers = cache.written or (ubatch, frozenset())
    if last is not ubatch:
        layers = frozenset()
    if layer in layers:
        raise ValueError(
            f"expected a ubatch to write each layer once, got layer {layer} twice: give each layer "
            "of the model its own number, and look again with attend(cache, layer, ubatch, q)"
        )
    return replace(cache, written=(ubatch, layers | {layer}))


def _layer_number(buffers: PyTree, layer: PyTree[int | Int32[Array, ""]]) -> PyTree:
    """Return the number of a layer; it may be traced if one array holds all layers."""
    if not (isinstance(buffers, Buffers) and buffers.stacked and is_traced(layer)):
        return static_layer_number(layer)
    if jnp.shape(layer):
        raise ValueError(f"expected the number of one layer, [], got {jnp.shape(layer)}")
    return check_int32(layer, "a layer", low=0, high=buffers.layers - 1)
