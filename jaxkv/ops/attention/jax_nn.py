"""JAX's own attention: as XLA compiles it, or with the kernel of NVIDIA's library.

It returns the logarithm of its sums in the dtype of the queries. For float16 and bfloat16 that is
too coarse to join them with others, so sinks are refused.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.sight import Sight, bias_of, mask_of
from jaxkv.ops.attention.softmax import LOWEST, Options, Sums, by_groups, packed, sums_dtype
from jaxkv.ops.quantised import Quantised, Stored, decoded


def xla(q: jax.Array, k: Stored, v: Stored, sight: Sight, options: Options) -> Sums:
    """Call `jax.nn.dot_product_attention` in the wider dtype of queries and buffers.

    Quantised buffers are decoded first, all of the layer.
    """
    k, v = decoded(sight.of_lists(k)), decoded(sight.of_lists(v))
    dtype = jnp.result_type(q, k, v)
    return _weigh("xla", q.astype(dtype), k.astype(dtype), v.astype(dtype), sight, options)


def cudnn(q: jax.Array, k: Stored, v: Stored, sight: Sight, options: Options) -> Sums:
    """Call it with cuDNN's kernel, which knows float16 and bfloat16.

    Raises:
      ValueError: for other dtypes, or queries of another than the buffers.
      RuntimeError: by JAX, where there is no cuDNN.
    """
    if (
        isinstance(k, Quantised)
        or isinstance(v, Quantised)
        or q.dtype not in (jnp.float16, jnp.bfloat16)
        or not q.dtype == k.dtype == v.dtype
    ):
        raise ValueError(
            f"'cudnn' wants queries, keys and values all of float16 or all of bfloat16, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}: leave the implementation to jaxkv"
        )
    return _weigh("cudnn", q, sight.of_lists(k), sight.of_lists(v), sight, options)


def _weigh(
    name: Literal["xla", "cudnn"],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sight: Sight,
    options: Options,
) -> Sums:
    """Weigh the cells `[P, K, N, D]` of each list."""
    if options.softcap is not None or options.sinks is not None:
        raise ValueError(
            f"{name!r} has neither a softcap nor sinks: leave the implementation to jaxkv"
        )
    groups, mask = k.shape[1], mask_of(sight)
    bias, mask = bias_of(sight, mask), mask[:, None]  # [P, 1, T, N]
    if bias is not None:  # what it hides is hidden by the mask, of each head
        mask = mask & (bias != -jnp.inf)
        bias = jnp.where(mask, bias, 0)
    # The kernel may add its mask, and derivatives multiply by what is hidden. So no key that is not
    # a number gets there, and a token that sees one is told afterwards.
    broken = jnp.any(jnp.isnan(k), axis=3)  # [P, K, N]
    out, highest = jax.nn.dot_product_attention(
        q,
        jnp.where(broken[..., None], 0, k).swapaxes(1, 2),
        v.swapaxes(1, 2),
        bias=bias,
        mask=mask,
        scale=options.scale,
        implementation=name,
        return_residual=True,
    )
    some = jnp.any(mask, axis=3).swapaxes(1, 2)  # [P, T, 1 or H]
    shows = jnp.any(by_groups(mask, groups) & broken[:, :, None, None], axis=4)  # [P, K, ., T]
    shows = jnp.tile(shows, (1, 1, q.shape[2] // (groups * shows.shape[2]), 1))
    shows = shows.reshape(*shows.shape[:2], -1)  # [P, K, G * T]
    highest = packed(jnp.where(some, highest, LOWEST)[..., None], groups)[..., 0]
    total = packed(jnp.broadcast_to(some, q.shape[:3])[..., None], groups)[..., 0]
    out = packed(jnp.where(some[..., None], out, 0), groups)
    dtype = sums_dtype(q)
    return Sums(
        highest.astype(dtype),
        total.astype(dtype),
        jnp.where(shows[..., None], jnp.nan, out).astype(dtype),
    )
