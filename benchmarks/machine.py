"""The machine of a measurement: its CPU, versions, and memory bandwidth.

A decode step reads every weight and every visible key and value once, so bytes divided by the read
bandwidth is a lower bound of its time. Run `python -m benchmarks.machine`.
"""

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "torch", "transformers", "llama-cpp-python")
GIGA = 1e9


def threads() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """The name of the CPU, where the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The versions of the packages that a benchmark here may use; missing ones are omitted."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def bandwidth(*, gigabytes: float = 1.0, workers: int | None = None, repeats: int = 5):
    """Measures memory traffic over arrays larger than every CPU cache.

    Args:
        gigabytes: size of the array that is read.
        workers: threads that share the work; all cores by default.
        repeats: runs of each kind, of which the fastest counts.

    Returns:
        `read`, `copy` (bytes read plus bytes written) and `xla_read`, in GB/s. `read` is numpy's
        maximum of float32 in threads, which needs the least arithmetic per byte. `xla_read` is
        jax's sum of the same array.
    """
    import jax
    import jax.numpy as jnp

    workers = workers or threads()
    # Written, since untouched pages of an allocation all map to one page of zeros.
    source = np.ones(int(gigabytes * GIGA) // 4, np.float32)
    target = np.ones_like(source)
    sources, targets = (np.array_split(a, workers * 4) for a in (source, target))

    def timed(work) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return min(seconds)  # other programs only make a run slower

    with ThreadPoolExecutor(workers) as pool:
        read = timed(lambda: list(pool.map(np.max, sources)))
        copy = timed(lambda: list(pool.map(np.copyto, targets, sources)))
    on_device = jax.device_put(source, jax.devices("cpu")[0])
    total = jax.jit(lambda a: jnp.sum(a))
    total(on_device).block_until_ready()
    xla = timed(lambda: total(on_device).block_until_ready())
    size = source.nbytes / GIGA
    return {"read": size / read, "copy": 2 * size / copy, "xla_read": size / xla}


def device_copy(*, gigabytes: float = 1.0, repeats: int = 5) -> float:
    """Measures how fast the default device copies its memory: GB/s, read and written."""
    import jax
    import jax.numpy as jnp

    source = jnp.ones(int(gigabytes * GIGA) // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(source).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        copy(source).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / GIGA / min(seconds)


def main() -> None:
    """Prints the properties of the machine for a measurement."""
    print(f"machine    {platform.system()} {platform.machine()}, {threads()} cores, {processor()}")
    print("versions   " + ", ".join(f"{name} {v}" for name, v in versions().items()))
    for workers in sorted({1, threads()}):
        speed = bandwidth(workers=workers)
        print(
            f"bandwidth  read {speed['read']:.1f} GB/s, copy {speed['copy']:.1f} GB/s read and "
            f"written, with {workers} numpy thread(s); read {speed['xla_read']:.1f} GB/s by XLA"
        )


if __name__ == "__main__":
    main()
