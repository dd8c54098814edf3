"""Selection of an attention implementation. Pallas is imported only when needed, to save time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.platforms import by_platform
from jaxkv.ops.attention import (
    jax_nn,
    xla,
    xla_cpu,
    xla_cpu_tiled,
    xla_tiles,
)
from jaxkv.ops.attention.active_tiles import TILE
from jaxkv.ops.attention.softmax import (
    AttentionOptions,
    OnlineSoftmax,
    empty_softmax,
    group_queries,
    make_options,
    normalize,
    reset_where_bias_hides_all,
    ungroup_queries,
    with_sinks,
    with_weights,
)
from jaxkv.ops.attention.transforms import fold_vmap, with_derivatives_of
from jaxkv.ops.attention.visibility import Visibility, compute_bias, compute_mask
from jaxkv.ops.storage.storage import Stored

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Num

Implementation = Literal["tiles", "whole", "pallas", "xla", "cudnn"]
"""Names of implementations.

tiles: A loop over the tiles with a visible cell.
whole: All cells at once; faster than "tiles" if skipping hidden cells saves little time.
pallas: A kernel that reads each tile with a visible cell once for each block of tokens. On
  platforms other than NVIDIA GPUs and TPUs the TPU kernel is interpreted, slowly, for tests.
xla: `jax.nn.dot_product_attention`.
cudnn: `jax.nn.dot_product_attention` with cuDNN, for float16 and bfloat16.
"""

AttentionFn = Callable[[jax.Array, Stored, Stored, Visibility, AttentionOptions], OnlineSoftmax]
"""An implementation: a function that returns a partial softmax over all cells.

q: `[P, T, H, D]` floats, queries of P lists of tokens. Query head h reads key head h // (H / K).
k: `[S, K, N, D]`, keys of all streams. Keys of hidden cells may have any value, including NaN.
v: `[S, K, N, Dv]`, values of all streams, all finite.
visibility: `Visibility` of the cells. A cell that the bias hides gets the lowest logit.
options: Scale and softcap. `finalize` adds the sinks.
"""

HOPPER = ("H100", "H20", "H800")
"""Substrings of the names of GPUs with as much fast memory as an H100, such as H200 and GH200.

The compiler may reject the kernel for GPUs with less fast memory.
"""

MAX_LOGIT_BYTES = 1 << 28
"""Largest size in bytes for which the logits of all cells are computed at once: 256 MB."""


def attend_by_shapes(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Run the implementation "whole" or "tiles", chosen from the shapes of the arguments."""
    # All cells are read at once if their logits need no more bytes than keys and values (a prompt
    # needs more), and at most `MAX_LOGIT_BYTES`. The overhead of a loop is then larger than the
    # time to read hidden cells. Logits of a single token are never stored.
    logits = q.shape[1] * q.shape[2] * jnp.dtype(jnp.float32).itemsize  # bytes of a cell
    read = k.shape[1] * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    logit_bytes = q.shape[0] * logits * k.shape[2] if q.shape[1] > 1 else 0
    implementation = (
        xla.attend_all_cells
        if logits <= read and logit_bytes <= MAX_LOGIT_BYTES
        else xla_tiles.attend_by_tiles
    )
    return implementation(q, k, v, visibility, options)


