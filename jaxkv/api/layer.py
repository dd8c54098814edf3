"""Functions that a model calls in each layer, with a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxkv.cache import Cache
from jaxkv.core.array_utils import is_traced
from jaxkv.core.donation import explain_donation_errors
from jaxkv.core.validate import check_int32
from jaxkv.kv import layer as kv
from jaxkv.step import Step
from jaxkv.table import KVView, static_layer_number

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree, Shaped

    from jaxkv.ops.attention.bias import Bias
    from jaxkv.ops.attention.dispatch import Implementation


@explain_donation_errors
def attend(
    step: Step,
    layer: int | Int32[Array, ""],
    q: Float[Array, "R T H D"],
    k: Float[Array, "R T K D"] | None = None,
    v: Float[Array, "R T K Dv"] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
    select: Int32[Array, "P _ n"] | None = None,
    implementation: Implementation | None = None,
    return_mass: bool = False,
) -> tuple[Step, Float[Array, "R T H Dv"], *tuple[Float[Array, "P H N"], ...]]:
    """Write keys and values of a step into a layer, and attend to the visible cells.

    The shape `[R, T]` of the tokens is that of `step.valid`. A token attends to those cells of the
    token's sequences whose positions are not above the position of the token. With a window, these
    positions must also be in the window.

    Args:
      step: the step that the model gets, or that the last layer function returned.
      layer: number of the layer, 0 to L - 1; static, or traced if the cache is stacked.
      q: queries, already rotated by the rope of the layer. Query head h attends to key/value head
        h // (H / K).
      k: keys, already rotated by the rope of the layer. `attend` casts keys and values to the dtype
        of the cache. If `k` and `v` are omitted, no key is written, and the tokens attend to the
        keys that are already in the layer.
      v: values; None if `value_dim` of the spec is a slice, so that values are parts of the keys.
      scale: factor of the dot products of queries and keys; default 1 / sqrt(D).
      softcap: c in c * tanh(x / c), applied to the scaled dot products x (Gemma 2). Static.
      sinks: an additional logit for each head. Sinks only increase the denominator of the softmax.
      bias: logits that are added to the scaled and capped dot products. The output is
        differentiable with respect to the bias. The value -inf hides a cell from a token in one
        head. Other values below -1.7e38 count as -1.7e38. NaN or inf for a visible cell makes the
        output of the token in this head NaN. The bias is an array or a function:

        - An array of floats with four dimensions that broadcast to `[R, T, H, N]`, for all N cells.
        - A function of three int32 arrays: query positions, cell positions and head numbers. The
          arrays and the result have four dimensions that broadcast to `[P, H, T, N]`, for P lists
          of T tokens (see `read_kv`). The function is static and hashed, so define it once. Pass
          weights of the bias as leaves of a function that is a pytree, such as a
          `jax.tree_util.Partial`.

      causal: If False, tokens also attend to later tokens of the ubatch; only a symmetric window
        limits how far ahead a token attends. The output of a token is NaN if the token would attend
        to tokens of a later ubatch; use a larger `ubatch_size`.
      visible_until: the highest position that each token attends to; by default the position of the
        token. A window is measured from the position of the token. The output of a token is NaN if
        the token would attend to positions after the last token of its sequence in the ubatch.
      select: `[P, T, n]`: for each token of each list (see `read_kv`), indices of n cells in the
        stream of the list. In all heads, the token attends only to those of its visible cells that
        are selected, and only selected cells are read. Indices outside of `[0, N)` select no cell,
        and repeated indices count once.
      implementation: "tiles", "whole", "pallas", "xla" or "cudnn" (`jaxkv.ops.attention.dispatch`).
        None selects an implementation for the platform. "cudnn" needs an NVIDIA GPU.
      return_mass: If True, also return the attention mass: for each cell of the stream of a list
        (see `read_kv`) and each query head, the sum of the softmax weights over the tokens of the
        list. The mass is differentiable. Kernels and `jax.nn` do not compute it: "pallas", "xla"
        and "cudnn" are then replaced.

    Returns:
      The next step, the output in the dtype of `q`, and the mass if `return_mass` is True. Without
      `k`, the next step is the step.

      - Output rows are zero for padding, for a refused plan, and for a token without visible cells.
      - If a token attends to a key or a value that is not finite, the token's output is NaN in the
        query heads that read this key or value. Other outputs are unaffected.
      - If the ubatch was stale, no key is written, and the rows that have a token are NaN.
      - If a stacked cache lacks keys of tokens of a stream in the layer, since a step skipped the
        layer, the output rows of this stream are NaN.
      - In each head, the masses of a token sum to 1 minus the sink's weight, or to 0 if its output
        row is zero. If an output row of a list is NaN in a head, the masses of the list in
        this head are NaN; with `select`, at least those of the row's selected cells.

    Raises:
      ValueError: If a shape does not fit the cache, or no attention layer has the layer number.
      ValueError: If the layer number is static, and the step already wrote the layer, or did not
        write it and `k` is omitted.
      ValueError: If the buffers were donated.
      ValueError: If the implementation is unknown or does not support the arguments.
      ValueError: If `softcap` is not a finite number above 0, or a `scale` array is not a scalar.
      ValueError: If two of `visible_until`, `causal=False` and shared tokens are combined.
      ValueError: If `select` is not `[P, T, n]` with n > 0.
      ValueError: If a step of encoder sources is passed to a self-attention layer.
      ValueError: If a cross-attention layer gets `k`, `v` or `visible_until` with decoder tokens.
      TypeError: If a cache is passed as the step, or the cache has no attention layers.
      TypeError: If only one of `k` and `v` is given; if values are key slices, `v` must be None.
      TypeError: If the layer number is traced and the cache is not stacked.
      TypeError: If `softcap`, `causal` or `return_mass` is traced.
      TypeError: If a bias does not return floats, or closes over traced values.
      TypeError: If `select` is not an array of integers.

    Examples:
      The second token attends to both tokens:

      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=1), cells=4)
      >>> step = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> q, v = jnp.zeros((1, 2, 1, 1)), jnp.array([2.0, 4.0]).reshape(1, 2, 1, 1)
      >>> step, out = attend(step, 0, q, q, v)
      >>> out[0, :, 0, 0], step.cache.buffers.v[0][0, 0, :, 0]
      (Array([2., 3.], dtype=float32), Array([2., 4., 0., 0.], dtype=float32))

      A bias that falls by log 3 for each position of distance:

      >>> nearer = lambda query, key, head: (key - query) * math.log(3.0)
      >>> _, out, mass = attend(step, 0, q, bias=nearer, return_mass=True)
      >>> out[0, :, 0, 0], mass[0, 0].round(2)
      (Array([2. , 3.5], dtype=float32), Array([1.25, 0.75, 0.  , 0.  ], dtype=float32))

      The first token selects a later cell and a cell that does not exist:

      >>> attend(step, 0, q, select=jnp.array([[[1, 9], [1, 1]]]))[1][0, :, 0, 0]
      Array([0., 4.], dtype=float32)

    llama.cpp: `cpy_k`, `cpy_v` and `build_attn`, with ALiBi (`f_max_alibi_bias`) as the only bias.
    """
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "bias": bias}
    options |= {"causal": causal, "visible_until": visible_until, "select": select}
    writes = k is not None or v is not None
    path, part = _find_layer(step, "attend", layer, writes=writes)
    options |= {"implementation": implementation, "return_mass": return_mass}
    buffers, out, *mass = kv.attend(part, path[-1], q, k, v, **options)
    return step.with_layer(path, buffers) if writes else step, out, *mass


@explain_donation_errors
def write_kv(
    step: Step,
    layer: int | Int32[Array, ""],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K Dv"] | None = None,
) -> Step:
    """Write keys and values of a step into a layer, without attention; return the next step.

    A model can use `write_kv`, `read_kv` and its own attention function in place of `attend`. No
    key is written for padding, or for a ubatch that was refused or stale. Elements that are not
    finite in the dtype of the buffers are stored as NaN in keys, and as zero in values. The key of
    a value with such an element also contains a NaN.

    Args:
      step: the step that the model gets, or that the last layer function returned.
      layer: number of the layer, 0 to L - 1; static, or traced if the cache is stacked.
      k: keys, already rotated by the rope of the layer. `write_kv` casts keys and values to the
        dtype of the cache.
      v: values; None if `value_dim` of the spec is a slice, so that values are parts of the keys.

    Raises:
      ValueError: If a shape does not fit the cache, or no attention layer has the layer number.
      ValueError: If the layer number is static, and the step already wrote the layer.
      ValueError: If the buffers were donated.
      ValueError: If encoder sources are written to a self-attention layer, or other tokens to a
        cross-attention layer.
      TypeError: If a cache is passed as the step, or the cache has no attention layers.
      TypeError: If `v` is missing, or `v` is passed although values are slices of the keys.
      TypeError: If the layer number is traced and the cache is not stacked.

    Examples:
      >>> cache = make_cache(CacheSpec.attention(layers=1, kv_heads=1, head_dim=1), cells=4)
      >>> step = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> k, v = jnp.ones((1, 2, 1, 1)), jnp.array([2.0, jnp.inf]).reshape(1, 2, 1, 1)
      >>> cache = write_kv(step, 0, k, v).cache
      >>> cache.buffers.k[0][0, 0, :, 0], cache.buffers.v[0][0, 0, :, 0]
      (Array([ 1., nan,  0.,  0.], dtype=float32), Array([2., 0., 0., 0.], dtype=float32))

    llama.cpp: `cpy_k` and `cpy_v`.
    """
    path, part = _find_layer(step, "attend", layer, writes=True)
    return step.with_layer(path, kv.write_kv(part, path[-1], k, v))


@explain_donation_errors
def read_kv(
    step: Step,
    layer: int | Int32[Array, ""],
    *,
    causal: bool = True,
    visible_until: Int32[Array, "R T"] | None = None,
) -> KVView:
    """Return the keys and values in a layer, and the attention mask of the tokens of a step.

    `read_kv` groups the tokens of the step into P lists. All tokens of a list are in one stream,
    and the result has the keys and values of all cells of this stream. If S is 1, or if each row r
    of the step has the tokens of sequence r, there is one list for each stream. Otherwise, there
    is one list for each row. Reshape queries and their positions to `[P, T, ...]`; P and T are the
    first two sizes of the mask.

    Args:
      step: a step that already wrote its keys and values to the layer (`write_kv`).
      layer: number of the layer, 0 to L - 1; static, or traced if the cache is stacked.
      causal: If False, tokens also attend to later tokens of the ubatch, see `attend`.
      visible_until: the highest position that each token attends to, see `attend`.

    Returns:
      A named tuple, `KVView`. The keys `k` `[P, K, N, D]` and the values `v` `[P, K, N, Dv]` have
      the dtype of the buffers (float32 if quantised). The `mask` `[P, T, N]` bool is True if a
      token attends to a cell. The `positions` `[P, N]` int32 are -1 for empty cells.

      - Values are finite. A key contains NaN if the key or its value was not finite when written.
      - A key that is masked for all tokens may be NaN. Therefore mask logits with `jnp.where`, not
        by a product or a sum. Before you compute derivatives through the keys, replace keys that
        are masked for all tokens by zeros.
      - The mask is False for padding and for tokens of a refused plan.
      - If the ubatch was stale, all mask entries of a list with a token are True, and all its keys
        are NaN.
      - All keys of a list are NaN if a stacked cache lacks keys of tokens of the list's stream in
        the layer, or if one of its tokens would attend to later tokens that are not written yet
        (`causal=False`, `visible_until`).

    Raises:
      ValueError: If no attention layer has the layer number, or `visible_until` is not `[R, T]`.
      ValueError: If the step did not write the layer (NaN in a stacked cache), or the buffers were
        donated.
      ValueError: If two of `visible_until`, `causal=False` and shared tokens are combined.
      ValueError: If a step of encoder sources is passed for a self-attention layer, or
        `visible_until` for a cross-attention layer.
      TypeError: If a cache is passed as the step, or the cache has no attention layers.
      TypeError: If `causal` is traced, or the layer number is traced and the cache is not stacked.

    Examples:
      `ops.attention.attention` computes the output of `attend` from the result of `read_kv`:

      >>> spec = CacheSpec.attention(layers=1, kv_heads=1, head_dim=1)
      >>> cache = make_cache(spec, cells=4, sequences=2)
      >>> step = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4]])))
      >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
      >>> step, out = attend(step, 0, x, x, x)
      >>> k, v, mask, positions = read_kv(step, 0)
      >>> mask.astype(int)[0].tolist()
      [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
      >>> bool(jnp.allclose(ops.attention.attention(x, k, v, mask), out))
      True

    llama.cpp: `get_k`, `get_v` and `build_attn_inp_kq_mask`.
    """
    path, part = _find_layer(step, "attend", layer, writes=False)
    return kv.read_kv(part, path[-1], causal=causal, visible_until=visible_until)


@explain_donation_errors
def read_states(step: Step, layer: int) -> dict[str, Shaped[Array, "R ..."]]:
    """Return the recurrent states before the first token of each row of a step.

    Args:
      step: a step that has not written the layer; it has one row for each sequence.
      layer: number of the layer, 0 to L - 1, static.

    Returns:
      A dict from the name of each state to the states of all rows, in the dtype of the spec. A
      state is zero for a sequence without a stored state, for padding, and for a refused plan.
      States are NaN (integers: the lowest value) if the ubatch was stale.

    Raises:
      ValueError: If the step already wrote the layer (`write_states`).
      ValueError: If the step has encoder sources.
      ValueError: If no layer has the number, the layer has no states, or the buffers were donated.
      TypeError: If a cache is passed as the step, or the layer number is traced.
      TypeError: If the cache has no states and is not hybrid.

    Examples:
      >>> spec = CacheSpec.recurrent(layers=2, states={"x": ((3,), jnp.bfloat16)})
      >>> cache = make_cache(spec, sequences=4)
      >>> step = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4]])))
      >>> read_states(step, 1)["x"].shape
      (2, 3)

    llama.cpp: `build_rs`.
    """
    path, part = _find_layer(step, "states", layer, writes=True)
    return part.table.read_states(part, path[-1])


@explain_donation_errors
def write_states(step: Step, layer: int, states: Mapping[str, Shaped[Array, "R ..."]]) -> Step:
    """Write the last E + 1 recurrent states of each row of a step into a layer.

    E is the argument `max_rollback` of `make_cache`. No state is written for padding, or for a
    ubatch that was refused or stale.

    Args:
      step: the step that the model gets, or that the last layer function returned.
      layer: number of the layer, 0 to L - 1, static.
      states: dict from the name of each state to an array `[R, E + 1, ...]`. An array contains the
        states after each of the last E + 1 valid tokens of each row, oldest first. States are cast
        to the dtype of the cache. `step.state_write_steps(layer)` returns for each of these
        states how many tokens of the row precede the state. If the number is 0, the state is not
        written. If E is 0, an array `[R, ...]` is accepted too.

    Raises:
      ValueError: If state names or shapes differ from the spec.
      TypeError: If floats are passed for an integer state, or complex numbers for a float state.
      ValueError, TypeError: If `read_states` would raise for the same step and layer.

    Examples:
      >>> spec = CacheSpec.recurrent(layers=1, states={"x": ((), jnp.float32)})
      >>> cache = make_cache(spec, sequences=2)
      >>> step = apply(cache, init_batch(cache, make_batch([[1, 2], [3, 4]])))
      >>> cache = write_states(step, 0, {"x": jnp.array([5.0, 6.0])}).cache
      >>> step = apply(cache, init_batch(cache, make_batch([7], sequences=1)))
      >>> read_states(step, 0)["x"]
      Array([6.], dtype=float32)

    llama.cpp: the copies to `r_l` and `s_l` that a model's graph makes.
    """
    path, part = _find_layer(step, "states", layer, writes=True)
    return step.with_layer(path, part.table.write_states(part, path[-1], states))


def _find_layer(
    step: Step, verb: str, layer: PyTree[int | Int32[Array, ""]], *, writes: bool
) -> tuple[tuple[PyTree, ...], Step]:
    """Return the path of a layer, and the step in the part of the layer.

    Raise a ValueError for a second write of a layer, and for a read of keys before their write.
    """
    if not isinstance(step, Step):
        kind = "a cache" if isinstance(step, Cache) else str(type(step))
        raise TypeError(
            f"expected a step, got {kind}; pass the step that the model gets, or "
            "step = apply(cache, ubatch)"
        )
    path = step.table.find_layer(verb, _layer_number(step, layer))
    part = step.part(*path[:-1])
    if is_traced(path[-1]):
        return path, part
    if writes and path in step.written_paths:
        raise ValueError(
            f"expected a step to write each layer once, after it read its states, got layer "
            f"{layer} again; give each layer of the model its own number, and look at written "
            "keys with attend(step, layer, q)"
        )
    # In a stacked cache a traced number may have written the layer; else the layer reads NaN.
    is_known = step.is_written is None and part.table.stores(part.ubatch)
    if not writes and is_known and path not in step.written_paths:
        raise ValueError(
            f"expected layer {layer} with the keys of the step, got it before they are written; "
            "call attend with k and v, or write_kv, and use the step that it returns"
        )
    return path, part


def _layer_number(step: Step, layer: PyTree[int | Int32[Array, ""]]) -> PyTree:
    """Return the layer number as an int, or as an int32 tracer if the cache is stacked."""
    if not (step.is_written is not None and is_traced(layer)):
        return static_layer_number(layer)
    if jnp.shape(layer):
        raise ValueError(
            f"expected the number of one layer, [], got {jnp.shape(layer)}; pass one integer"
        )
    return check_int32(layer, "a layer", low=0, high=step.is_written.size - 1)
