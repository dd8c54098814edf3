"""Run a compiler in a separate process, since some can be opened once per process."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def marks_of(wheel, wanted):
    """The marks of tests that are skipped where a compiler's wheel is missing."""
    missing = importlib.util.find_spec(wheel) is None
    why = f"the compiler is not installed: pip install {wanted}"
    skip = pytest.mark.skipif(missing, reason=why)
    return [pytest.mark.nightly, pytest.mark.timeout(900), skip]


def print_result(name, found):
    print(json.dumps({"name": name, **found}), flush=True)


def run_module(module):
    """The output of a module, a line of JSON for each name; it runs once."""
    options = dict(cwd=ROOT, env={**os.environ, "XLA_FLAGS": ""}, timeout=800)
    command = [sys.executable, "-m", module]
    found = subprocess.run(command, capture_output=True, text=True, **options)
    assert found.returncode == 0, found.stderr[-2000:]
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}
