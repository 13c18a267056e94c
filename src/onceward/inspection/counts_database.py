"""Count what inbox and dead letters have of one consumer."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onceward.connectors.reports import Messages
from onceward.inspection.fates import ConsumerLedger, InboxRecords, Letter
from onceward.inspection.totals import LetterCounts, RecordCounts

if TYPE_CHECKING:
    from sqlalchemy import Connection

PAGE = 500
"""Ids per query."""


def has_tables(connection: Connection) -> bool:
    from sqlalchemy import inspect

    return bool(inspect(connection).has_table("onceward_evidence"))  # the newest of them


class DatabaseCounts:
    """Counts in the inbox and dead letters of one consumer. Without tables they are empty."""

    def __init__(
        self,
        connection: Connection | None,
        consumer: str,
        *,
        contract: bool,
        siblings: frozenset[str] | None = None,
    ) -> None:
        """`connection` is None if there are no tables yet. `contract`: its code has one, registered or not."""
        self._connection = connection
        self._siblings = siblings
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

    def ledger(self, messages: Messages, origin: str, before: int) -> ConsumerLedger:
        """Look up these messages. `before` is how many records there were before the source was read."""
        rows = self._rows(
            "SELECT body_sha256, status, origin FROM onceward_dead_letters WHERE consumer = :consumer"
        )
        records = None
        if self._has_contract:
            ids = {
                each.tracking_id for like in (messages.done, messages.moved, messages.others) for each in like
            }
            outcomes = self._outcomes(self._consumer, list(ids))
            found = self._by_outcome()
            others = [each for each in self.registered if each != self._consumer]
            if found.total() or before:  # it may have had another name before, which no consumer has now
                others = [
                    each for each in others if self._siblings is not None and each not in self._siblings
                ]
            records = InboxRecords(
                outcomes=outcomes,
                before=before,
                after=found.total(),
                superseded=found["superseded"],
                others={id: other for other in others for id in self._outcomes(other, list(ids))},
                floor=self._floor,
            )
        return ConsumerLedger(
            consumer=self._consumer,
            letters=tuple(Letter(bytes(digest), status, place == origin) for digest, status, place in rows),
            purged_before=self._letters_purged_before(),
            records=records,
        )

    def records(self) -> RecordCounts | None:
        if not self._has_contract:
            return None
        found = self._by_outcome()
        return RecordCounts(
            applied=found["done"], superseded=found["superseded"], is_purged=self._floor is not None
        )

    def letters(self, origin: str) -> LetterCounts:
        rows = self._rows(
            "SELECT status, count(*), sum(deaths) FROM onceward_dead_letters WHERE consumer = :consumer "
            "AND origin = :origin GROUP BY status",
            origin=origin,
        )
        again = sum(
            row[0]
            for row in self._rows("SELECT died_again FROM onceward_redrives WHERE consumer = :consumer")
        )
        deaths = int(sum(row[2] for row in rows)) - again
        return LetterCounts(**{status: count for status, count, _ in rows}, deaths=max(deaths, 0))

    def _by_outcome(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for table in self._tables():
            rows = self._rows(
                f"SELECT outcome, count(*) FROM {table} WHERE consumer_id = :consumer GROUP BY outcome"
            )
            found.update(dict(tuple(row) for row in rows))
        return found

    def _outcomes(self, consumer: str, ids: list[str]) -> dict[str, str]:
        from sqlalchemy import bindparam, text

        found: dict[str, str] = {}
        for table in self._tables():
            query = text(
                f"SELECT tracking_id, outcome FROM {table} WHERE consumer_id = :consumer AND tracking_id IN :ids"
            ).bindparams(bindparam("ids", expanding=True))
            for begin in range(0, len(ids), PAGE):
                page = {"consumer": consumer, "ids": ids[begin : begin + PAGE]}
                found.update(dict(tuple(row) for row in self._execute(query, page)))
        return found

    def _tables(self) -> tuple[str, ...]:
        """PostgreSQL keeps records on hold in a table of their own when it drops their days."""
        postgresql = self._connection is not None and self._connection.dialect.name == "postgresql"
        return ("onceward_dedup", "onceward_kept") if postgresql else ("onceward_dedup",)

    def _letters_purged_before(self) -> float | None:
        """Letters are purged a while after they died: only those of messages appended before this time are gone."""
        # An app without a database does not load this room.
        from onceward.deadletters.letter import KEPT_SECONDS

        rows = self._rows("SELECT at, details FROM onceward_audit WHERE action = 'purge'")
        purges = [datetime.fromisoformat(at) for at, details in rows if json.loads(details).get("letters")]
        return max(purges).timestamp() - KEPT_SECONDS if purges else None

    def _rows(self, query: str, **values: str) -> list[Any]:
        from sqlalchemy import text

        if ":consumer" in query:
            values["consumer"] = self._consumer
        return self._execute(text(query), values)

    def _execute(self, query: Any, values: dict[str, Any]) -> list[Any]:
        return [] if self._connection is None else list(self._connection.execute(query, values))
