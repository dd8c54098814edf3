"""Plant small mistakes in the core, one at a time, and count how many the tests notice.

    python -m tools.mutate --seed 0 --sample 200

It fails where fewer than 95 % are noticed and chance does not explain it. A seeded sample of all
mutants (`tools.mutants`) is run, each in a copy of the tree and never in place: the doctests and
tests that know the file, the quickest first, until one fails; not those that `.ci/run` leaves out.
Survivors are printed with their diffs, and at the end the share killed with its 95 % interval. A
survivor is a test that is missing, or it changes nothing that can be observed; the latter are
listed in `equivalents.toml`, each with its reason, and counted apart.

mutmut and cosmic-ray were looked at. mutmut leaves decorated functions alone, which here are those
under `jax.jit`, and forks one process, which JAX's threads do not survive. cosmic-ray mutates in
place and has one test command for all modules. Neither draws a seeded sample.
"""

import argparse
import difflib
import hashlib
import importlib.util
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ("jaxkv", "models", "tests", "conftest.py", "pyproject.toml")
PATIENCE = 5
"""How many times as long as without a mistake tests may take: what loops for ever is noticed."""

KNOWN_BY = {
    "jaxkv/window.py": "window limits stateful",
    "jaxkv/stamp.py": "arguments stale going_back refusals batch recurrent",
    "jaxkv/kv/cells.py": "arguments limits invariants traps streams "
    "copies window shift stale going_back stateful refusals permutation sets every_argument",
    "jaxkv/kv/reuse.py": "window copies stateful every_argument",
    "jaxkv/kv/slots.py": "arguments limits traps window streams copies refusals going_back "
    "stale stateful recurrent every_argument sharding",
    "jaxkv/kv/stripes.py": "striped stateful every_argument",
    "jaxkv/kv/tiles.py": "tiled stateful every_argument",
    "jaxkv/kv/source.py": "sources families",
    "jaxkv/kv/transfer.py": "copies stateful every_argument sharding",
    "jaxkv/kv/arrivals.py": "copies stateful every_argument",
    "jaxkv/recurrent/s*.py": "arguments limits copies invariants recurrent stale stateful "
    "every_argument",
    "jaxkv/recurrent/copy.py": "copies recurrent stale stateful every_argument",
    "jaxkv/hybrid.py": "arguments limits window recurrent stale refusals stateful sources copies",
    "jaxkv/planning/*.py": "arguments limits traps refusals batch step sets streams window "
    "recurrent stale stateful sources every_argument",
}
"""The core, as patterns of its files, and the tests that know each, the quickest first."""

PARTS = ("not core and not nightly", "core and not nightly")
"""What is run one after the other: a mistake that a quick test notices costs no slow one."""

DOCTESTS = ("jaxkv/verbs", "jaxkv/kv/make.py", "jaxkv/recurrent/cache.py", "jaxkv/planning")
"""Examples that go through the whole core."""


