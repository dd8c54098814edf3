"""Plant small mistakes in the core, one at a time, and count how many the tests detect.

    python -m tools.mutate --seed 0 --sample 200

It fails if fewer than 95 % are detected and chance does not explain it. It runs a seeded sample of
all mutants (`tools.mutants`), each in a copy of the tree. A mutant gets the doctests and tests of
its file, without those that `.ci/run` omits, until one fails. Tests that killed many mutants of the
same function or file in little time run first. It prints survivors with their diffs, and at the end
the share killed with its 95 % interval. A survivor is a missing test, or it has no observable
effect; `equivalents.toml` lists the latter with reasons, and they are counted separately.

Each mutant has a separate process, forked from one that has imported the common modules. These
exclude `jaxkv` and any device of JAX, whose threads would not survive the fork.

Two other tools do not fit. mutmut skips decorated functions, which here are those under `jax.jit`.
cosmic-ray mutates in place and has one test command for all modules. Neither draws a seeded sample.
"""

import argparse
import gc
import importlib
import importlib.util
import math
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import hypothesis
import pytest

from tools.mutants import Mutant, mutants_of, sample

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ("jaxkv", "models", "tests", "docs/reference", "conftest.py", "pyproject.toml")
PATIENCE = 5
"""How many times its normal duration a test may take, which detects endless loops."""

OPTIONS = [
    "-n", "0", "-x", "-q", "-m", "not nightly", "-p", "no:cacheprovider", "-o", "timeout=0",
    "--assert=plain", "--hypothesis-profile=mutants",
]  # fmt: skip
"""Options of pytest: no time is spent on reports of failures."""

EDITS = "seq_rm seq_cp insert fields defrag stateful every_argument"
PLANS = "limits llama_cpp_edge_cases window streams plan_reasons reasons fits stale_plans sets"

KNOWN_BY = {
    "jaxkv/window.py": "window limits stateful looking_ahead",
    "jaxkv/core/hashing.py": "arguments stale_plans rewind plan_reasons batch recurrent",
    "jaxkv/kv/cells.py": "arguments invariants seq_add rewind contract "
    f"unwritten_layers {EDITS} {PLANS}",
    "jaxkv/kv/eviction.py": f"rewind {EDITS} {PLANS}",
    "jaxkv/kv/slots.py": "arguments rewind recurrent sharding unwritten_layers prefix "
    f"{EDITS} {PLANS}",
    "jaxkv/kv/placement.py": f"placement limits window {EDITS}",
    "jaxkv/kv/record.py": f"record {EDITS}",
    "jaxkv/kv/tiles.py": f"tiled {EDITS}",
    "jaxkv/kv/cross_attention.py": "sources families",
    "jaxkv/kv/copy_pooled.py": f"sharding unwritten_layers {EDITS}",
    "jaxkv/recurrent/s*.py": "arguments limits seq_add rewind invariants recurrent "
    f"stale_plans reasons fits prefix {EDITS}",
    "jaxkv/recurrent/copy.py": f"prefix recurrent stale_plans {EDITS}",
    "jaxkv/hybrid.py": f"arguments recurrent sources hybrid_plans {EDITS} {PLANS}",
    "jaxkv/planning/*.py": "arguments layout_edges hybrid_plans batch step recurrent sources x64 "
    f"model_meshes stateful every_argument loop_contract {PLANS}",
    "jaxkv/generation/*.py": "loop_edges loop_contract loop_arguments nothing attention_layers "
    "decode generate prefill sampling logits score context_shift beams compiles_once edit extra "
    "compression",
    "jaxkv/generation/speculative/*.py": "speculation_edges speculation speculation_models "
    "loop_contract loop_arguments nothing head_drafter extra",
    "jaxkv/serving/*.py": "batching_edges batching batching_store prefix loop_arguments swapping "
    "host_memory extra",
    "jaxkv/serving/prefix_cache/*.py": "prefix batching_store host_memory extra",
}
"""The mutated code, as patterns of its files, and the tests of each."""

LEFT_OUT = {"__init__.py", "types.py"}
"""Names of files without computations."""

OF_CORE = (
    *("jaxkv/api", "jaxkv/kv/make.py", "jaxkv/recurrent/table.py", "jaxkv/planning"),
    "tests/docs/test_imports.py::test_import_asks_for_no_device_and_no_jaxtyping",
)
"""Tests of every file except those of loops: examples that use the whole core, and imports."""

