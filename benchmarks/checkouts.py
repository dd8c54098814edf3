"""Compare a benchmark between checkouts, in live processes that alternate.

    git worktree add ../before HEAD~5
    python -m benchmarks.checkouts loop ../before . ../before -- --batch 1 --rounds 10

runs `benchmarks.loop` of each checkout, with its library and the arguments after `--`, in separate
processes. Separate runs differ by time and by the state of the processor's caches; live processes
that alternate differ less. A checkout that is named twice, as in the example, shows the noise.

The programs must run their sides with `benchmarks.turns.take_turns`. Sides are compared by name;
`--same "split=streams 8"` gives the name of a side in the first checkout, if it differs.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import turns  # in a process that serves, that of its checkout


def serve(port: int, checkout: str, program: str, arguments: list[str]) -> None:
    """Run a program of a checkout; a side runs when the parent names it."""
    sys.path[0] = checkout  # in place of the folder of this file
    parent = Connection(port)
    library = importlib.import_module("jaxkv").__file__
    assert library is not None and Path(library).is_relative_to(checkout), library

    def take_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        took: dict[str, list[float]] = {name: [] for name in sides}
        parent.send((list(sides), rounds))
        while (name := parent.recv()) is not None:
            took[name].append(sides[name]())
            parent.send(took[name][-1])
        return {name: times or [float("nan")] for name, times in took.items()}

    turns.take_turns = take_turns
    turns.table = lambda took, **_: {name: float(np.median(times)) for name, times in took.items()}
    sys.argv = [program, *arguments]
    importlib.import_module(f"benchmarks.{program}").main()
    parent.send(None)


def started(checkout: str, program: str, arguments: Sequence[str], shown: bool) -> Connection:
    """Start a process that serves a checkout, and show or hide its output."""
    here, there = Pipe()
    path = str(Path(checkout).resolve())
    subprocess.Popen(
        [sys.executable, __file__, "--serve", str(there.fileno()), path, program, *arguments],
        cwd=path,
        env={**os.environ, "PYTHONPATH": path},
        pass_fds=[there.fileno()],
        stdout=None if shown else subprocess.DEVNULL,
    )
    there.close()
    return here


def asked(child: Connection, name: str) -> float:
    """Run a side of a process, and return its time."""
    child.send(name)
    return answer(child)


def answer(child: Connection) -> Any:
    """Wait for a message of a process; one that ended printed the reason."""
    try:
        return child.recv()
    except (EOFError, ConnectionError):
        raise SystemExit("a checkout's program ended, see above") from None


def compare(
    children: Sequence[Connection], checkouts: Sequence[str], same: Mapping[str, str]
) -> None:
    """Alternate between all processes until their programs end."""
    while any(asks := [answer(child) for child in children]):
        if not all(asks):
            raise SystemExit("a checkout's program has more to compare than another's")
        rounds = asks[0][1]
        for first in asks[0][0]:
            name = same.get(first, first)
            if any(name not in sides for sides, _ in asks[1:]):
                print(f"  {name}: not in every checkout, see --same")
                continue
            names = [first, *[name] * (len(children) - 1)]
            sides = {str(i): partial(asked, child, names[i]) for i, child in enumerate(children)}
            took = [np.array(times) for times in turns.take_turns(sides, rounds).values()]
            print(f"  {name}\n    {np.median(took[0]):9.3f} ms  {checkouts[0]}")
            for checkout, times in zip(checkouts[1:], took[1:], strict=True):
                low, ratio, high = np.quantile(times / took[0], [0.25, 0.5, 0.75])
                print(
                    f"    {np.median(times):9.3f} ms  {checkout}: {ratio:.3f} x "
                    f"({low:.3f} to {high:.3f})",
                    flush=True,
                )
        for child in children:
            child.send(None)


def main() -> None:
    """Print the milliseconds in each checkout, and the ratios to the first."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("program", help="a module of benchmarks, such as loop")
    parser.add_argument("checkouts", nargs="+", help="folders; the first is compared with")
    parser.add_argument("--same", nargs="*", default=[], metavar="FIRST=OTHERS")
    mine, theirs = sys.argv[1:], []
    if "--" in mine:
        cut = mine.index("--")
        mine, theirs = mine[:cut], mine[cut + 1 :]
    args = parser.parse_args(mine)
    for checkout in args.checkouts:
        if not Path(checkout, "benchmarks", f"{args.program}.py").is_file():
            parser.error(
                f"expected a checkout that has benchmarks/{args.program}.py, got {checkout}"
            )
    if wrong := [pair for pair in args.same if "=" not in pair]:
        parser.error(f"expected FIRST=OTHERS after --same, got {wrong[0]}")
    same = dict(pair.split("=", 1) for pair in args.same)
    children = [
        started(checkout, args.program, theirs, shown=i == len(args.checkouts) - 1)
        for i, checkout in enumerate(args.checkouts)
    ]
    compare(children, args.checkouts, same)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5:])
    else:
        main()