def main() -> int:
    """Read the command line, and do it."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (default 200)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no mutant later")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="of files whose name contains this")
    options = parser.parse_args()

    start = time.monotonic()
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for pattern in KNOWN_BY
        for path in files_of(pattern)
        if options.only in str(path)
    }
    every = [m for file, source in sorted(sources.items()) for m in mutants_of(file, source)]
    chosen = sample(every, sources, options.seed)[: options.sample]
    excused = equivalents()
    for entry in excused:
        if entry["file"] in sources and not any(excuse(m, sources[m.file], [entry]) for m in every):
            print("listed as equivalent, and no mutant:", entry)
            return 2
    drawn = [m for m in chosen if not excuse(m, sources[m.file], excused)]
    print(f"{len(chosen)} of {len(every)} mutants, {len(chosen) - len(drawn)} known as equivalent")

    with Trees(options.workers) as trees, ThreadPoolExecutor(options.workers) as pool:
        tests = sorted({t for m in drawn for t in runs_of(m.file)})
        outcomes = list(pool.map(lambda test: trees.run(None, [test], 3600), tests))
        takes = {test: seconds for test, (_, seconds) in zip(tests, outcomes, strict=True)}
        print(f"without a mistake: {sum(takes.values()):.0f} s", flush=True)
        if broken := [test for test, (how, _) in zip(tests, outcomes, strict=True) if how]:
            print("these fail already:", *broken)
            return 2
        end = start + options.seconds
        outcomes = pool.map(lambda m: verdict(trees, m, sources[m.file], takes, end), drawn)
        verdicts = [how for how in outcomes if how is not None]

    killed, all_ = sum(map(bool, verdicts)), len(verdicts)
    low, high = (100 * bound for bound in wilson(killed, all_))
    print(
        f"\nkilled {killed} of {all_}: {100 * killed / max(all_, 1):.1f} %, 95 % interval "
        f"{low:.1f} to {high:.1f} %; {verdicts.count('too slow')} of them by taking too long"
    )
    return 0 if high >= 95 else 1


def sample(every: list[Mutant], sources: dict[str, str], seed: int) -> list[Mutant]:
    """Draw an order of all mutants, in which an edit of the code moves only those it touches."""
    seen: Counter[tuple[str, str, str]] = Counter()
    order = {}
    for mutant in every:
        key = mutant.key(sources[mutant.file])
        order[mutant] = hashlib.sha256(repr((seed, key, seen[key])).encode()).digest()
        seen[key] += 1
    return sorted(every, key=order.__getitem__)


def verdict(
    trees: "Trees", mutant: Mutant, source: str, takes: dict[str, float], end: float
) -> str | None:
    """How a mutant is noticed, nothing if it is not; printed, a survivor with its diff.

    None where it is later than `end`: it was not tried.
    """
    if time.monotonic() > end:
        return None
    tests = runs_of(mutant.file)
    limit = 60 + PATIENCE * sum(takes[test] for test in tests)
    how, seconds = trees.run((mutant, source), tests, limit)
    line = f"{how or 'SURVIVED':8} {seconds:4.0f} s  {mutant.file}:{mutant.line} {mutant.where}"
    print(line if how else f"{line}\n{diff(mutant, source)}", flush=True)
    return how


class Trees:
    """Copies of the tree, one for each worker, and a cache of programs that they share."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free: queue.Queue[Path] = queue.Queue()

    def __enter__(self) -> "Trees":
        self.folder = Path(tempfile.mkdtemp(prefix="jaxkv-mutants-"))
        for i in range(self.count):
            tree = self.folder / f"tree{i}"
            for name in CARRIED:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                copy(ROOT / name, tree / name)
            self.free.put(tree)
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(
        self, planted: tuple[Mutant, str] | None, tests: list[str], limit: float
    ) -> tuple[str, float]:
        """Run tests on a free tree, with a mistake or none: how one fails, and the seconds."""
        tree, start = self.free.get(), time.monotonic()
        try:
            if planted:
                mutant, source = planted
                write(tree / mutant.file, mutant.applied(source))
            how = fails(tree, tests, self.folder / "xla", limit)
            return how, time.monotonic() - start
        finally:
            if planted:
                write(tree / mutant.file, source)
            self.free.put(tree)


def write(path: Path, text: str) -> None:
    """Write a module, and forget what was compiled of it: edits come faster than clocks tick."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def fails(tree: Path, tests: list[str], cache: Path, limit: float) -> str:
    """How a test or an import fails: "killed", "too slow", or nothing if none does."""
    start = time.monotonic()
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    for part in PARTS:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["-m", part, "-k", "not at_length", *tests]
        left = limit - (time.monotonic() - start)
        try:
            done = subprocess.run(
                command, cwd=tree, env={**os.environ, **settings}, timeout=max(left, 1),
                capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "too slow"
        if done.returncode in (3, 4):
            raise RuntimeError(f"pytest could not run:\n{done.stdout}\n{done.stderr}")
        if done.returncode not in (0, 5):  # 5: nothing to run. Below 0: it crashed.
            return "killed"
    return ""


def files_of(pattern: str) -> list[Path]:
    """The files of a pattern; one that finds none is out of date."""
    found = [path for path in sorted(ROOT.glob(pattern)) if path.name != "__init__.py"]
    if not found:
        raise SystemExit(f"no file is {pattern!r}: bring tools/mutate.py up to date")
    return found


def runs_of(file: str) -> list[str]:
    """What knows a file: its own examples, the tests, and the examples of what is built on it."""
    (names,) = {names for pattern, names in KNOWN_BY.items() if Path(file).match(pattern)}
    found = [next(ROOT.glob(f"tests/*/test_{name}.py")) for name in names.split()]
    return [file, *(str(path.relative_to(ROOT)) for path in found), *DOCTESTS]


def equivalents() -> list[dict[str, str]]:
    """What is listed as equivalent; every entry has a reason."""
    listed = tomllib.loads(Path(__file__).with_name("equivalents.toml").read_text("utf-8"))
    assert all(entry.keys() >= {"file", "function", "reason"} for entry in listed["mutant"])
    return listed["mutant"]


def excuse(mutant: Mutant, source: str, listed: list[dict[str, str]]) -> str:
    """The reason why a mutant changes nothing, or nothing.

    An entry names a mutant by its file, its function and its line as it becomes; an entry without
    a line is about all of the function.
    """
    file, where, line = mutant.key(source)
    for entry in listed:
        if (entry["file"], entry["function"]) == (file, where) and entry.get("line", line) == line:
            return entry["reason"]
    return ""


def diff(mutant: Mutant, source: str) -> str:
    """The lines that a mutant changes, before and after."""
    sides = (text.splitlines() for text in (source, mutant.applied(source)))
    lines = difflib.unified_diff(*sides, lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share that was found in a sample (Wilson's)."""
    if not count:
        return 0.0, 1.0
    z, share = 1.96, hits / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return (middle - spread) / scale, (middle + spread) / scale


if __name__ == "__main__":
    sys.exit(main())