LOOPS = "jaxkv/generation/", "jaxkv/serving/"
"""Folders that the core does not import."""


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutate", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=200, help="how many mutants (default 200)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no mutant later")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="of files that contain one of these"
    )
    options = parser.parse_args()

    def included(file: str) -> bool:
        return any(part in file for part in options.only)

    start = time.monotonic()
    sources = {file: text for file, text in mutated_sources().items() if included(file)}
    every = all_mutants(sources)
    chosen = sample(every, sources, options.seed)[: options.sample]
    excused = [entry for entry in equivalents() if included(entry["file"])]
    if stale := entries_without_mutant(excused, every, sources):
        print("listed as equivalent, and no mutant:", *stale, sep="\n")
        return 2
    drawn = [m for m in chosen if not excuse(m, sources[m.file], excused)]
    print(f"{len(chosen)} of {len(every)} mutants, {len(chosen) - len(drawn)} known as equivalent")

    with tempfile.TemporaryDirectory(prefix="jaxkv-mutants-") as folder:
        trees = [copied(Path(folder) / f"tree{i}") for i in range(options.workers)]
        prepare(Path(folder) / "xla")
        history = History()
        tests = sorted({test for m in drawn for test in runs_of(m.file)})
        ((_, how, test, seconds),) = outcomes([(None, tests)], sources, trees, history)
        print(f"without a mistake: {seconds:.0f} s", flush=True)
        if how:
            print(f"{test} fails already:\n{(trees[-1] / 'printed').read_text()}")
            return 2
        end = start + options.seconds
        tried = []
        jobs = [(m, runs_of(m.file)) for m in drawn]
        for mutant, how, test, seconds in outcomes(jobs, sources, trees, history, end):
            tried.append(how)
            line = f"{how or 'SURVIVED':8} {seconds:4.0f} s  {mutant.kind:9} "
            line += f"{mutant.file}:{mutant.line} {mutant.where}  {test if how else ''}"
            print(line if how else f"{line}\n{mutant.diff(sources[mutant.file])}", flush=True)

    killed, all_ = sum(map(bool, tried)), len(tried)
    low, high = (100 * bound for bound in wilson(killed, all_))
    print(
        f"\nkilled {killed} of {all_}: {100 * killed / max(all_, 1):.1f} %, 95 % interval "
        f"{low:.1f} to {high:.1f} %; {tried.count('too slow')} of them by taking too long"
    )
    return 0 if high >= 95 else 1


class History:
    """Durations of tests without a mistake, and the mutants that they ran on and killed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.runs: Counter[tuple[str, str]] = Counter()
        self.kills: Counter[tuple[str, str]] = Counter()

    def add(self, mutant: Mutant | None, began: list[tuple[float, str]], killed: bool) -> None:
        """Add tests in the order of their starts; the last killed, or is the unnamed end."""
        if mutant is None:
            for (start, test), (stop, _) in zip(began, began[1:], strict=False):
                self.seconds[test] = stop - start
            return
        for _, test in began:
            self.runs.update(likeness(mutant, test))
        for _, test in began[-1:] if killed else ():
            self.kills.update(likeness(mutant, test))

    def rate(self, mutant: Mutant | None, test: str) -> float:
        """How many such mutants a test is likely to kill each second."""
        if mutant is None:
            return 0.0
        seconds = self.seconds.get(test, 1.0)
        share = 0.3 if test.startswith(mutant.file) else min(0.03 + 0.1 * seconds, 0.5)
        for key in likeness(mutant, test):  # a wider group counts as one try
            share = (self.kills[key] + share) / (self.runs[key] + 1)
        return share / (seconds + 0.02)


def likeness(mutant: Mutant, test: str) -> list[tuple[str, str]]:
    """Name groups of mutants and of tests that contain this pair, the widest first."""
    tests, function = test.partition("::")[0], f"{mutant.file} {mutant.where}"
    return [("", tests), (mutant.file, tests), (mutant.file, test), (function, test)]


def outcomes(
    jobs: list[tuple[Mutant | None, list[str]]],
    sources: dict[str, str],
    trees: list[Path],
    history: History,
    end: float = math.inf,
) -> Iterator[tuple[Mutant | None, str, str, float]]:
    """Run tests on mutants, one in each tree at a time; none starts after `end`.

    Yields each mutant, its outcome, the test that detected it, and seconds of a core.
    """
    free, busy = list(trees), {}

    def finished() -> tuple[Mutant | None, str, str, float]:
        pid, status, used = os.wait4(-1, 0)
        mutant, tree = busy.pop(pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that tests started
        if mutant:
            write(tree / mutant.file, sources[mutant.file])
        free.append(tree)
        how = noticed(os.waitstatus_to_exitcode(status), tree)
        lines = (tree / "began").read_text(encoding="utf-8").splitlines()
        began = [(float(when), test) for when, _, test in (line.partition(" ") for line in lines)]
        history.add(mutant, began, bool(how))
        return mutant, how, began[-1][1] if began else "", used.ru_utime + used.ru_stime

    for mutant, tests in jobs:
        if not free:
            yield finished()
        if time.monotonic() > end:
            break
        tree = free.pop()
        if mutant:
            write(tree / mutant.file, mutant.applied(sources[mutant.file]))
        pid = os.fork()
        if not pid:
            run(tree, tests, mutant, history)
        busy[pid] = mutant, tree
    while busy:
        yield finished()


def noticed(code: int, tree: Path) -> str:
    """Convert an exit code of pytest: "killed", "too slow", or "" if all tests passed."""
    if code == -signal.SIGALRM:
        return "too slow"
    if code in (3, 4):
        raise RuntimeError(f"pytest could not run:\n{(tree / 'printed').read_text()}")
    return "" if code in (0, 5) else "killed"  # 5: nothing to run. Below 0: it crashed.


def run(tree: Path, tests: list[str], mutant: Mutant | None, history: History) -> None:
    """Run tests in a tree as a process, and end it."""
    code = 1
    try:
        os.setsid()
        os.chdir(tree)
        printed = os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
        with open("began", "w", encoding="utf-8") as began:
            signal.alarm(60)
            for name in ("jaxkv", "jaxkv.serving"):  # else pytest imports their files as others
                importlib.import_module(name)
            code = pytest.main([*OPTIONS, *tests], plugins=[Watch(mutant, history, began)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Watch:
    """A plugin that orders tests, notes the start of each, and limits its duration."""

    def __init__(self, mutant: Mutant | None, history: History, began: TextIO) -> None:
        self.mutant, self.history, self.began = mutant, history, began

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:  # noqa: D102
        items.sort(key=lambda item: self.history.rate(self.mutant, item.nodeid), reverse=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:  # noqa: D102
        print(time.process_time(), nodeid, file=self.began, flush=True)
        signal.alarm(30 + int(PATIENCE * self.history.seconds.get(nodeid, 600)))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:  # noqa: D102
        if not session.testsfailed:
            print(time.process_time(), "", file=self.began, flush=True)


def copied(tree: Path) -> Path:
    """Copy the files that tests need into a folder."""
    for name in CARRIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tree / name)
    return tree


def prepare(cache: Path) -> None:
    """Set the environment of the tests, and import modules that no mutant changes."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    runpy.run_path(str(ROOT / "conftest.py"))
    phases = set(hypothesis.Phase) - {hypothesis.Phase.shrink, hypothesis.Phase.explain}
    change = hypothesis.settings.get_profile("change")
    hypothesis.settings.register_profile("mutants", change, phases=phases)
    for name in ("jax", "chex", "flax", "hypothesis.stateful"):
        importlib.import_module(name)
    gc.freeze()


