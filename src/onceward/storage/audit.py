"""The audit of operators' actions: append-only rows, each with the hash of the one before it.

Triggers refuse every change. The owner of the database can remove them and rewrite all rows; keep the last hash
elsewhere to detect that, too.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

from onceward._secrets import mask
from onceward._text import storable
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError
from onceward.storage.database import Sql, wait_for_lock

FIRST = "0" * 64
"""The previous hash of the first row."""
HIGHEST = 2**62
"""Above the number of every row."""


class AuditBreak(NamedTuple):
    """The first row that is not as it was written."""

    seq: int
    what: str


class AuditVerdict(NamedTuple):
    entries: int
    """How many are intact, from the first one on."""
    last_hash: str
    broken: AuditBreak | None


def note(transaction: DbTransaction, rows: Sql, operator: str, action: str, details: dict[str, Any]) -> None:
    """Add a row, in the transaction of the action it records."""
    who = check_operator(operator)
    wait_for_lock(transaction, "onceward audit")
    # Locked, because a repeatable read may be older than the lock above; then this transaction is retried.
    head = rows.first(transaction, "SELECT hash FROM onceward_audit_head" + rows.for_update)
    entry = {
        "at": rows.timestamp(transaction),
        "operator": who,
        "action": action,
        "details": json.dumps(_masked(details), sort_keys=True, default=str),
        "previous": FIRST if head is None else head["hash"],
    }
    digest = hash_of(entry)
    rows.run(transaction, _ADD, **entry, hash=digest)
    rows.run(transaction, _MOVE_HEAD, hash=digest)


def _masked(value: Any) -> Any:
    """Without passwords: an operator may have pasted a URL, and a row stays as it is permanently."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {name: _masked(each) for name, each in value.items()}
    return [_masked(each) for each in value] if isinstance(value, list | tuple) else value


def check_reason(reason: str, action: str) -> str:
    if not isinstance(reason, str) or not reason.strip():
        raise ConfigurationError(f"give a reason to {action}: the audit records why")
    return storable(mask(reason.strip()))


def check_operator(operator: str) -> str:
    if not isinstance(operator, str) or not operator.strip():
        raise ConfigurationError("give the operator's name: the audit records who acted")
    return storable(mask(operator.strip()))


def entries(
    transaction: DbTransaction, rows: Sql, limit: int, before: int | None = None
) -> list[dict[str, Any]]:
    """Return the last entries, or the last ones before a number, newest first."""
    return rows.all(transaction, _LAST, limit=limit, before=HIGHEST if before is None else before)


def verify(transaction: DbTransaction, rows: Sql) -> AuditVerdict:
    """Recompute every hash from the first row on, and return the first break, if any."""
    wait_for_lock(transaction, "onceward audit")  # or rows and head might be read at different moments
    previous, seen, last_seq = FIRST, 0, 0
    for row in rows.all(transaction, _ALL):
        if row["previous"] != previous:
            return AuditVerdict(
                seen, previous, AuditBreak(row["seq"], "what came before it was removed or changed")
            )
        if hash_of(row) != row["hash"]:
            return AuditVerdict(seen, previous, AuditBreak(row["seq"], "it was changed"))
        previous, seen, last_seq = row["hash"], seen + 1, row["seq"]
    head = rows.first(transaction, "SELECT entries, hash FROM onceward_audit_head")
    if head is None or (head["entries"], head["hash"]) != (seen, previous):
        return AuditVerdict(seen, previous, AuditBreak(last_seq, "what came after it was removed"))
    return AuditVerdict(seen, previous, None)


def hash_of(entry: dict[str, Any]) -> str:
    hashed = [entry[name] for name in ("previous", "at", "operator", "action", "details")]
    return hashlib.sha256(json.dumps(hashed).encode()).hexdigest()


_ADD = """
    INSERT INTO onceward_audit (at, operator, action, details, previous, hash)
    VALUES (:at, :operator, :action, :details, :previous, :hash)
"""
_MOVE_HEAD = "UPDATE onceward_audit_head SET entries = entries + 1, hash = :hash"
_LAST = """
    SELECT seq, at, operator, action, details, hash FROM onceward_audit
    WHERE seq < :before ORDER BY seq DESC LIMIT :limit
"""
_ALL = "SELECT seq, at, operator, action, details, previous, hash FROM onceward_audit ORDER BY seq"
