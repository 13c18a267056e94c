"""The cost of a new event among few and many dedup records, for ids that contain their day and ids that do not.

Bare is the median of the first events in an empty table, ours the median among 1 or 10 million rows. The median of
single events, because the disk of a shared machine stalls from time to time. ROWS_MILLIONS=1 leaves out the 10 million.

Ids in no order cost PostgreSQL the most. Among 10 million rows an event wrote 6.6 kB of WAL instead of 1.1 kB. That is
what whole pages in the WAL would look like, which PostgreSQL writes at the first change of a page after a checkpoint:
ids in no order reach another page of the index each time. Only the size of the WAL was measured: neither which records
were in it, nor how much of the time of an event it is.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine, text

from bench.inbox import CONTRACT, TIDY, postgresql, sqlite
from bench.measure import Line
from onceward._ids import new_id
from onceward.inbox import Event, Inbox
from onceward.inbox.stores import partitions

MILLION = 1_000_000
UPTO = int(os.environ.get("ROWS_MILLIONS", "10"))
EVENTS = 3_000
AT_MOST = 1.25
MAKERS: dict[str, Callable[[], str]] = {"UUIDv7": new_id, "UUIDv4": lambda: str(uuid4())}


def lines() -> Iterator[Line]:
    for name, database in (("SQLite", sqlite), ("PostgreSQL", postgresql)):
        for kind in MAKERS:
            with database() as engine:
                yield from on(name, kind, engine)


def on(name: str, kind: str, engine: Engine) -> Iterator[Line]:
    inbox = Inbox(engine)
    inbox.migrate()
    inbox.register(CONTRACT)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (id TEXT)"))
    consume(inbox, kind)
    empty = consume(inbox, kind)
    rows = 0
    for millions in (each for each in (1, 10) if each <= UPTO):
        fill(engine, kind, millions * MILLION - rows)
        rows = millions * MILLION
        consume(inbox, kind)
        many = consume(inbox, kind)
        what = f"inbox, {name}, {kind}, {millions} M rows against none"
        yield Line(what, empty, many, f"≤ {AT_MOST:g} ×", many <= empty * AT_MOST, f"{many / empty:.2f} ×")


def consume(inbox: Inbox, kind: str) -> float:
    """Microseconds of an event in its own transaction, the median of many."""
    make, taken = MAKERS[kind], []
    for _ in range(EVENTS):
        given = Event(
            tracking_id=make(), event_type="paid", created_at=datetime.now(UTC), payload={"total": 7}
        )
        began = time.perf_counter()
        inbox.process(CONTRACT, given, _write)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def _write(given: Event, session: Any) -> None:
    session.execute("INSERT INTO orders (id) VALUES (:id)", {"id": given.tracking_id})


def fill(engine: Engine, kind: str, rows: int) -> None:
    """Write rows of one day as that many events would, in the order of their ids, which is much faster."""
    day = int(time.time()) // 86400
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name == "postgresql":
            partitions.make(connection, day)
            connection.exec_driver_sql("SET synchronous_commit = off")
            connection.exec_driver_sql("SET work_mem = '256MB'")
        else:
            connection.exec_driver_sql("PRAGMA synchronous = OFF")
            connection.exec_driver_sql("PRAGMA cache_size = -500000")
        connection.exec_driver_sql(_filling(engine.dialect.name, kind, day, rows))
        for tidy in TIDY[engine.dialect.name]:
            connection.exec_driver_sql(tidy)
    engine.dispose()  # the settings were for filling


def _filling(dialect: str, kind: str, day: int, rows: int) -> str:
    ms = day * 86_400_000
    if dialect == "postgresql":
        head = f"lpad(to_hex({ms} + (n - 1) * 86400000 / {rows}), 12, '0')"
        v7 = (
            f"substr({head}, 1, 8) || '-' || substr({head}, 9) || '-7' || substr(gen_random_uuid()::text, 16)"
        )
        v7 = f"overlay({v7} placing '8' from 20)"
        columns, values = (
            ("event_day", str(day)) if kind == "UUIDv7" else ("event_day, own_day", f"-1, {day}")
        )
        id_ = v7 if kind == "UUIDv7" else "gen_random_uuid()::text"
        return (
            f"INSERT INTO onceward_dedup ({columns}, consumer_id, tracking_id, payload_sha256) "
            f"SELECT {values}, 'orders', id, sha256(n::text::bytea) FROM "
            f"(SELECT n, {id_} AS id FROM generate_series(1, {rows}::bigint) AS n ORDER BY 2) AS i"
        )
    head = f"printf('%012x', {ms} + (n - 1) * 86400000 / {rows})"
    tail = (
        "substr(hex(randomblob(2)), 2) || '-8' || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))"
    )
    v7 = f"substr({head}, 1, 8) || '-' || substr({head}, 9) || '-7' || {tail}"
    v4 = f"hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || {tail}"
    return (
        "INSERT INTO onceward_dedup (consumer_id, tracking_id, own_day, keep_day, payload_sha256, processed_at) "
        f"WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {rows}) "
        f"SELECT 'orders', lower({v7 if kind == 'UUIDv7' else v4}) AS id, {day}, {day}, randomblob(32), 0 "
        "FROM s ORDER BY id"
    )
