"""What it costs to wait for work: Redis commands a second, and CPU time a second beside a thread that sleeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.measure import Line

SETTLING = 2.0
"""Seconds until it is idle: connected, and without anything to do."""
IDLE = 5.0
COMMANDS_A_SECOND = 10
CPU_A_SECOND = 10
"""Milliseconds, which is what a sleeping interpreter and this measurement may cost themselves."""


Stops = list[Callable[[], object]]


def idle(what: str, client: Any, wait: Callable[[Stops], object]) -> Iterator[Line]:
    """`wait` waits for work in a thread of its own. It adds to what it is given how to stop it."""
    bare, _ = _cost(client)
    stops: Stops = []
    waiting = threading.Thread(target=wait, args=(stops,))
    waiting.start()
    time.sleep(SETTLING)
    cpu, commands = _cost(client)
    for stop in stops:
        stop()
    waiting.join()
    yield Line(
        f"{what}: CPU a second",
        bare,
        cpu,
        f"≤ {CPU_A_SECOND} ms",
        cpu <= CPU_A_SECOND,
        f"{cpu / 10:.2f} %",
        unit="ms",
    )
    yield Line(
        f"{what}: commands a second",
        0.0,
        commands,
        f"< {COMMANDS_A_SECOND}",
        commands < COMMANDS_A_SECOND,
        f"{commands:.1f}",
        unit="/s",
    )


def _cost(client: Any) -> tuple[float, float]:
    """Milliseconds of CPU, and commands, a second."""
    began, before, cpu = time.monotonic(), _commands(client), time.process_time()
    time.sleep(IDLE)
    cpu = time.process_time() - cpu
    commands = _commands(client) - before - 1  # the second look is ours
    seconds = time.monotonic() - began
    return cpu * 1000 / seconds, commands / seconds


def _commands(client: Any) -> int:
    count: int = client.info("stats")["total_commands_processed"]
    return count
