"""The cost of an idle run: CPU time of supervisor and workers, against as many sleeping interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.measure import Line

PROCESSES = 4
SETTLING = 12.0
"""Seconds until the run is idle: started, and polling its sources at the slowest rate."""
IDLE = 10.0
WINDOWS = 2
"""The best one counts, because a start takes long on a busy machine."""
AT_MOST = 1.0
"""Percent of a core, for all processes together."""

APP = """
from onceward import Onceward
from onceward.inbox import Contract

app = Onceward("idle", database="sqlite:///idle.db")
contract = Contract(consumer_id="charge", event_types=["*"], owner_team="bench", idempotency_mechanism="inbox row")


@app.consumer("sqlite:///orders.db", contract=contract)
{kind} charge(order: dict, session) -> None: ...
"""


def lines() -> Iterator[Line]:
    for kind in ("def", "async def"):
        with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
            Path(directory, "idle.py").write_text(APP.format(kind=kind))
            bare, ours = _cost_of_sleep(), _cost_of_run(directory)
        yield Line(
            f"idle run, {PROCESSES} processes, {kind}: CPU per second",
            bare,
            ours,
            f"< {AT_MOST:g} %",
            ours < AT_MOST * 10,
            f"{ours / 10:.2f} %",
            unit="ms",
        )


def _cost_of_sleep() -> float:
    """Milliseconds of CPU per second, of as many sleeping interpreters."""
    started = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(PROCESSES + 1)
    ]
    time.sleep(1.0)
    try:
        return _cost([process.pid for process in started], 2.0)
    finally:
        for process in started:
            process.kill()
            process.wait()


def _cost_of_run(directory: str) -> float:
    """Milliseconds of CPU per second, of supervisor and workers."""
    command = [sys.executable, "-m", "onceward", "run", "idle:app", "--processes", str(PROCESSES)]
    run = subprocess.Popen(command, cwd=directory, stderr=subprocess.DEVNULL)
    try:
        time.sleep(SETTLING)
        workers = _children(run.pid)
        assert len(workers) == PROCESSES, workers
        return min(_cost([run.pid, *workers], IDLE) for _ in range(WINDOWS))
    finally:
        run.terminate()
        run.wait()


def _cost(pids: list[int], seconds: float) -> float:
    began, before = time.monotonic(), sum(map(_cpu, pids))
    time.sleep(seconds)
    return (sum(map(_cpu, pids)) - before) * 1000 / (time.monotonic() - began)


def _cpu(pid: int) -> float:
    """Seconds of CPU of all its threads, including those that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it ended in the meantime
                continue
            if parent == pid:
                found.append(int(path.name))
    return found
