"""Find, count, hold, discard and purge dead letters. Every function runs in the caller's transaction."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from onceward._ids import same_id
from onceward._secrets import mask
from onceward._text import storable
from onceward.db.transaction import DbTransaction
from onceward.deadletters import root_causes
from onceward.deadletters.letter import Category, DeadLetter, Status, from_row
from onceward.errors import ConfigurationError
from onceward.storage.database import Sql


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects letters: all given conditions must hold. Without any it selects all."""

    consumer: str | None = None
    event_type: str | None = None
    category: Category | None = None
    status: Status | None = None
    ids: tuple[int, ...] = ()
    message_id: str | None = None
    aggregate_id: str | None = None
    older_than: float | None = None
    """Seconds since it died, at least."""
    younger_than: float | None = None
    """Seconds since it died, at most."""
    text: str | None = None
    """Part of its error, ignoring the case of ASCII letters."""
    group: str | None = None
    """Died of the same: see `LetterGroup.group`."""
    until: float | None = None
    """Died at this time or before, in seconds since 1970: a set that was shown, without what arrived since."""

    def __post_init__(self) -> None:
        for field, kind in (("category", Category), ("status", Status)):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                try:
                    msgspec.structs.force_setattr(self, field, kind(value))
                except ValueError:
                    raise ConfigurationError(
                        f"{field} must be one of {', '.join(kind)}, not {value!r}"
                    ) from None
        msgspec.structs.force_setattr(self, "ids", tuple(self.ids))
        for field in ("older_than", "younger_than"):
            age = getattr(self, field)
            if age is not None and not 0 <= age < float("inf"):
                raise ConfigurationError(f"{field} must be 0 or more seconds, not {age!r}")
        if self.text is not None and not self.text.strip():
            raise ConfigurationError("an empty text matches every error; remove it, or give a real one")

    @property
    def is_narrow(self) -> bool:
        """Whether it has a condition other than consumer and status: a redrive of everything is refused."""
        named = (
            self.event_type,
            self.category,
            self.message_id,
            self.aggregate_id,
            self.text,
            self.younger_than,
            self.group,
        )
        return bool(self.ids or self.older_than) or any(each is not None for each in named)

    def as_sql(self) -> tuple[str, dict[str, Any]]:
        """Return a condition and its parameters. `{now}` is the time."""
        conditions = ["1 = 1"]
        values: dict[str, Any] = {}
        for column in ("consumer", "event_type", "category", "status", "message_id", "aggregate_id"):
            value = getattr(self, column)
            if value is not None:
                conditions.append(f"{column} = :f_{column}")
                values[f"f_{column}"] = same_id(value) if column == "message_id" else str(value)
        if self.group is not None:
            conditions.append("error_group = :f_group")
            values["f_group"] = self.group
        if self.until is not None:
            conditions.append("died_at <= CAST(:f_until AS double precision)")
            values["f_until"] = self.until
        if self.ids:
            conditions.append(f"id IN ({', '.join(str(int(each)) for each in self.ids)})")
        if self.older_than is not None:
            conditions.append("died_at <= {now} - CAST(:f_older AS double precision)")
            values["f_older"] = self.older_than
        if self.younger_than is not None:
            conditions.append("died_at >= {now} - CAST(:f_younger AS double precision)")
            values["f_younger"] = self.younger_than
        if self.text is not None:
            # SQLite lowercases only ASCII; text with other letters is matched as written.
            conditions.append("(lower(error) LIKE :f_lower ESCAPE '!' OR error LIKE :f_text ESCAPE '!')")
            values["f_lower"] = f"%{_escape_pattern(self.text.lower())}%"
            values["f_text"] = f"%{_escape_pattern(self.text)}%"
        return " AND ".join(conditions), values

    def as_dict(self) -> dict[str, Any]:
        """Return the given conditions, for people and for the audit."""
        return {
            name: value for name, value in msgspec.to_builtins(self).items() if value not in (None, [], ())
        }


def find(
    transaction: DbTransaction, rows: Sql, wanted: Filter, limit: int, after: int = 0
) -> list[DeadLetter]:
    condition, values = wanted.as_sql()
    sql = f"""
        SELECT {_COLUMNS} FROM onceward_dead_letters WHERE id > :after AND {condition} ORDER BY id LIMIT :limit
    """
    return [from_row(row) for row in rows.all(transaction, sql, limit=limit, after=after, **values)]


def count(transaction: DbTransaction, rows: Sql, wanted: Filter) -> int:
    condition, values = wanted.as_sql()
    sql = f"SELECT count(*) FROM onceward_dead_letters WHERE {condition}"
    return int(rows.run(transaction, sql, **values).scalar_one())


class LettersInState(NamedTuple):
    """How many matching letters are in one state."""

    status: Status
    held: bool
    letters: int
    first: int
    """The lowest id of them."""

    @property
    def is_open(self) -> bool:
        return self.status is Status.OPEN


def tally(transaction: DbTransaction, rows: Sql, wanted: Filter) -> list[LettersInState]:
    condition, values = wanted.as_sql()
    found = rows.all(transaction, _TALLY.replace("{condition}", condition), **values)
    return [
        LettersInState(Status(row["status"]), bool(row["held"]), row["letters"], row["first"])
        for row in found
    ]