def write(path: Path, text: str) -> None:
    """Write a module, and remove its bytecode: edits are faster than the clock of files."""
    path.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def mutated_sources() -> dict[str, str]:
    """The text of each file of the core, by its path from the root."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for pattern in KNOWN_BY
        for path in files_of(pattern)
    }


def all_mutants(sources: dict[str, str]) -> list[Mutant]:
    """The mutants of all files."""
    return [m for file, source in sorted(sources.items()) for m in mutants_of(file, source)]


def files_of(pattern: str) -> list[Path]:
    """The files of a pattern; one without files is out of date."""
    found = [path for path in sorted(ROOT.glob(pattern)) if path.name not in LEFT_OUT]
    if not found:
        raise SystemExit(f"no file is {pattern!r}: bring tools/mutate.py up to date")
    return found


def runs_of(file: str) -> list[str]:
    """The tests of a file: its doctests, its tests, and the tests of all files."""
    (names,) = {names for pattern, names in KNOWN_BY.items() if Path(file).match(pattern)}
    found = [next(ROOT.glob(f"tests/*/test_{name}.py")) for name in sorted(set(names.split()))]
    of_core = () if file.startswith(LOOPS) else OF_CORE
    return [file, *(str(path.relative_to(ROOT)) for path in found), *of_core]


def equivalents() -> list[dict[str, str]]:
    """The listed equivalent mutants; every entry has a reason."""
    listed = tomllib.loads(Path(__file__).with_name("equivalents.toml").read_text("utf-8"))
    assert all(entry.keys() >= {"file", "function", "reason"} for entry in listed["mutant"])
    return listed["mutant"]


def entries_without_mutant(
    listed: list[dict[str, str]], mutants: list[Mutant], sources: dict[str, str]
) -> list[dict[str, str]]:
    """The entries of `equivalents.toml` that name no mutant, since the code has changed."""
    keys = {mutant.key(sources[mutant.file]) for mutant in mutants}
    named = keys | {key[:2] for key in keys}
    return [entry for entry in listed if key_of(entry) not in named]


def excuse(mutant: Mutant, source: str, listed: list[dict[str, str]]) -> str:
    """The reason why a mutant has no effect, or ""."""
    key = mutant.key(source)
    return next((entry["reason"] for entry in listed if key_of(entry) in (key, key[:2])), "")


def key_of(entry: dict[str, str]) -> tuple[str, ...]:
    """The file, the function and the changed line that an entry names.

    An entry without a line applies to the whole function.
    """
    return tuple(entry[name] for name in ("file", "function", "line") if name in entry)


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
