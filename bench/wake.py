"""From a send to the handler of an idle worker under `onceward run`, against a plain blocking read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.measure import Line
from onceward import Transaction
from onceward.connectors import SqliteConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.testing.servers import redis_server

MESSAGES = 100
PAUSE = 0.1
"""Seconds between two messages: long enough for a worker to be idle again."""

APP = """
import time
from pathlib import Path
from onceward import Onceward

app = Onceward("wake")
times = open("times", "a", buffering=1)


@app.consumer({source!r}, contract=None)
{kind} note(sent: float) -> None:
    times.write(f"{{time.monotonic() - sent}}\\n")
"""


def lines() -> Iterator[Line]:
    with redis_server() as redis:
        bare = _blocking_read(redis.url)
        for kind in ("def", "async def"):
            with RedisStreamsConnector(redis.url, "wake") as sink:
                ours = _run(f"{redis.url}/wake", kind, sink.dispatch_transactions)
            yield _line(f"idle to handler, Redis, {kind}: p50", median(bare), median(ours), "≤ 2x", 2.0)
            yield _line(
                f"idle to handler, Redis, {kind}: p99", _p99(bare), _p99(ours), "≤ 10 ms", at_most=10.0
            )
            _delete(redis.url)
    for kind in ("def", "async def"):
        with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
            path = Path(directory, "queue.db")
            with SqliteConnector(path) as queue:
                ours = _run(f"sqlite:///{path}", kind, queue.dispatch_transactions)
        yield _line(f"idle to handler, SQLite, {kind}: p99", 0.0, _p99(ours), "≤ 25 ms", at_most=25.0)


def _line(
    what: str,
    bare: float,
    ours: float,
    target: str,
    most: float = float("inf"),
    at_most: float = float("inf"),
) -> Line:
    shown = f"{ours / bare:.2f} x" if bare and at_most == float("inf") else f"{ours:.2f} ms"
    return Line(
        what, bare, ours, target, ours <= at_most and (not bare or ours <= most * bare), shown, unit="ms"
    )


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99) - 1]


def _run(url: str, kind: str, dispatch: Callable[[list[Transaction]], Any]) -> list[float]:
    """Milliseconds until the handler of an idle run begins."""
    with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
        Path(directory, "wake.py").write_text(APP.format(source=url, kind=kind))
        times = Path(directory, "times")
        with _running(directory):
            _send(dispatch, 1)
            _until(lambda: times.exists() and times.stat().st_size > 0)
            _send(dispatch, MESSAGES)
            _until(lambda: len(times.read_text().splitlines()) > MESSAGES)
        return [float(line) * 1000 for line in times.read_text().splitlines()[1:]]


@contextmanager
def _running(directory: str) -> Iterator[None]:
    command = [sys.executable, "-m", "onceward", "run", "wake:app", "--processes", "1"]
    run = subprocess.Popen(command, cwd=directory, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        run.terminate()
        run.wait()


def _send(dispatch: Callable[[list[Transaction]], Any], count: int) -> None:
    for _ in range(count):
        time.sleep(PAUSE)
        dispatch([Transaction(payload=time.monotonic())])


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "the run does not answer"
        time.sleep(0.05)


def _blocking_read(url: str) -> list[float]:
    """Milliseconds until XREADGROUP BLOCK returns in another connection."""
    import redis

    reader, writer = redis.Redis.from_url(url), redis.Redis.from_url(url)
    reader.xgroup_create("bare", "g", mkstream=True)
    taken: list[float] = []

    def read() -> None:
        while len(taken) < MESSAGES:
            reply: Any = reader.xreadgroup("g", "c", {"bare": ">"}, count=100, block=5000)
            now = time.monotonic()
            taken.extend((now - float(fields[b"at"])) * 1000 for _, fields in reply[0][1])
            reader.xack("bare", "g", *(entry for entry, _ in reply[0][1]))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(MESSAGES):
        time.sleep(PAUSE)
        writer.xadd("bare", {"at": time.monotonic()})
    thread.join()
    return taken


def _delete(url: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        client.flushall()
