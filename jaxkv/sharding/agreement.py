"""Whether all processes hold the same table, and were given the same batch."""

from typing import Any
from zlib import crc32

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxkv.cache import Cache, split
from jaxkv.places import is_concrete, to_host
from jaxkv.verbs.known import check_known


def assert_in_sync(cache: Cache, batch: Any = None) -> None:
    """Raise unless all processes hold the same table and were given the same batch.

    JAX never compares what it calls replicated: processes that were given different batches plan
    and compute on, each by its own. Every process must call this, outside of `jit`.

    Args:
      cache: any cache.
      batch: a tree of arrays and numbers that every process was given, such as a `Batch`. Arrays
        that are split over processes are left out.

    Raises:
      RuntimeError: in every process, when they differ; it names the processes.
      TypeError: when the cache is traced, or shapes alone.
      ValueError: when the table was donated, or is that of a batch of caches.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"))
      >>> sizes = dict(layers=1, cells=8, kv_heads=2, head_dim=4, sequences=2, streams=2)
      >>> sharding.assert_in_sync(sharding.make_sharded(lambda: make_kv_cache(**sizes), mesh))
    """
    table, _ = split(cache)
    check_known(table)
    seen = jax.tree.leaves((to_host(table), batch))
    data = b"".join(np.asarray(x).tobytes() for x in seen if is_concrete(x))
    found = np.ravel(multihost_utils.process_allgather(np.uint32(crc32(data))))
    if wrong := np.flatnonzero(found != found[0]).tolist():
        raise RuntimeError(
            f"expected the table and batch of process 0, got others in processes {wrong}; give "
            f"every process the same, as jax.experimental.multihost_utils.broadcast_one_to_all does"
        )
