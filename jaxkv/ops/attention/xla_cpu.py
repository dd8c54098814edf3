"""Attention in the forms that a processor is fast with, all of them found by measuring."""

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
