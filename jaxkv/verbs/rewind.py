"""Going back: an earlier table with the buffers of a later cache."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, CacheTable, merge, split
from jaxkv.spec import check_spec
from jaxkv.tables import jit_table


def rewind(table: Any, cache: Cache) -> tuple[Cache, jax.Array]:
    """Return to an earlier table, with the buffers of a later cache: undo what was applied since.

    Exact when the buffers still hold what the old table knew: since then the table was edited, and
    ubatches went into cells that were empty in it. It is refused where a cell that the old table
    uses was written over (by a ubatch, a copy between streams or a defrag, into a cell freed since)
    or rotated (by an update). Plans that were made meanwhile are stale: plan again. The table knows
    the tokens, and not the model: cells of the same tokens that other weights, or other arguments
    of `attend`, have filled since are taken for the old ones.

    Args:
      table: the table of the earlier cache, `split(cache)[0]`. It must not have been donated:
        donate the buffers alone, and join inside of the step.
      cache: the later cache.

    Returns:
      The cache as it was, and `ok`, `[]` bool: False if it was refused, and then the cache is the
      later one, unchanged.

    Raises:
      TypeError: when the first argument is no table.
      ValueError: when it is one of a cache of other sizes or of another kind.

    Examples:
      >>> cache = make_kv_cache(layers=1, cells=4, kv_heads=1, head_dim=2)
      >>> table, _ = split(cache)
      >>> later = apply(cache, init_batch(cache, make_batch([1, 2])))
      >>> cache, ok = rewind(table, later)
      >>> num_used_cells(cache).item(), ok.item()
      (0, True)

      What was written over cannot come back:

      >>> table, _ = split(later)
      >>> other = apply(clear(later), init_batch(clear(later), make_batch([3])))
      >>> rewind(table, other)[1].item()
      False
    """
    now, buffers = split(cache)
    if not isinstance(table, CacheTable):
        raise TypeError(f"wanted the table of an earlier cache, got {type(table)}")
    check_spec(table.spec, now.spec, "a table")
    then, ok = _rewind(now, table)
    return merge(then, buffers), ok


@jit_table
def _rewind(now: Any, then: Any) -> tuple[Any, jax.Array]:
    """Return the table of `then` if it can be returned to, else of `now`; and `ok`, `[]` bool."""
    back, ok = now.rewind(then)
    return jax.tree.map(lambda new, old: jnp.where(ok, new, old), back, now), ok
