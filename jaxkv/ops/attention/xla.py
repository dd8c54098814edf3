"""Softmax over the rows that a mask allows. Knows arrays, and nothing of caches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 256
"""Rows that are cleaned at a time when a hidden row holds something that is not finite."""

THIN = 32
"""The most rows of queries for which keys and values are read by all cores, see `scores`."""

PRODUCTS = 384
"""Independent products that values are weighed in, if there are as many: enough for all cores."""

PART = 64
"""The fewest rows of such a product."""

Arrays = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
"""Queries, keys, values and sinks: what there are derivatives by."""

LOWEST = float(jnp.finfo(jnp.float32).min)
"""The logit of a hidden row; finite, so that a token that sees nothing needs no care on the way."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend from every token to the rows that it may see.

    Args:
      q: `[R, T, H, D]`, queries. Query head h reads key/value head h // (H / K).
      k: `[R, K, N, D]`, keys, one table for each row of tokens.
      v: `[R, K, N, Dv]`, values.
      mask: `[R, T, N]` bool, which rows each token sees.
      scale: what the products of queries and keys are multiplied by; by default 1 / sqrt(D).
      softcap: what those products stay below: c * tanh(x / c).
      sinks: `[H]`, a logit of each head that takes its share of the attention and gives nothing.

    Returns:
      `[R, T, H, Dv]` in the dtype of `q`; sums and softmax in float32. A token that sees nothing
      gets zeros. What stands in a hidden row never matters, even where it is not a number.
      Derivatives are safe from rows that no token sees: for them keys and values are cleaned, which
      holds a copy.

    Raises:
      ValueError: when H is not a multiple of K, or shapes do not fit together.

    Examples:
      Two equal keys share the attention; a hidden one gets none, whatever it holds:

      >>> q, k = jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 3, 2))
      >>> v = jnp.array([2.0, 4.0, jnp.nan]).reshape(1, 1, 3, 1)
      >>> attention(q, k, v, jnp.array([[[True, True, False]]]))[0, 0, 0]
      Array([3.], dtype=float32)
      >>> attention(q, k, v, jnp.array([[[False, False, False]]]))[0, 0, 0]
      Array([0.], dtype=float32)
    """
    rows, tokens, heads, size = q.shape
    dtype = q.dtype
    groups = k.shape[1]
    if heads % groups or k.shape[:3] != v.shape[:3] or k.shape[3] != size:
        raise ValueError(
            f"wanted q [R, T, H, D], k [R, K, N, D] and v [R, K, N, Dv] with H a multiple of K, "
            f"got {q.shape}, {k.shape} and {v.shape}"
        )
    if mask.shape != (rows, tokens, k.shape[2]):
        raise ValueError(f"wanted a mask {(rows, tokens, k.shape[2])}, got {mask.shape}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"wanted sinks {(heads,)}, one for each query head, got {sinks.shape}")
    scale = size**-0.5 if scale is None else scale

    @jax.custom_jvp
    def attend(arrays: Arrays, mask: jax.Array) -> jax.Array:
        q, k, v, sinks = arrays
        sums = open_softmax(packed(q * jnp.asarray(scale, dtype), groups), k, v, mask, softcap)
        if sinks is not None:
            sums = joined(sums, sinks_alone(sinks, sums))
        return unpacked(closed(sums), tokens, heads).astype(dtype)

    @attend.defjvp
    def derive(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
        # A derivative has 0 times what is hidden in it, which a NaN would survive.
        (q, k, v, sinks), mask = primals
        seen = jnp.any(mask, axis=1)[:, None, :, None]
        clean = q, jnp.where(seen, k, 0), jnp.where(seen, v, 0), sinks
        return jax.jvp(lambda arrays: attend.fun(arrays, mask), (clean,), tangents[:1])

    return attend((q, k, v, sinks), mask)


class Sums(NamedTuple):
    """A softmax over some rows before its division, so that it can be joined with others.

    highest: `[R, K, X]`, the highest logit; what is finite and low where nothing is seen.
    total: `[R, K, X]`, the sum of exp(logit - highest).
    out: `[R, K, X, Dv]`, the values, each times its exp(logit - highest), added up.
    """

    highest: jax.Array
    total: jax.Array
    out: jax.Array


def open_softmax(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, softcap: float | None
) -> Sums:
    """Weigh the rows that are seen, for queries `[R, K, X, D]` from `packed`, scaled."""
    rows, tokens, _ = mask.shape
    k, v = in_parts(k, q.shape[2]), in_parts(v, q.shape[2])
    seen = mask.reshape(rows, 1, 1, tokens, *k.shape[2:4]).transpose(0, 1, 4, 2, 3, 5)
    logits = cap(scores(q, k), softcap).reshape(*k.shape[:3], -1, tokens, k.shape[3])
    logits = jnp.where(seen, jnp.maximum(logits, LOWEST / 2), LOWEST)  # [R, K, P, G, T, C]
    # Maximum, difference and exponential in a row are one fast function of the compiler's on CPU.
    # It takes nothing between them, such as a guard against -inf.
    highest = jax.lax.stop_gradient(jnp.max(logits, axis=(2, 5), keepdims=True))
    weights = jnp.exp(logits - highest)
    total = jnp.sum(weights, axis=(2, 5)).reshape(q.shape[:3])
    out = weigh(weights.reshape(*k.shape[:3], -1, k.shape[3]), v)
    # Who sees nothing has weights all the same, of rows that are hidden.
    sees = jnp.tile(jnp.any(mask, axis=2), q.shape[2] // tokens)[:, None]
    return Sums(
        highest.reshape(q.shape[:3]),
        jnp.where(sees, total, 0.0),
        jnp.where(sees[..., None], out, 0.0),
    )


def sinks_alone(sinks: jax.Array, like: Sums) -> Sums:
    """Make what `[H]` sinks add: a logit for each head that takes its share and gives nothing."""
    rows, groups, queries = like.total.shape
    heads = sinks.astype(jnp.float32).reshape(1, groups, -1, 1)
    tokens = queries // heads.shape[2]
    logits = jnp.broadcast_to(heads, (rows, groups, heads.shape[2], tokens))
    logits = logits.reshape(like.total.shape)
    return Sums(logits, jnp.ones_like(like.total), jnp.zeros_like(like.out))


def joined(a: Sums, b: Sums) -> Sums:
    """Make one softmax over the rows of two."""
    highest = jax.lax.stop_gradient(jnp.maximum(a.highest, b.highest))
    x, y = jnp.exp(a.highest - highest), jnp.exp(b.highest - highest)
    return Sums(highest, a.total * x + b.total * y, a.out * x[..., None] + b.out * y[..., None])


def closed(sums: Sums) -> jax.Array:
    """Divide; zeros where nothing is seen. `[R, K, X, Dv]`."""
    return sums.out / jnp.where(sums.total == 0.0, 1.0, sums.total)[..., None]


def packed(q: jax.Array, groups: int) -> jax.Array:
    """Lay queries out as one product with each key head; `[R, T, H, D]` to `[R, K, G * T, D]`.

    The G query heads of a key head are G rows of one matrix product, so that a key is read once.
    """
    rows, tokens, _, size = q.shape
    return (
        q.reshape(rows, tokens, groups, -1, size)
        .transpose(0, 2, 3, 1, 4)
        .reshape(rows, groups, -1, size)
    )


def unpacked(out: jax.Array, tokens: int, heads: int) -> jax.Array:
    """Undo `packed`; `[R, K, G * T, Dv]` to `[R, T, H, Dv]`."""
    rows, groups, _, size = out.shape
    out = out.reshape(rows, groups, -1, tokens, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, tokens, heads, size)


def cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Keep logits below a bound, smoothly, if there is one."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def in_parts(rows: jax.Array, queries: int) -> jax.Array:
    """Cut rows into P parts of C; `[R, K, N, D]` to `[R, K, P, C, D]`, without moving them.

    A processor shares products among its cores one by one, and a few thin ones keep but one core
    busy. Where there are many queries, or few rows, P is 1.
    """
    products, parts, size = rows.shape[0] * rows.shape[1], 1, rows.shape[2]
    while queries <= THIN and products * parts < PRODUCTS and size % 2 == 0 and size >= 2 * PART:
        parts, size = 2 * parts, size // 2
    return rows.reshape(*rows.shape[:2], parts, size, rows.shape[3])


def scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """Multiply queries and keys, `[R, K, X, D]` and `[R, K, P, C, D]`; `[R, K, P, X, C]` float32.

    With few queries the keys come first: rows of the first factor are shared among cores. The
    barrier keeps the compiler from exchanging the factors to save itself the small transpose. With
    many there is one part, which is left out of the product: as a dimension it doubles the time.
    """
    if q.shape[2] > THIN:
        logits = jnp.einsum("rkxd,rkcd->rkxc", q, k[:, :, 0], preferred_element_type=jnp.float32)
        return logits[:, :, None]
    logits = jnp.einsum("rkpcd,rkxd->rkpcx", k, q, preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(logits).swapaxes(3, 4)


def weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Add up weighted values, `[R, K, P, X, C]` times `[R, K, P, C, Dv]`; `[R, K, X, Dv]` float32.

    A weight of 0 hides even a NaN. A plain product lets 0 * NaN through, and cleaning all values
    first would read and write them all. So the product is looked at, and done again in clean tiles
    only when it is not finite.
    """
    out = jnp.einsum("rkpxc,rkpcd->rkpxd", weights, v, preferred_element_type=jnp.float32)
    # Without the barrier the sum over parts would become one product again.
    out = jax.lax.optimization_barrier(out).sum(2)

    def again() -> jax.Array:
        flat = weights.swapaxes(2, 3).reshape(*out.shape[:3], -1)
        rows = v.reshape(*v.shape[:2], -1, v.shape[4])
        size = min(TILE, rows.shape[2])

        def tile(i: jax.Array, total: jax.Array) -> jax.Array:
            start = jnp.minimum(i * size, rows.shape[2] - size)
            new = start + jnp.arange(size) >= i * size  # the last tile may overlap the one before
            w = jax.lax.dynamic_slice_in_dim(flat, start, size, axis=3)
            w = jnp.where(new[None, None, None], w, 0.0)
            x = jax.lax.dynamic_slice_in_dim(rows, start, size, axis=2)
            bad = ~jnp.isfinite(x)
            clean = jnp.einsum("rkxn,rknd->rkxd", w, jnp.where(bad, 0, x).astype(jnp.float32))
            # A row that is seen and is not finite must still show.
            seen = jnp.einsum("rkxn,rknd->rkxd", (w > 0) * 1.0, bad.astype(jnp.float32))
            return total + jnp.where(seen > 0, jnp.nan, clean)

        return jax.lax.fori_loop(0, -(-rows.shape[2] // size), tile, jnp.zeros_like(out))

    return jax.lax.cond(jnp.all(jnp.isfinite(out)), lambda: out, again)
