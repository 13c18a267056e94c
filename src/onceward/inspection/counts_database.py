"""Count what inbox and dead letters have of one consumer."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from onceward.connectors.reports import Messages, Seen
from onceward.inspection.balance import LetterCounts, RecordCounts

if TYPE_CHECKING:
    from sqlalchemy import Connection

PAGE = 500
"""Ids per query."""


def has_tables(connection: Connection) -> bool:
    from sqlalchemy import inspect

    return bool(inspect(connection).has_table("onceward_evidence"))  # the newest of them


class DatabaseCounts:
    """Counts in the inbox and dead letters of one consumer. Without tables they are empty."""

    def __init__(self, connection: Connection | None, consumer: str, *, contract: bool) -> None:
        """`connection` is None if there are no tables yet. `contract`: its code has one, registered or not."""
        self._connection = connection
        self._consumer = consumer
        is_registered = self._rows("SELECT 1 FROM onceward_consumers WHERE consumer_id = :consumer")
        self._has_contract = contract or bool(is_registered)
        floor = self._rows("SELECT floor_day FROM onceward_horizons WHERE consumer_id = :consumer")
        self._floor: int | None = floor[0][0] if floor else None

    @property
    def is_known(self) -> bool:
        """Whether the database has anything of this consumer. Without a contract there are only dead letters."""
        letters = "SELECT 1 FROM onceward_dead_letters WHERE consumer = :consumer LIMIT 1"
        return self._has_contract or bool(self._rows(letters))

    @property
    def registered(self) -> list[str]:
        """All registered consumers: those with a contract."""
        return [row[0] for row in self._rows("SELECT consumer_id FROM onceward_consumers ORDER BY 1")]

    @property
    def recorded(self) -> int:
        """How many records the inbox has of it, whatever their outcome."""
        return self._by_outcome().total()

    def records(self) -> RecordCounts | None:
        if not self._has_contract:
            return None
        found = self._by_outcome()
        return RecordCounts(
            applied=found["done"], superseded=found["superseded"], purged_before=self._purged_before()
        )

    def letters(self, origin: str) -> LetterCounts:
        rows = self._rows(
            "SELECT origin, status, count(*), sum(deaths) FROM onceward_dead_letters WHERE consumer = :consumer "
            "GROUP BY origin, status"
        )
        counted = {status: count for place, status, count, _ in rows if place == origin}
        again = sum(
            row[0]
            for row in self._rows("SELECT died_again FROM onceward_redrives WHERE consumer = :consumer")
        )
        here = sum(deaths for place, _, _, deaths in rows if place == origin)
        elsewhere = sum(deaths for place, _, _, deaths in rows if place != origin)
        return LetterCounts(
            **counted,
            deaths=max(int(here) - again, 0),
            elsewhere=int(elsewhere),
            purged=self._has_purged_letters(),
        )

    def among(
        self, messages: Messages, origin: str, recorded: int
    ) -> tuple[LetterCounts, RecordCounts | None]:
        """Look up these messages. `recorded` is how many records there were before the source was read, so messages
        sent and done since are not taken for lost."""
        rows = self._rows(
            "SELECT body_sha256, status, origin FROM onceward_dead_letters WHERE consumer = :consumer"
        )
        status_of = {bytes(digest): status for digest, status, _ in rows}
        here = {each.digest for each in (*messages.done, *messages.others)}
        beyond = sum(place == origin and bytes(digest) not in here for digest, _, place in rows)
        dead: Counter[str] = Counter()
        buried: set[bytes] = set()
        rest: list[Seen] = []
        copies = 0
        for each in messages.done:
            if each.digest not in status_of:
                rest.append(each)
            elif each.digest in buried:
                copies += 1
            else:
                buried.add(each.digest)
                dead[status_of[each.digest]] += 1
        letters = LetterCounts(
            open=dead["open"],
            redriven=dead["redriven"],
            resolved=dead["resolved"],
            discarded=dead["discarded"],
            deaths=sum(dead.values()),
            beyond=beyond,
        )
        if not self._has_contract:
            return letters, None
        outcomes = self._outcomes([each.tracking_id for each in (*messages.done, *messages.others)])
        found: Counter[str] = Counter()
        unknown: list[str] = []
        before: set[str] = set()
        for each in rest:
            if each.tracking_id in before:
                copies += 1
            elif each.tracking_id in outcomes:
                found[outcomes[each.tracking_id]] += 1
            elif self._floor is not None and each.day < self._floor:
                found["done"] += 1  # its record was purged
            else:
                unknown.append(each.tracking_id)
            before.add(each.tracking_id)
        return letters, RecordCounts(
            applied=found["done"] + dead["resolved"],
            superseded=found["superseded"],
            duplicate=copies,
            unknown=tuple(unknown),
            beyond=max(recorded - len(outcomes), 0),
        )

    def _by_outcome(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for table in self._tables():
            rows = self._rows(
                f"SELECT outcome, count(*) FROM {table} WHERE consumer_id = :consumer GROUP BY outcome"
            )
            found.update(dict(tuple(row) for row in rows))
        return found

    def _outcomes(self, ids: list[str]) -> dict[str, str]:
        from sqlalchemy import bindparam, text

        found: dict[str, str] = {}
        for table in self._tables():
            query = text(
                f"SELECT tracking_id, outcome FROM {table} WHERE consumer_id = :consumer AND tracking_id IN :ids"
            ).bindparams(bindparam("ids", expanding=True))
            for begin in range(0, len(ids), PAGE):
                page = {"consumer": self._consumer, "ids": ids[begin : begin + PAGE]}
                found.update(dict(tuple(row) for row in self._execute(query, page)))
        return found

    def _tables(self) -> tuple[str, ...]:
        """PostgreSQL keeps records on hold in a table of their own when it drops their days."""
        postgresql = self._connection is not None and self._connection.dialect.name == "postgresql"
        return ("onceward_dedup", "onceward_kept") if postgresql else ("onceward_dedup",)

    def _purged_before(self) -> str | None:
        from onceward.inbox.stores.types import as_date

        return None if self._floor is None else as_date(self._floor)

    def _has_purged_letters(self) -> bool:
        rows = self._rows("SELECT details FROM onceward_audit WHERE action = 'purge'")
        return any(json.loads(row[0]).get("letters") for row in rows)

    def _rows(self, query: str) -> list[Any]:
        from sqlalchemy import text

        values = {"consumer": self._consumer} if ":consumer" in query else {}
        return self._execute(text(query), values)

    def _execute(self, query: Any, values: dict[str, Any]) -> list[Any]:
        return [] if self._connection is None else list(self._connection.execute(query, values))
