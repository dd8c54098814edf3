"""Taking turns: sides that do the same work in one process, there and back, and what came of it.

A machine that others use drifts by the minute, so a time says little and a ratio a lot, if both
sides were measured in the same minutes. Order A-B-B-A cancels what drifts steadily; the median
takes no notice of a disturbance.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np


def take_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Ask each side how long it takes, `rounds` times, in the order A-B-B-A.

    Args:
      sides: by name, a function that does the work and returns how long a unit of it took. It is
        called once more at first, and that does not count: it compiles.
      rounds: how often each is asked.
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
      work: what is done.
      repeats: how often in a turn. With more than one it is done once before, uncounted, so that
        what the sides before it left in the processor's caches is gone.
      units: how many there are in one piece of work, such as tokens.
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
      took: what `take_turns` returned, in milliseconds.
      own: the sides that others are compared with: for each, how many times as long they took.
      megabytes: what had to be read, at least.
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
