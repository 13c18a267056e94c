"""How long a program takes to start: the package, the help of the command, and a worker that is ready to fetch.

Measured in CPU time of the process, which other programs disturb least; the bare figure is that of an empty program.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence

from bench.measure import Line

TIMES = 7
IMPORT_MS, HELP_MS, WORKER_MS = 50.0, 150.0, 500.0
WORKER = "import onceward.run.worker, onceward.connectors.redis_streams"
"""What a worker has loaded when it connects. Connecting takes a few milliseconds."""


def lines() -> Iterator[Line]:
    bare = _cpu_ms(["-c", "pass"])
    for what, arguments, most in (
        ("start: import onceward; bare: an empty program", ["-c", "import onceward"], IMPORT_MS),
        ("start: onceward --help", ["-m", "onceward", "--help"], HELP_MS),
        ("start: a worker with a Redis source is ready", ["-c", WORKER], WORKER_MS),
    ):
        ours = _cpu_ms(arguments)
        yield Line(what, bare, ours, f"≤ {most:g} ms", ours <= most, f"{ours:.0f} ms", unit="ms")


def _cpu_ms(arguments: Sequence[str]) -> float:
    best = float("inf")
    for _ in range(TIMES):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = min(best, spent * 1000)
    return best