def best_for_tpu(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Run the TPU kernel if it supports the arrays and is fast; else run `attend_by_shapes`."""
    from jaxkv.ops.attention import pallas_tpu

    # With several streams of one tile and one token each, no tile can be skipped or shared. One
    # product for all streams is then faster than the kernel.
    lists, tokens = visibility.at.shape
    small = lists > 1 and tokens == 1 and k.shape[2] <= TILE
    implementation = (
        attend_by_shapes
        if small or not pallas_tpu.can_attend(q, k, v, visibility)
        else pallas_tpu.attend
    )
    return implementation(q, k, v, visibility, options)


def kernel_for_cuda(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Run the GPU kernel if it supports the arrays; otherwise run `attend_by_shapes`."""
    try:
        from jax.experimental.pallas import triton  # noqa: F401
    except ImportError:  # JAX deprecates Pallas for Triton
        return attend_by_shapes(q, k, v, visibility, options)
    from jaxkv.ops.attention import pallas_gpu

    implementation = (
        pallas_gpu.attend if pallas_gpu.can_attend(q, k, v, visibility) else attend_by_shapes
    )
    return implementation(q, k, v, visibility, options)


def best_for_cuda(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Run `kernel_for_cuda` on GPUs named in `HOPPER`; otherwise run `attend_by_shapes`."""
    implementation = kernel_for_cuda if _is_hopper() else attend_by_shapes
    return implementation(q, k, v, visibility, options)


def _is_hopper() -> bool:
    """Return whether the abstract device is named in `HOPPER`.

    If no abstract device is set, return whether all local GPUs are named in `HOPPER`.
    """
    target = jax.sharding.get_abstract_mesh().abstract_device
    try:
        devices = jax.local_devices(backend="cuda") if target is None else [target]
    except RuntimeError:  # no GPU
        return False
    return all(any(name in device.device_kind for name in HOPPER) for device in devices)


def tpu_kernel(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> OnlineSoftmax:
    """Run the TPU kernel; raise a ValueError if it does not support the arrays."""
    from jaxkv.ops.attention import pallas_tpu

    return pallas_tpu.attend(q, k, v, visibility, options, interpret=interpret)


def empty_result(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
) -> OnlineSoftmax:
    """Return a partial softmax over no cells, with the shapes that all implementations return."""
    sums = empty_softmax(group_queries(q, k.shape[1]), v.shape[3])
    no_logits = jnp.zeros((*sums.denom.shape, k.shape[2]), sums.denom.dtype)
    return with_weights(sums, no_logits if options.keep_weights else None)


def with_derivatives(**by_name: AttentionFn) -> AttentionFn:
    """Combine implementations, one for each platform, and add derivatives and `vmap`."""

    def differentiable_attention(
        q: jax.Array, k: Stored, v: Stored, visibility: Visibility, options: AttentionOptions
    ) -> OnlineSoftmax:
        of_lists, mask = visibility.gather_list_streams, compute_mask(visibility)
        return xla.attend_differentiably(
            q, of_lists(k), of_lists(v), mask, options, compute_bias(visibility, mask)
        )

    on_platform = fold_vmap(by_platform(empty_result, **by_name))
    return with_derivatives_of(differentiable_attention, on_platform)


IMPLEMENTATIONS: dict[Implementation | None, AttentionFn] = {
    None: with_derivatives(
        cpu=xla_cpu_tiled.attend_on_cpu,
        tpu=best_for_tpu,
        cuda=best_for_cuda,
        default=attend_by_shapes,
    ),
    "tiles": with_derivatives(cpu=xla_cpu.attend_by_tiles, default=xla_tiles.attend_by_tiles),
    "whole": with_derivatives(cpu=xla_cpu.attend_all_cells, default=xla.attend_all_cells),
    "pallas": with_derivatives(
        tpu=tpu_kernel,
        cuda=kernel_for_cuda,
        default=partial(tpu_kernel, interpret=True),
    ),
    "xla": jax_nn.xla,
    "cudnn": jax_nn.cudnn,
}

WITHOUT_KERNELS = with_derivatives(cpu=xla_cpu_tiled.attend_on_cpu, default=attend_by_shapes)
"""The implementation that replaces kernels and `jax.nn`, which return no weights."""


def partial_attention(
    q: Float[Array, "P T H D"],
    k: Stored,
    v: Stored,
    visibility: Visibility,
    options: AttentionOptions,
    implementation: Implementation | None = None,
) -> OnlineSoftmax:
    """Return the partial softmax over all cells, without sinks; for arguments see `AttentionFn`."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"expected an implementation of {get_args(Implementation)}, got {implementation!r}; "
            "pass None for the default"
        )
    if visibility.bias is not None and implementation in ("pallas", "cudnn"):
        raise ValueError(
            f"expected an implementation with bias, got {implementation!r}; pass None, 'tiles', "
            f"'whole' or 'xla'"
        )
    check_attention_arguments(q, k, v, options)
    attend = IMPLEMENTATIONS[implementation]
    if options.keep_weights and implementation not in ("tiles", "whole"):
        attend = WITHOUT_KERNELS
    sums = attend(q, k, v, visibility, options)
    return sums if visibility.bias is None else reset_where_bias_hides_all(sums)


def finalize(
    sums: OnlineSoftmax, q: Float[Array, "P T H D"], options: AttentionOptions
) -> Float[Array, "P T H Dv"]:
    """Add sinks to a partial softmax, and return the outputs in the dtype of the queries."""
    return ungroup_queries(normalize(with_sinks(sums, options.sinks)), q.shape[1]).astype(q.dtype)


def _attend_by_mask(*args: Any) -> OnlineSoftmax:
    ways = {"cpu": xla_cpu.attend_by_mask, "default": xla.attend_by_mask}
    return jax.lax.platform_dependent(*args, **ways)


_by_mask = with_derivatives_of(xla.attend_differentiably, _attend_by_mask)


@partial(jax.jit, static_argnames=("scale", "softcap"))
def attention(
    q: Float[Array, "R T H D"],
    k: Float[Array, "R K N D"],
    v: Float[Array, "R K N Dv"],
    mask: Bool[Array | np.ndarray, "R T N"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
) -> Float[Array, "R T H Dv"]:
    """Attend from each token to the cells that are True in a mask, on plain arrays.

    Args:
      q: queries. Query head h reads key/value head h // (H / K).
      k: keys of each row. Keys of hidden cells may be NaN and do not affect derivatives.
      v: values of each row. All values must be finite, including values of hidden cells.
      mask: which cells each token attends to.
      scale: factor of the products of queries and keys; by default 1 / sqrt(D).
      softcap: bound c of the scaled products: each product x becomes c * tanh(x / c).
      sinks: additional logit of each query head, without a value.

    Returns:
      The output, in the dtype of `q`: zeros for a token without visible cells, NaN for a token with
      a visible NaN key. The softmax is float32, or float64 for float64 queries.

    Raises:
      ValueError: If K does not divide H, shapes do not match, or `softcap` is not in (0, inf).

    Examples:
      >>> q, v = jnp.ones((1, 1, 1, 1)), jnp.array([2.0, 4.0, 6.0]).reshape(1, 1, 3, 1)
      >>> k = jnp.array([1.0, 1.0, jnp.nan]).reshape(1, 1, 3, 1)
      >>> attention(q, k, v, jnp.array([[[True, True, False]]]))[0, 0, 0]
      Array([3.], dtype=float32)
    """
    options = make_options(scale, softcap, sinks)
    check_attention_arguments(q, k, v, options)
    mask_shape = (*q.shape[:2], k.shape[2])
    if k.shape[0] != q.shape[0] or mask.shape != mask_shape:
        raise ValueError(
            f"expected a mask {mask_shape}, and k for as many rows, got {mask.shape}; reshape it"
        )
    if 0 in (*q.shape, *k.shape, *v.shape):
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    return finalize(_by_mask(q, k, v, mask, options), q, options)


def check_attention_arguments(
    q: Num[Array, "R T H D"], k: Stored, v: Stored, options: AttentionOptions
) -> None:
    """Raise unless the shapes match; the first dimensions of `q` and `k` may differ."""
    heads, size = q.shape[2:]
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise TypeError(
            f"expected q of floats, in whose dtype the result is, got {q.dtype}; cast it"
        )
    cap = options.softcap
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(
            f"expected a finite softcap above 0, or None for no bound, got {cap}; pass None"
        )
    if heads % max(k.shape[1], 1) or k.shape[:3] != v.shape[:3] or k.shape[3] != size:
        raise ValueError(
            f"expected q [R, T, H, D], k [R, K, N, D] and v [R, K, N, Dv] with H a multiple of K, "
            f"got {q.shape}, {k.shape} and {v.shape}; transpose them"
        )
    if options.sinks is not None and options.sinks.shape != (heads,):
        raise ValueError(
            f"expected sinks {(heads,)}, one for each query head, got {options.sinks.shape}; "
            "pass a flat array"
        )
