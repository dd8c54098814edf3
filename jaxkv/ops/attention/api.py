"""The programs that attention over a cache may run as: two of jaxkv's own, and those of JAX."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxkv.ops.attention.xla import attention
from jaxkv.ops.attention.xla_tiles import attention_by_tiles

Implementation = Literal["tiles", "whole", "xla", "cudnn"]
"""The ways there are.

tiles: what is seen alone is read, see `jaxkv.ops.attention.xla_tiles`.
whole: all cells in one product, where a loop costs more than reading.
xla: `jax.nn.dot_product_attention`.
cudnn: the same with the kernel of NVIDIA's library, for float16 and bfloat16.
"""


def attention_by(
    implementation: Implementation | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    pools: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Do what `attention_by_tiles` does, with the same arguments, in the way that is asked for.

    Args:
      implementation: which; None leaves it to jaxkv, see `best`.
      q: see `attention_by_tiles`, as for all others.
      k: keys.
      v: values.
      mask: what each token sees.
      pools: the stream of each list of tokens.
      scale: see `attention`.
      softcap: see `attention`. Not with "xla" and "cudnn".
      sinks: see `attention`. Not with "xla" and "cudnn".

    Raises:
      ValueError: when there is no such implementation, or it cannot do what is asked for.
      RuntimeError: by JAX, when cuDNN is wanted where there is none.
    """
    if implementation is None:
        implementation = best(q, k, v)
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"wanted an implementation of {get_args(Implementation)}, got {implementation!r}"
        )
    options = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if implementation == "tiles":
        return attention_by_tiles(q, k, v, mask, pools, **options)
    if pools.shape[0] != k.shape[0]:
        k, v = k[pools], v[pools]
    if implementation == "whole":
        return attention(q, k, v, mask, **options)
    if softcap is not None or sinks is not None:
        raise ValueError(
            f"{implementation!r} has neither a softcap nor sinks: leave the implementation to jaxkv"
        )
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, mask=mask[:, None], scale=scale, implementation=implementation
    )
    return jnp.where(jnp.any(mask, axis=2)[..., None, None], out, 0)


def best(q: jax.Array, k: jax.Array, v: jax.Array) -> Implementation:
    """Choose for the default backend and these shapes.

    On a GPU the turns of a loop whose length depends on the data wait for the host, and that takes
    longer than reading what nobody sees; unless the logits of all cells would be more than what is
    read, as those of a prompt are.
    """
    logits = q.shape[1] * q.shape[2] * jnp.dtype(jnp.float32).itemsize  # bytes a cell
    read = k.shape[1] * (k.shape[3] + v.shape[3]) * k.dtype.itemsize
    return "whole" if jax.default_backend() == "gpu" and logits <= read else "tiles"
