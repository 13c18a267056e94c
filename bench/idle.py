"""The cost of waiting for work: Redis commands per second, and CPU time per second against a sleeping thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.measure import Line

SETTLING = 2.0
"""Seconds until the consumer is idle: connected, and out of work."""
IDLE = 5.0
COMMANDS_PER_SECOND = 10
CPU_PER_SECOND = 10
"""Milliseconds: about the cost of a sleeping interpreter and of the measurement itself."""


Stops = list[Callable[[], object]]


def idle(what: str, client: Any, wait: Callable[[Stops], object]) -> Iterator[Line]:
    """Measure `wait`, which waits for work in its own thread and appends a way to stop it to its argument."""
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
        f"{what}: CPU per second",
        bare,
        cpu,
        f"≤ {CPU_PER_SECOND} ms",
        cpu <= CPU_PER_SECOND,
        f"{cpu / 10:.2f} %",
        unit="ms",
    )
    yield Line(
        f"{what}: commands per second",
        0.0,
        commands,
        f"< {COMMANDS_PER_SECOND}",
        commands < COMMANDS_PER_SECOND,
        f"{commands:.1f}",
        unit="/s",
    )


def _cost(client: Any) -> tuple[float, float]:
    """Milliseconds of CPU, and commands, per second."""
    began, before, cpu = time.monotonic(), _commands(client), time.process_time()
    time.sleep(IDLE)
    cpu = time.process_time() - cpu
    commands = _commands(client) - before - 1  # the second INFO is our own
    seconds = time.monotonic() - began
    return cpu * 1000 / seconds, commands / seconds


def _commands(client: Any) -> int:
    count: int = client.info("stats")["total_commands_processed"]
    return count
