"""Sizes of caches, and memory limits of devices."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

import jaxkv
from models.errors import ModelError, first_line

Streams = Literal["unified", "split"]
"""Whether all texts share the cells of one stream, or each text has a stream."""


def cells_for(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    streams: Streams = "unified",
    *,
    samples: int = 1,
) -> int:
    """Return the number of cells that each stream needs for prompts and texts.

    The number is rounded up to a multiple of 256. If each text has a stream, the longest prompt
    determines the number. If texts share one stream, the samples of a prompt share the cells of the
    prompt.

    Examples:
      >>> (cells_for([[1, 2, 3], [4, 5]], 128), cells_for([[1, 2, 3], [4, 5]], 128, "split"))
      (512, 256)
      >>> cells_for([[1] * 500], 128, samples=4)
      1024
    """
    # The last token of a text is never cached.
    num_fed = max_tokens - 1
    if streams == "split":
        needed = max(map(len, prompts)) + num_fed
    else:
        needed = sum(len(prompt) + samples * num_fed for prompt in prompts)
    return -(-needed // 256) * 256


def make_with_room(
    make_cache: Callable[..., Any], *, cells: int, streams: int = 1, **options: Any
) -> Any:
    """Make an empty cache; raise `ModelError` if it is larger than the memory of its devices.

    The size of the cache on all devices is compared with the memory of all devices. An array that
    is replicated on a mesh counts once for each device. A cache that passes this check can still be
    too large, since other arrays also need memory.

    Args:
      make_cache: function that makes the cache, see `Model.make_cache`.
      cells: number of cells of each stream.
      streams: number of streams.
      options: other arguments of `make_cache`.

    Raises:
      ModelError: If the cache is too large, or its sizes are inconsistent. The error is raised
        before an array is allocated.
    """

    def make() -> Any:
        return make_cache(cells=cells, streams=streams, **options)

    try:
        cache = jax.eval_shape(make)
    except ValueError as error:
        raise ModelError(f"The cache cannot be made: {first_line(error)}.") from error
    mesh = jax.sharding.get_mesh()
    rules, devices, num_bytes = cache.table.sharding_rules, 1, cache.nbytes
    if rules is not None and not mesh.empty:
        devices = mesh.size
        num_bytes = devices * jaxkv.sharding.device_bytes(cache, mesh, rules).total
    limit = min(limits(devices), default=num_bytes)
    if num_bytes > limit:
        has = "the device has" if devices == 1 else f"the {devices} devices have"
        raise ModelError(
            f"A cache of {cells * streams:,} cells takes {num_bytes / 1e9:,.1f} GB and {has} "
            f"{limit / 1e9:,.1f} GB; ask for fewer tokens or cells."
        )
    return make()


def limits(devices: int) -> Iterator[int]:
    """Yield limits of the memory of all devices together, in bytes.

    For CPUs, yields the memory of the machine and the limits of the process and its container.
    """
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        yield stats["bytes_limit"] * devices
    if device.platform != "cpu":
        return
    with contextlib.suppress(ValueError, OSError):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(ImportError):  # not on every system
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit
    with contextlib.suppress(ValueError, OSError):  # "max" where a container has no limit
        yield int(Path("/sys/fs/cgroup/memory.max").read_text())
