"""Caches that several processes share: the results of one, and no process waits for ever."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.sharding.process_worker import CASES, HEARTBEAT

ROOT = Path(__file__).parents[2]
ENDED = 60
"""Seconds for the others to end after one was killed: heartbeats, and JAX's shutdown."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def run_processes(folder, scenario, count, limit=600):
    """Run a scenario in processes; their exit codes (None if still running) and outputs."""
    # Each CPU device waits in a thread for the others, and several programs run at once: with the
    # two threads of a small machine the devices block each other.
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "NPROC": "16", "PYTHONUNBUFFERED": "1"}
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = one.getsockname()[1]
    started, codes = [], [None] * count
    outputs = [folder / str(number) for number in range(count)]
    try:
        for number, output in enumerate(outputs):
            command = [sys.executable, "-W", "error", "-m", "tests.sharding.process_worker"]
            command += [scenario, *map(str, (number, count, port, folder))]
            with output.open("w") as file:
                options = dict(cwd=ROOT, env=env, stdout=file, stderr=file)
                started.append(subprocess.Popen(command, **options))
        begun = time.monotonic()
        while None in codes and time.monotonic() - begun < limit:
            time.sleep(0.1)
            codes = [process.poll() for process in started]
            # Others wait for one that failed: its output is the cause.
            if any(code not in (None, 0) for code in codes):
                limit = min(limit, time.monotonic() - begun + HEARTBEAT + ENDED)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, [output.read_text() for output in outputs]


@pytest.mark.parametrize(
    "scenario", [*CASES, "requests", "disagreement", "global batches", "moves"]
)
def test_processes_give_what_one_device_gives(scenario, tmp_path):
    count = 4 if scenario == "cells" else 2
    codes, texts = run_processes(tmp_path, scenario, count)
    assert codes == [0] * count, "\n---\n".join(texts)
    for number, text in enumerate(texts):
        assert f"process {number}: {scenario} is as wanted" in text, "\n---\n".join(texts)


@pytest.mark.parametrize("who", [0, 1])
def test_process_killed_ends_the_others(who, tmp_path):
    """JAX raises and ends them, since their peer never answers: restart from a checkpoint."""
    codes, texts = run_processes(tmp_path, f"killed {who}", 2)
    shown, other = "\n---\n".join(texts), 1 - who
    assert codes[who] == -signal.SIGKILL and codes[other] not in (None, 0), shown
    says = "JaxRuntimeError", "JAX distributed service detected fatal errors"
    assert any(text in texts[other] for text in says), shown
