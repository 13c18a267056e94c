"""Purging a million old dedup rows while a consumer runs: how long its slowest event and the slowest step take.

PostgreSQL drops whole days of ids that contain their day, and deletes others row by row, as SQLite does. Ours is the
consumer's slowest event during the purge, bare the slowest in the same time after it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, create_engine, event

from bench.measure import Line
from onceward.inbox import Contract, Event, Inbox, PurgeReport
from onceward.inbox.stores import partitions
from onceward.testing import servers

ROWS = 1_000_000
DAYS = 10
POSTGRESQL_TARGET, SQLITE_TARGET = 100, 50
"""Milliseconds."""


def lines() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/inbox.db"
        engine = create_engine(url)
        event.listen(engine, "connect", _durable)
        yield from _on_sqlite(engine, url)
        engine.dispose()
    with servers.postgres_server() as server:
        engine = create_engine(server.url.replace("postgresql://", "postgresql+psycopg://", 1))
        yield from _on_postgresql(engine, server.url)
        engine.dispose()


def _on_sqlite(engine: Engine, url: str) -> Iterator[Line]:
    inbox = _inbox(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql(
            f"WITH RECURSIVE s (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM s WHERE n < {ROWS - 1}) "
            "INSERT INTO onceward_dedup "
            "(own_day, keep_day, consumer_id, tracking_id, payload_sha256, processed_at) "
            f"SELECT {_old()} + n / {ROWS // DAYS}, {_old()} + n / {ROWS // DAYS}, 'billing', hex(randomblob(16)), "
            "randomblob(32), 0 FROM s"
        )
    quiet, during, report = _measure(inbox, url, ROWS)
    step = report.longest_step * 1000
    what = f"SQLite: longest event, 1 M rows (step {step:.0f} ms)"
    yield _line(what, quiet, during, SQLITE_TARGET)


def _on_postgresql(engine: Engine, url: str) -> Iterator[Line]:
    inbox = _inbox(engine)
    _fill_days(engine, ROWS)
    quiet, during, report = _measure(inbox, url, ROWS)
    yield _line(f"PostgreSQL: longest event, 1 M rows ({_speed(report)})", quiet, during, POSTGRESQL_TARGET)
    _fill_others(engine, ROWS)
    quiet, during, report = _measure(inbox, url, ROWS)
    yield _line(f"PostgreSQL: longest event, 1 M UUIDv4 ({_speed(report)})", quiet, during, POSTGRESQL_TARGET)


def _fill_days(engine: Engine, rows: int) -> None:
    """Ids that contain their day, and the partitions of these days."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for day in range(_old(), _old() + DAYS):
            partitions.make(connection, day)
            head = f"{day * 86_400_000:012x}"
            _insert(
                connection,
                "event_day, consumer_id, tracking_id, payload_sha256",
                f"{day}, 'billing', '{head[:8]}-{head[8:]}-7000-8000-' || lpad(n::text, 12, '0'), ''",
                rows // DAYS,
            )


def _fill_others(engine: Engine, rows: int) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        _insert(
            connection,
            "event_day, own_day, processed_at, consumer_id, tracking_id, payload_sha256",
            f"-1, {_old()}, to_timestamp({_old()} * 86400 + n / 10.0), 'billing', gen_random_uuid()::text, "
            "sha256(n::text::bytea)",
            rows,
        )


def _insert(connection: Connection, columns: str, values: str, rows: int) -> None:
    connection.exec_driver_sql("SET synchronous_commit = off")
    source = f"generate_series(1, {rows}) AS s (n)"
    connection.exec_driver_sql(f"INSERT INTO onceward_dedup ({columns}) SELECT {values} FROM {source}")
    connection.exec_driver_sql("CHECKPOINT")  # so it does not run during the measurement


def _inbox(engine: Engine) -> Inbox:
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(_contract("billing"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE invoices (id TEXT PRIMARY KEY)")
    return inbox


def _contract(consumer_id: str, **more: Any) -> Contract:
    return Contract(
        consumer_id=consumer_id,
        event_types=["*"],
        owner_team="bench",
        idempotency_mechanism="dedup record and invoice in one transaction",
        **more,
    )


def _old() -> int:
    return int(time.time() // 86400) - 200


def _purge(url: str) -> PurgeReport:
    """Purge in another process, as a timer would."""
    command = [sys.executable, "-m", "onceward", "inbox", "purge", "--database", url, "--json"]
    return msgspec.json.decode(subprocess.check_output(command), type=PurgeReport)


def _measure(inbox: Inbox, url: str, rows: int) -> tuple[float, float, PurgeReport]:
    """The slowest event without and with a purge, in milliseconds, and the purge's report."""
    began = time.perf_counter()
    with _consumer(inbox) as busy:
        report = _purge(url)
    with _consumer(inbox) as quiet:
        time.sleep(time.perf_counter() - began)  # as long: a disk may stall from time to time
    assert report.rows == rows, report
    assert not report.unfinished, report
    return max(quiet) * 1000, max(busy) * 1000, report


_numbers = count()


@contextmanager
def _consumer(inbox: Inbox) -> Iterator[list[float]]:
    """Process one event after another in a thread, and record the seconds of each."""
    seconds: list[float] = []
    stopped = threading.Event()

    def consume() -> None:
        while not stopped.is_set():
            given = Event(
                tracking_id=f"event-{next(_numbers)}",
                event_type="paid",
                created_at=datetime.now(UTC),
                payload={"total": 19.99},
            )
            began = time.perf_counter()
            inbox.process(_CONSUMED, given, _write)
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield seconds
    finally:
        stopped.set()
        thread.join()
    assert seconds


def _write(given: Event, session: Any) -> None:
    session.execute("INSERT INTO invoices (id) VALUES (:id)", {"id": given.tracking_id})


_CONSUMED = _contract("billing")


def _durable(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")


def _speed(report: PurgeReport) -> str:
    return f"{report.steps} steps" if not report.dropped else f"{len(report.dropped)} days"


def _line(what: str, quiet: float, during: float, target: int) -> Line:
    return Line(what, quiet, during, f"< {target} ms", during < target, f"{during:.1f} ms", "ms")
