"""From a send to the handler of an idle worker under `onceward run`, against a plain blocking read."""

from __future__ import annotations

import select
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

import psycopg
from sqlalchemy import make_url

from bench.boundary_process import serve_boundary
from bench.measure import Line
from onceward import Transaction
from onceward.boundary import BoundaryClient
from onceward.connectors import SqliteConnector
from onceward.connectors.boundary import BoundaryConnector
from onceward.connectors.jetstream import JetStreamConnector
from onceward.connectors.postgresql import PostgreSqlConnector
from onceward.connectors.redis_streams import RedisStreamsConnector
from onceward.testing.servers import nats_server, postgres_server, redis_server

MESSAGES = 100
KINDS = ("def", "async def")
PAUSE = 0.1
"""Seconds between two messages: long enough for a worker to be idle again."""

APP = """
import time
from typing import Any
from onceward import Onceward

app = Onceward("wake")
times = open("times", "a", buffering=1)


@app.consumer({source!r}, contract=None)
{kind} note(sent: Any) -> None:
    sent = sent["object"] if isinstance(sent, dict) else sent
    times.write(f"{{time.monotonic() - sent}}\\n")
"""


def lines() -> Iterator[Line]:
    yield from _on_redis()
    yield from _on_postgresql()
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
            path = Path(directory, "queue.db")
            with SqliteConnector(path) as queue:
                ours = _run(f"sqlite:///{path}", kind, queue.dispatch_transactions)
        yield _line(f"idle to handler, SQLite, {kind}: p99", 0.0, _p99(ours), "≤ 25 ms", at_most=25.0)
    for kind in KINDS:
        with nats_server() as nats, JetStreamConnector(nats.url, "WAKE") as stream:
            ours = _run(f"{nats.url}/WAKE", kind, stream.dispatch_transactions)
        yield _line(f"idle to handler, JetStream, {kind}: p99", 0.0, _p99(ours), "≤ 25 ms", at_most=25.0)
    for kind in KINDS:
        with (
            tempfile.TemporaryDirectory(prefix="onceward-") as directory,
            serve_boundary(Path(directory)) as url,
            BoundaryClient(url) as client,
            BoundaryConnector(client, from_zone="a", to_zone="b") as sink,
        ):
            ours = _run(f"boundary+{url}?consumer=wake", kind, lambda sent, to=sink: _send_facts(to, sent))  # type: ignore[misc]
        yield _line(f"idle to handler, boundary, {kind}: p99", 0.0, _p99(ours), "≤ 25 ms", at_most=25.0)


def _on_redis() -> Iterator[Line]:
    with redis_server() as redis:
        for often, pause in (("idle to handler", PAUSE), ("100 a second", 0.01)):
            bare = _blocking_read(redis.url, pause)
            for kind in KINDS:
                with RedisStreamsConnector(redis.url, "wake") as sink:
                    ours = _run(f"{redis.url}/wake", kind, sink.dispatch_transactions, pause)
                yield from _both(f"{often}, Redis, {kind}", bare, ours)
                _delete(redis.url)


def _on_postgresql() -> Iterator[Line]:
    with postgres_server() as server:
        bare = _listening_claim(server.url)
        address = make_url(server.url)
        for kind in KINDS:
            name = f"wake_{kind[0]}"
            source = address.set(query={**address.query, "queue": name}).render_as_string(hide_password=False)
            with PostgreSqlConnector(server.url, name) as queue:
                ours = _run(source, kind, queue.dispatch_transactions)
            yield from _both(f"idle to handler, PostgreSQL, {kind}", bare, ours)


def _both(what: str, bare: list[float], ours: list[float]) -> Iterator[Line]:
    yield _line(f"{what}: p50", median(bare), median(ours), "≤ 2x", 2.0)
    yield _line(f"{what}: p99", _p99(bare), _p99(ours), "≤ 10 ms", at_most=10.0)


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


def _run(
    url: str, kind: str, dispatch: Callable[[list[Transaction]], Any], pause: float = PAUSE
) -> list[float]:
    """Milliseconds until the handler of an idle run begins."""
    with tempfile.TemporaryDirectory(prefix="onceward-") as directory:
        Path(directory, "wake.py").write_text(APP.format(source=url, kind=kind))
        times = Path(directory, "times")
        with _running(directory):
            _send(dispatch, 1, PAUSE)
            _until(lambda: times.exists() and times.stat().st_size > 0)
            _send(dispatch, MESSAGES, pause)
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


def _send(dispatch: Callable[[list[Transaction]], Any], count: int, pause: float) -> None:
    for _ in range(count):
        time.sleep(pause)
        dispatch([Transaction(payload=time.monotonic())])


def _send_facts(sink: BoundaryConnector, sent: list[Transaction]) -> None:
    parts = {"subject": "order:1", "predicate": "sent"}
    sink.dispatch_transactions([Transaction(payload={**parts, "object": each.payload}) for each in sent])


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "the run does not answer"
        time.sleep(0.05)


def _blocking_read(url: str, pause: float) -> list[float]:
    """Milliseconds until XREADGROUP BLOCK returns in another connection."""
    import redis

    reader, writer = redis.Redis.from_url(url), redis.Redis.from_url(url)
    reader.delete("bare")
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
        time.sleep(pause)
        writer.xadd("bare", {"at": time.monotonic()})
    thread.join()
    return taken


def _listening_claim(url: str) -> list[float]:
    """Milliseconds until a connection that listens has claimed what another appended and notified."""
    taken: list[float] = []
    with psycopg.connect(url, autocommit=True) as reader, psycopg.connect(url, autocommit=True) as writer:
        reader.execute(
            "CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, at float, taken bool)"
        )
        reader.execute("LISTEN bare")
        claim = """
            UPDATE bare SET taken = true WHERE id IN (
                SELECT id FROM bare WHERE taken IS NULL ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED
            ) RETURNING at
        """

        def read() -> None:
            while len(taken) < MESSAGES:
                select.select([reader], [], [], 5.0)
                list(reader.notifies(timeout=0))
                rows = reader.execute(claim).fetchall()
                taken.extend((time.monotonic() - at) * 1000 for (at,) in rows)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(MESSAGES):
            time.sleep(PAUSE)
            with writer.transaction():
                writer.execute("INSERT INTO bare (at) VALUES (%s)", (time.monotonic(),))
                writer.execute("NOTIFY bare")
        thread.join()
    return taken


def _delete(url: str) -> None:
    import redis

    with redis.Redis.from_url(url) as client:
        client.flushall()
