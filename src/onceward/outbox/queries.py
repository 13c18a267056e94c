"""The outbox as operators see it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Engine

from onceward._sync import run_blocking
from onceward.connectors.codec import DecodeError, decode
from onceward.db.transaction import DbTransaction
from onceward.outbox.claims import OutboxRows
from onceward.outbox.targets import shown
from onceward.storage import audit
from onceward.storage.database import BlockingStoragePorts, Sql
from onceward.telemetry.redaction import redact

STATES = ("ready", "delayed", "held", "behind", "published", "dead", "moved")
PURGE_STEP = 1000


class OutboxMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of the outbox."""

    id: str
    target: str
    key: str | None
    state: str
    attempts: int
    failures: int
    error: str | None
    """Of the last failure."""
    sent_at: datetime
    """When it was sent, or became due."""
    due_at: datetime | None
    """When a delayed message is due."""
    ended_at: datetime | None
    """When it was published or given up."""
    size: int
    """Of its body, in bytes."""


class OutboxQueries:
    """Every call is a transaction of its own."""

    def __init__(self, engine: Engine) -> None:
        self._ports = BlockingStoragePorts(engine)
        self._rows = Sql(engine.dialect.name)
        self._claims = OutboxRows(engine)

    def find(
        self, *, state: str | None = None, target: str | None = None, id: str | None = None, limit: int = 50
    ) -> list[OutboxMessage]:
        """Return messages, the oldest first. Without a state, those that are not published yet."""
        given = {"state": state, "target": target, "id": id}
        wanted = [_WANTED[name] for name, value in given.items() if value is not None]
        if state is None and id is None:
            wanted.append(_UNPUBLISHED)
        query = _FIND.replace("{wanted}", " AND ".join(wanted))

        def find(transaction: DbTransaction) -> list[OutboxMessage]:
            return [_waiting(row) for row in self._rows.all(transaction, query, limit=limit, **given)]

        return run_blocking(self._ports.look(find))

    def counts(self) -> dict[str, int]:
        """Count the messages of each state."""

        def count(transaction: DbTransaction) -> dict[str, int]:
            return {row["state"]: row["messages"] for row in self._rows.all(transaction, _COUNT)}

        return run_blocking(self._ports.look(count))

    def body(self, id: str) -> Any:
        """Return the payload and metadata of a message; None if there is none, or it cannot be read."""

        def read(transaction: DbTransaction) -> Any:
            row = self._rows.first(transaction, _BODY, id=id)
            try:
                return None if row is None else decode(bytes(row["body"]))
            except DecodeError:
                return None

        return run_blocking(self._ports.look(read))

    def retry(self, ids: list[str], *, operator: str) -> list[str]:
        """Let messages that wait after a failure be tried now. Return the ids of those that did."""
        audit.check_operator(operator)

        def retry(transaction: DbTransaction) -> list[str]:
            done = [id for id in ids if self._rows.changed(transaction, _RETRY, id=id)]
            audit.note(transaction, self._rows, operator, "retry_outbox", {"messages": done})
            return done

        return run_blocking(self._ports.transact(retry))

    def purge(self, seconds: float) -> int:
        """Remove messages that were published at least so long ago, in steps. Return how many."""
        total = 0
        while removed := self._claims.purge(seconds, PURGE_STEP):
            total += removed
        return total


def _waiting(row: dict[str, Any]) -> OutboxMessage:
    return OutboxMessage(
        id=row["message_id"],
        target=shown(row["target"]),
        key=row["key"],
        state=row["state"],
        attempts=row["attempts"],
        failures=row["failures"],
        error=None if row["error"] is None else redact(row["error"]),
        sent_at=_moment(row["created_at"]),
        due_at=_moment(row["at"]) if row["state"] == "delayed" else None,
        ended_at=None if row["ended_at"] is None else _moment(row["ended_at"]),
        size=row["size"],
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


_WANTED = {"state": "state = :state", "target": "target = :target", "id": "message_id = :id"}
_UNPUBLISHED = "state IN ('ready', 'delayed', 'held', 'behind', 'dead')"
_FIND = """
    SELECT message_id, target, key, state, attempts, failures, error, created_at, at, ended_at, length(body) AS size
    FROM onceward_outbox WHERE {wanted} ORDER BY seq LIMIT :limit
"""
_COUNT = "SELECT state, count(*) AS messages FROM onceward_outbox GROUP BY state"
_BODY = "SELECT body FROM onceward_outbox WHERE message_id = :id"
_RETRY = """
    UPDATE onceward_outbox SET at = {steady} WHERE message_id = :id AND state = 'held' AND token IS NULL
"""