class LetterHold(NamedTuple):
    reason: str
    operators: list[str]
    """Who held letters for this reason: one, unless others did with a filter that may have included it."""


def hold_of(transaction: DbTransaction, rows: Sql, letter_id: int) -> LetterHold | None:
    """Why a letter is on hold, and by whom; None if it is not."""
    sql = "SELECT hold FROM onceward_dead_letters WHERE id = :id"
    reason = rows.run(transaction, sql, id=letter_id).scalar()
    if reason is None:
        return None
    operators = set()
    for row in rows.all(transaction, "SELECT operator, details FROM onceward_audit WHERE action = 'hold'"):
        details = json.loads(row["details"])
        ids = details["filter"].get("ids", [letter_id])
        if letter_id in ids and clean_reason(details["reason"]) == clean_reason(reason):
            operators.add(row["operator"])
    return LetterHold(reason, sorted(operators))


def clean_reason(reason: str) -> str:
    return storable(mask(reason.strip()))


def check(wanted: Filter, action: str) -> None:
    """Refuse to act on all letters."""
    if not wanted.as_dict():
        raise ConfigurationError(f"give a filter to {action} dead letters: ids, a type, a consumer …")


def body(transaction: DbTransaction, rows: Sql, letter_id: int) -> bytes | None:
    value = rows.run(
        transaction, "SELECT body FROM onceward_dead_letters WHERE id = :id", id=letter_id
    ).scalar()
    return None if value is None else bytes(value)


def edited_body(transaction: DbTransaction, rows: Sql, letter_id: int) -> bytes | None:
    value = rows.run(
        transaction, "SELECT edited_body FROM onceward_dead_letters WHERE id = :id", id=letter_id
    ).scalar()
    return None if value is None else bytes(value)


def hold(transaction: DbTransaction, rows: Sql, wanted: Filter, reason: str) -> int:
    """Hold letters. Those on hold get the new reason."""
    condition, values = wanted.as_sql()
    sql = f"UPDATE onceward_dead_letters SET hold = :reason WHERE {condition}"
    return rows.changed(transaction, sql, reason=clean_reason(reason), **values)


def release(transaction: DbTransaction, rows: Sql, wanted: Filter) -> int:
    """End holds. Return how many there were."""
    condition, values = wanted.as_sql()
    sql = f"UPDATE onceward_dead_letters SET hold = NULL WHERE hold IS NOT NULL AND {condition}"
    return rows.changed(transaction, sql, **values)


def discard(transaction: DbTransaction, rows: Sql, wanted: Filter) -> int:
    """Close open letters without a redrive, except held ones. They are kept as long as all others."""
    root_causes.lock(transaction, rows)
    condition, values = wanted.as_sql()
    sql = f"""
        UPDATE onceward_dead_letters SET status = 'discarded', settled_at = {{now}}
        WHERE status = 'open' AND hold IS NULL AND {condition}
    """
    letters = rows.changed(transaction, sql, **values)
    root_causes.close_settled(transaction, rows)
    return letters


def purge(transaction: DbTransaction, rows: Sql, size: int) -> int:
    """Remove up to `size` letters that are settled, old enough and not held."""
    return rows.changed(transaction, _PURGE.replace("{among}", rows.among(_OLD)), size=size)


def stats(transaction: DbTransaction, rows: Sql) -> list[dict[str, Any]]:
    return rows.all(transaction, _STATS)


def _escape_pattern(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")


_COLUMNS = """
    id, consumer, message_id, origin, event_type, aggregate_id, sequence, category, reason, error, attempts, deaths,
    history, trace_id, first_failed_at, died_at, keep_until, hold, status, rca_id, redrive_id, redrives, available_at,
    settled_at, length(body) AS size, body_sha256, edited_at, edited_by, edit_cause,
    order_key, (SELECT waiting FROM onceward_held_keys k WHERE {key_of_letter}) AS waiting,
    (SELECT message_ids FROM onceward_held_keys k WHERE {key_of_letter}) AS waiting_ids
""".replace(
    "{key_of_letter}",
    """
        k.consumer = onceward_dead_letters.consumer AND k.order_key = onceward_dead_letters.order_key
        AND onceward_dead_letters.status IN ('open', 'redriven')
    """,
)
_TALLY = """
    SELECT status, hold IS NOT NULL AS held, count(*) AS letters, min(id) AS first FROM onceward_dead_letters
    WHERE {condition} GROUP BY 1, 2 ORDER BY 1, 2
"""
_MAY_GO = "status IN ('resolved', 'discarded') AND hold IS NULL AND keep_until <= {now}"
# The condition is repeated: the outer one is evaluated again if another transaction changed the row meanwhile.
_OLD = f"SELECT id FROM onceward_dead_letters WHERE {_MAY_GO} LIMIT :size"
_PURGE = f"DELETE FROM onceward_dead_letters WHERE id {{among}} AND {_MAY_GO}"
_STATS = """
    SELECT consumer, event_type, category, status, count(*) AS letters, min(died_at) AS oldest, max(died_at) AS newest
    FROM onceward_dead_letters GROUP BY consumer, event_type, category, status
    ORDER BY consumer, event_type, category, status
"""
