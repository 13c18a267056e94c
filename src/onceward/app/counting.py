"""What there is of each consumer: in its source, its inbox and among dead letters. It looks, and changes nothing."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceward.app.asking import ask_boundary, asking_database
from onceward.app.books import Balance, Letters, Records, Source, strike
from onceward.app.counting_streams import Seen, count_stream
from onceward.app.sources import Address, file_of
from onceward.task.exceptions import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Connection

PAGE = 500
"""Ids that are asked for at once."""


def balance_of(source: Address, consumer: str, database: str | None) -> Balance:
    """`consumer` is what inbox and dead letters know it by. The source is looked at first: what is done meanwhile is
    seen as done, not as missing."""
    counted, seen = _KINDS[source.kind](source)
    if database is None:
        return strike(counted, None, None)
    with asking_database(database) as connection:
        if connection is None or not _has_tables(connection):
            return strike(counted, Letters(), None)
        inbox = _Inbox(connection, consumer)
        if seen is None:
            return strike(counted, inbox.letters(source.origin), inbox.records())
        letters, records = inbox.among(seen)
        return strike(counted, letters, records)


# ── sources ─────────────────────────────────────────────────────────────────────────────────────────────


def _sqlite(source: Address) -> tuple[Source, None]:
    from onceward.connectors.sqlite import statements as sql

    path = Path(file_of(source)).absolute()
    if not path.is_file():
        why = {"appended": f"there is no file {path.name} yet"}
        return Source(appended=0, done=0, pending=0, dead=0, moved=0, untold=why), None
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=10.0)) as connection:
        connection.execute("PRAGMA query_only = ON")
        if connection.execute(sql.READ_APPLICATION_ID).fetchone()[0] != sql.APPLICATION_ID:
            raise ConfigurationError(f"{path} is no queue of onceward; see the source {str(source)!r}")
        if connection.execute(sql.READ_USER_VERSION).fetchone()[0] < sql.TALLIED_SINCE:
            pending, dead = connection.execute(sql.HELD).fetchone()
            why = {
                "appended": "an older onceward did not count; it is counted from the next opening of the file on"
            }
            return Source(pending=pending, dead=dead, untold=why), None
        appended, done, moved, pending, dead = connection.execute(sql.BALANCE).fetchone()
    return Source(appended=appended, done=done, moved=moved, pending=pending, dead=dead), None


def _boundary(source: Address) -> tuple[Source, None]:
    stats = ask_boundary(source)
    name = source.settings["consumer"]
    offset = next((each["offset"] for each in stats["consumers"] if each["name"] == name), None)
    confirmed = offset or 0
    expired = max(stats["first"] - 1 - confirmed, 0)
    return Source(
        appended=stats["last"],
        done=confirmed,
        pending=stats["last"] - confirmed - expired,
        dead=0,
        dropped={"expired before it was confirmed": expired} if expired else {},
        has_copies=False,
        untold={} if offset is not None else {"pending": f"{name} has never fetched: all facts wait for it"},
    ), None


def _memory(source: Address) -> tuple[Source, None]:
    return Source(
        untold={"appended": "it is in the memory of the process that runs the consumer, and nowhere else"}
    ), None


_KINDS: dict[str, Any] = {
    "sqlite": _sqlite,
    "redis": count_stream,
    "boundary": _boundary,
    "memory": _memory,
}


# ── the database ────────────────────────────────────────────────────────────────────────────────────────


def _has_tables(connection: Connection) -> bool:
    from sqlalchemy import inspect

    return bool(inspect(connection).has_table("onceward_evidence"))  # the newest of them


class _Inbox:
    """Inbox and dead letters of one consumer."""

    def __init__(self, connection: Connection, consumer: str) -> None:
        self._connection = connection
        self._consumer = consumer
        self._has_contract = bool(
            self._rows("SELECT 1 FROM onceward_consumers WHERE consumer_id = :consumer")
        )
        floor = self._rows("SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer")
        self._floor: int | None = floor[0][0] if floor else None

    def records(self) -> Records | None:
        if not self._has_contract:
            return None
        found: Counter[str] = Counter()
        for table in self._tables():
            rows = self._rows(
                f"SELECT outcome, count(*) FROM {table} WHERE consumer_id = :consumer GROUP BY outcome"
            )
            found.update(dict(tuple(row) for row in rows))
        return Records(
            applied=found["done"], superseded=found["superseded"], purged_before=self._purged_before()
        )

    def letters(self, origin: str) -> Letters:
        rows = self._rows(
            "SELECT origin, status, count(*), sum(deaths) FROM onceward_dead_letters WHERE consumer = :consumer "
            "GROUP BY origin, status"
        )
        counted = {status: count for place, status, count, _ in rows if place == origin}
        again = self._rows(
            "SELECT coalesce(sum(died_again), 0) FROM onceward_redrives WHERE consumer = :consumer"
        )
        here = sum(deaths for place, _, _, deaths in rows if place == origin)
        elsewhere = sum(deaths for place, _, _, deaths in rows if place != origin)
        return Letters(
            **counted,
            deaths=max(int(here) - int(again[0][0]), 0),
            elsewhere=int(elsewhere),
            purged=self._has_purged_letters(),
        )

    def among(self, seen: list[Seen]) -> tuple[Letters, Records | None]:
        """What became of these messages."""
        status_of = {
            bytes(digest): status
            for digest, status in self._rows(
                "SELECT body_sha256, status FROM onceward_dead_letters WHERE consumer = :consumer"
            )
        }
        dead: Counter[str] = Counter()
        buried: set[bytes] = set()
        rest: list[Seen] = []
        copies = 0
        for each in seen:
            if each.digest not in status_of:
                rest.append(each)
            elif each.digest in buried:
                copies += 1
            else:
                buried.add(each.digest)
                dead[status_of[each.digest]] += 1
        letters = Letters(
            open=dead["open"],
            redriven=dead["redriven"],
            resolved=dead["resolved"],
            discarded=dead["discarded"],
            deaths=sum(dead.values()),
        )
        if not self._has_contract:
            return letters, None
        outcomes = self._outcomes([each.tracking_id for each in rest])
        found: Counter[str] = Counter()
        unknown: list[str] = []
        before: set[str] = set()
        for each in rest:
            if each.tracking_id in before:
                copies += 1
            elif each.tracking_id in outcomes:
                found[outcomes[each.tracking_id]] += 1
            elif self._floor is not None and each.day < self._floor:
                found["done"] += 1  # its record has been purged
            else:
                unknown.append(each.tracking_id)
            before.add(each.tracking_id)
        return letters, Records(
            applied=found["done"] + dead["resolved"],
            superseded=found["superseded"],
            duplicate=copies,
            unknown=tuple(unknown),
        )

    def _outcomes(self, ids: list[str]) -> dict[str, str]:
        from sqlalchemy import bindparam, text

        found: dict[str, str] = {}
        for table in self._tables():
            query = text(
                f"SELECT tracking_id, outcome FROM {table} WHERE consumer_id = :consumer AND tracking_id IN :ids"
            ).bindparams(bindparam("ids", expanding=True))
            for begin in range(0, len(ids), PAGE):
                page = {"consumer": self._consumer, "ids": ids[begin : begin + PAGE]}
                found.update({row[0]: row[1] for row in self._connection.execute(query, page)})
        return found

    def _tables(self) -> tuple[str, ...]:
        """PostgreSQL keeps what is on hold beside the days that it has dropped."""
        postgresql = self._connection.dialect.name == "postgresql"
        return ("onceward_dedup", "onceward_kept") if postgresql else ("onceward_dedup",)

    def _purged_before(self) -> str | None:
        from onceward.inbox.stores.base import as_date

        return None if self._floor is None else as_date(self._floor)

    def _has_purged_letters(self) -> bool:
        rows = self._rows("SELECT details FROM onceward_audit WHERE action = 'purge'")
        return any(json.loads(row[0]).get("letters") for row in rows)

    def _rows(self, query: str) -> list[Any]:
        from sqlalchemy import text

        values = {"consumer": self._consumer} if ":consumer" in query else {}
        return list(self._connection.execute(text(query), values))
