"""Whether a memory fits the device, asked before it is made."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from models.errors import ModelError


def check_room(make: Callable[[], Any], what: str) -> None:
    """Refuse a memory that is larger than all that the device has.

    One that is smaller may still not fit, beside weights and whatever else there is.

    Args:
      make: makes the memory; it is traced, so nothing is allocated.
      what: how the message names the memory.

    Raises:
      ModelError: when it cannot fit.
    """
    leaves = jax.tree.leaves(jax.eval_shape(make))
    wanted = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    there = min(_limits(), default=wanted)
    if wanted > there:
        raise ModelError(
            f"{what} takes {wanted / 1e9:,.1f} GB and the device has {there / 1e9:,.1f} GB; ask "
            "for fewer tokens or cells."
        )


def _limits() -> Iterator[int]:
    """The bytes of the default device, and of a processor's memory whatever else limits them."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield stats["bytes_limit"]
    if device.platform != "cpu":
        return
    with contextlib.suppress(ValueError, OSError):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(ImportError):  # not on every system
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            yield most
    with contextlib.suppress(ValueError, OSError):  # "max" where a container has no limit
        yield int(Path("/sys/fs/cgroup/memory.max").read_text())
