"""How limits are used now, for operators: what runs under each, and which of its keys are slow or wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from sqlalchemy import Connection

from onceward.storage.database import Sql

LISTED: Final = 10
"""Keys of a limit that are named: the slowest, and the same number of those that wait longest."""
_UNITS = (("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0))


class KeyUse(msgspec.Struct):
    """One key of a limit."""

    key: str
    running: int
    """Slots that are taken; 0 if the limit has no concurrency."""
    seconds: float | None
    """That its handlers take, on average; None if that is not known."""
    next_in: float
    """Seconds until its next start by the rate."""
    back_in: float
    """Seconds until the last message that was given back comes again; 0 or less if none was."""


class LimitUse(msgspec.Struct):
    """What the limit of a consumer is, as the process that began last says, and how it is used."""

    scope: str
    every: float
    concurrency: int
    by_what: str
    keys: int = 0
    """That were used lately."""
    running: int = 0
    waiting_keys: int = 0
    """Keys whose messages were given back to the source, to come again."""
    slow: Sequence[KeyUse] = ()
    waiting: Sequence[KeyUse] = ()

    @property
    def words(self) -> str:
        parts = [f"{self.concurrency} at once"] if self.concurrency else []
        if self.every:
            unit, length = next(each for each in _UNITS if each[1] >= self.every or each[0] == "d")
            parts.insert(0, f"{length / self.every:.4g}/{unit}")
        return " and ".join(parts) + (f", for each {self.by_what}" if self.by_what else "")


def read_usage(connection: Connection, rows: Sql) -> dict[str, LimitUse]:
    """The limits of a database, by scope: see `LimitRecords`."""
    found = {}
    for row in rows.on(connection, _LIMITS).mappings().all():
        use = msgspec.convert(dict(row), LimitUse, strict=False)
        use.slow = _keys(connection, rows, use.scope, "held_for > 0", "held_for")
        use.waiting = _keys(connection, rows, use.scope, "tail > {steady}", "tail")
        found[use.scope] = use
    return found


def _keys(connection: Connection, rows: Sql, scope: str, which: str, order: str) -> list[KeyUse]:
    sql = _KEYS.replace("{which}", which).replace("{order}", order)
    read = rows.on(connection, sql, scope=scope, listed=LISTED).mappings()
    return [msgspec.convert(dict(row), KeyUse, strict=False) for row in read]


_LIMITS = """
    SELECT scope, every, concurrency, by_what,
        (SELECT count(*) FROM onceward_limit_keys AS k WHERE k.scope = onceward_limits.scope) AS keys,
        (SELECT count(*) FROM onceward_limit_keys AS k
            WHERE k.scope = onceward_limits.scope AND k.tail > {steady}) AS waiting_keys,
        (SELECT count(*) FROM onceward_limit_slots AS s
            WHERE s.scope = onceward_limits.scope AND s.held_until > {steady}) AS running
    FROM onceward_limits ORDER BY scope
"""
_KEYS = """
    SELECT key, held_for AS seconds, next_at - {steady} AS next_in, tail - {steady} AS back_in,
        (SELECT count(*) FROM onceward_limit_slots AS s WHERE s.scope = onceward_limit_keys.scope
            AND s.key = onceward_limit_keys.key AND s.held_until > {steady}) AS running
    FROM onceward_limit_keys WHERE scope = :scope AND {which} ORDER BY {order} DESC, key LIMIT :listed
"""
