"""Memories that several processes hold together: as in one, and no process waits for ever.

`process_worker.py` is what each process runs, and compares its numbers.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cases import mostly_nightly
from tests.sharding.process_worker import CASES, HEARTBEAT

ROOT = Path(__file__).parents[2]
ENDED = 60
"""Seconds in which the others end after one was killed: heartbeats, and what JAX does then."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def run(scenario, count, limit=600):
    """Run a scenario in processes; their exit codes, outputs, and when each ended."""
    # Each device of a processor waits in a thread for the others, and several programs are on their
    # way at once: with the two threads of a small machine the devices block each other.
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "NPROC": "16", "PYTHONUNBUFFERED": "1"}
    port, started = free_port(), []
    folder = tempfile.TemporaryDirectory()
    outputs = [Path(folder.name, str(number)) for number in range(count)]
    try:
        for number, output in enumerate(outputs):
            command = [sys.executable, "-W", "error", "-m", "tests.sharding.process_worker"]
            command += [scenario, *map(str, (number, count, port)), folder.name]
            with output.open("w") as file:
                started.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file)
                )
        codes, ends = [None] * count, [None] * count
        begun = time.monotonic()
        while None in codes and time.monotonic() - begun < limit:
            time.sleep(0.1)
            for number, process in enumerate(started):
                if codes[number] is None and process.poll() is not None:
                    codes[number], ends[number] = process.returncode, time.monotonic()
            # One that failed is waited for by the others: what it says is what counts.
            if any(code not in (None, 0, -signal.SIGKILL) for code in codes):
                limit = min(limit, time.monotonic() - begun + ENDED)
    finally:
        for process in started:
            process.kill()
            process.wait()
    texts = [
        f"--- process {number} ended with {codes[number]}\n{output.read_text()}"
        for number, output in enumerate(outputs)
    ]
    folder.cleanup()
    return codes, texts, ends


def check(scenario, count):
    codes, texts, _ = run(scenario, count)
    assert codes == [0] * count, "\n".join(texts)
    for number, text in enumerate(texts):
        assert f"process {number}: {scenario} is as wanted" in text, "\n".join(texts)


@pytest.mark.parametrize("name", mostly_nightly(CASES, ["tensor", "window", "hybrid"]))
def test_verbs_and_loops(name):
    check(name, 4 if name in ("data", "cells") else 2)


@pytest.mark.parametrize(
    "scenario",
    ["requests", "broadcasts", "disagreement", "disagreement of streams", "global batches"],
)
def test_two_processes(scenario):
    check(scenario, 2)


@pytest.mark.nightly
def test_disagreement_of_four():
    check("disagreement", 4)


@pytest.mark.parametrize("who", mostly_nightly(["the first", "the last"], ["the first"]))
def test_when_one_is_killed_the_others_end(who):
    """JAX says so and ends them, since what they wait for never comes: begin at a checkpoint."""
    codes, texts, ends = run(f"{who} is killed", 4)
    shown = "\n".join(texts)
    dead = 0 if who == "the first" else 3
    assert codes[dead] == -signal.SIGKILL, shown
    others = [code for number, code in enumerate(codes) if number != dead]
    assert None not in others and 0 not in others, shown
    for number, text in enumerate(texts):
        told = "JaxRuntimeError" in text or "JAX distributed service detected fatal errors" in text
        assert told or number == dead, shown
    waited = max(ends) - ends[dead]
    print(f"{who} of four was killed; the others ended {waited:.1f} s later")
    assert waited < HEARTBEAT + ENDED, shown
