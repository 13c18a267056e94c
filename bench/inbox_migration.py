"""Migrating a million dedup records of earlier versions, and back: half of them are UUIDs without dashes, a tenth are
second records of another day. Bare is the way back, ours the way forth, in seconds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator

from sqlalchemy import Engine, text

from bench.inbox import postgresql, sqlite
from bench.measure import Line
from onceward.inbox import Inbox
from onceward.inbox.stores import partitions
from onceward.storage import migrations

ROWS = 1_000_000
DEDUP = ("event_day", "consumer_id", "tracking_id", "payload_sha256", "processed_at", "outcome")
TARGET = 120.0
"""Seconds. Consumers have to be stopped in the meantime."""


def lines() -> Iterator[Line]:
    for name, database in (("SQLite", sqlite), ("PostgreSQL", postgresql)):
        with database() as engine:
            _earlier(engine)
            inbox = Inbox(engine)
            before = _digest(engine)
            forth = _seconds(inbox)
            back = _seconds(inbox, back_to=4)
            assert _digest(engine) == before, "a record is not what it was"
            what = f"{name}: migrate {ROWS:,} records, and back"
            yield Line(what, back, forth, f"< {TARGET:g} s", forth < TARGET, f"{forth:.1f} s", "s")


def _seconds(inbox: Inbox, back_to: int | None = None) -> float:
    began = time.perf_counter()
    assert inbox.migrate(back_to=back_to)
    return time.perf_counter() - began


def _earlier(engine: Engine) -> None:
    """The tables as they were, with rows of ten days."""
    is_sqlite = engine.dialect.name == "sqlite"
    with engine.begin() as connection:
        connection.exec_driver_sql(migrations.CREATE_TABLE)
        for each in migrations.migrations(engine.dialect.name)[:4]:
            for statement in migrations.statements(each.up):
                connection.exec_driver_sql(statement)
            connection.exec_driver_sql(
                f"INSERT INTO {migrations.TABLE} VALUES ({each.version}, '{each.name}', CURRENT_TIMESTAMP)"
            )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if not is_sqlite:
            for day in range(20_500, 20_510):
                partitions.make(connection, day)
        same = (
            "CASE WHEN n % 10 = 0 THEN n - 1 ELSE n END"  # every tenth is a second record of the one before
        )
        ids = f"CASE WHEN n % 20 < 10 THEN printf('%032x', {same}) ELSE 'order-' || ({same}) END"
        series = f"WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < {ROWS})"
        at, source, digest = "n", "s", "zeroblob(32)"
        if not is_sqlite:
            ids = ids.replace("printf('%032x', ", "lpad(to_hex(").replace(
                " END) ELSE", " END), 32, '0') ELSE"
            )
            series, at, digest = "", "to_timestamp(n)", "''"
            source = f"generate_series(1, {ROWS}) AS s (n)"
        columns = "event_day, consumer_id, tracking_id, payload_sha256, processed_at"
        rows = f"{series} SELECT 20500 + n % 10, 'orders', {ids}, {digest}, {at} FROM {source}"
        connection.execute(text(f"INSERT INTO onceward_dedup ({columns}) {rows}"))


def _digest(engine: Engine) -> object:
    """Of every column of every record, and how many there are."""
    columns = ", ".join(DEDUP)
    tables = ("onceward_dedup",) if engine.dialect.name == "sqlite" else ("onceward_dedup", "onceward_kept")
    rows = " UNION ALL ".join(f"SELECT {columns} FROM {table}" for table in tables)
    query = f"SELECT {columns} FROM ({rows}) AS every ORDER BY consumer_id, tracking_id, event_day"
    digest, count = hashlib.sha256(), 0
    with engine.connect().execution_options(stream_results=True, yield_per=10_000) as connection:
        for row in connection.exec_driver_sql(query):
            digest.update(repr(tuple(row)).encode())
            count += 1
    return count, digest.hexdigest()
