"""What arrives at one process, given to all."""

import pickle
from typing import TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from jaxkv.places import bucket

T = TypeVar("T")

_LEAST = 1024
"""Bytes that are sent at least; more of them in powers of two, so that few shapes are compiled."""


def broadcast(value: T) -> T:
    """Return in every process what process 0 was given: a batch, or a list of requests.

    Plans and loops want the same batch in every process. Every process must call this; what others
    than process 0 are given is not looked at, and may be None.

    Args:
      value: anything that can be pickled, in process 0. Arrays should be NumPy ones.

    Returns:
      A copy of it in each process; with a single one, the value itself.

    Examples:
      >>> batch = make_batch([[1, 2, 3], [4]])
      >>> sharding.broadcast(batch) is batch
      True

      Requests that arrive at process 0, in a server of several:

      >>> def step(engine, arrived):
      ...     for request in sharding.broadcast(arrived):
      ...         engine.submit(request)
      ...     return engine.step()
    """
    if jax.process_count() == 1:
        return value
    sends = jax.process_index() == 0
    data = np.frombuffer(pickle.dumps(value) if sends else b"", np.uint8)
    size = int(broadcast_one_to_all(np.int32(data.size)))
    padded = np.zeros(bucket(max(size, _LEAST)), np.uint8)
    padded[: data.size] = data
    return pickle.loads(np.asarray(broadcast_one_to_all(padded))[:size].tobytes())
