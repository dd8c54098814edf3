"""Alternating measurements of sides that do the same work in one process.

The speed of a shared machine drifts, so ratios of sides measured in the same minutes are more
reliable than times. The order A-B-B-A cancels a steady drift, and the median ignores single
disturbances.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np


def take_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Ask each side how long it takes, `rounds` times, in the order A-B-B-A.

    Args:
      sides: by name, a function that does the work and returns the time of a unit. One uncounted
        call at first compiles it.
      rounds: how often each is called.
    """
    for side in sides.values():
        side()
    took: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sides if turn % 2 == 0 else reversed(sides):
            took[name].append(sides[name]())
    return took


def milliseconds(
    work: Callable[[], object], *, repeats: int = 1, units: int = 1
) -> Callable[[], float]:
    """Make a side of some work: the milliseconds of a unit, results awaited.

    Args:
      work: the work.
      repeats: how often in a turn. With more than one, an uncounted call first replaces the data of
        other sides in the CPU's caches.
      units: the number of units in one call, such as tokens.
    """

    def side() -> float:
        if repeats > 1:
            jax.block_until_ready(work())
        start = time.perf_counter()
        for _ in range(repeats):
            done = work()
        jax.block_until_ready(done)
        return 1e3 * (time.perf_counter() - start) / repeats / units

    return side


def table(
    took: Mapping[str, Sequence[float]],
    *,
    own: Sequence[str] = (),
    megabytes: float | None = None,
    read: float | None = None,
) -> dict[str, float]:
    """Print a line for each side; returns the medians.

    Args:
      took: the result of `take_turns`, in milliseconds.
      own: the sides that others are compared with: for each, the ratio of their times.
      megabytes: the bytes that must be read, at least.
      read: the measured read bandwidth in GB/s.
    """
    middle = {name: float(np.median(times)) for name, times in took.items()}
    width = max(map(len, took))
    for name, times in took.items():
        line = f"  {name:{width}s}  {middle[name]:8.3f} ms  ({min(times):.3f} to {max(times):.3f})"
        for one in own:
            line += f"   {middle[name] / middle[one]:5.2f} x {one}" if name != one else ""
        if megabytes is not None and read is not None:
            speed = megabytes / middle[name]
            line += f"   {speed:5.1f} GB/s, {speed / read:4.0%} of the bandwidth"
        print(line, flush=True)
    return middle
