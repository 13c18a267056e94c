"""Group dead letters that died of the same: a thousand letters are often one cause.

The database groups by what it stores, without the id that the engine puts before an error; the rest is done here, row
by row, because errors name ids, numbers and values.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import NamedTuple

import msgspec

from onceward.db.transaction import DbTransaction
from onceward.deadletters.letter import moment
from onceward.deadletters.queries import Filter
from onceward.storage.database import Sql
from onceward.telemetry.redaction import redact

LONGEST = 300
"""Characters of a normalized message."""

_ENGINE = re.compile(r"(?:BUSINESS|SYSTEM|TIMEOUT)(?: \[.*?\])?: ", re.DOTALL)
"""What the engine writes before an error: its category, and the id of the message."""
_CLASS = re.compile(r"([A-Za-z_][\w.]*\.)?([A-Z]\w*)(?:: |\Z)")
_BACKGROUND = re.compile(r"\s*\(Background on this error at: \S+\)")
_VALUES = (
    (re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`|«[^»\n]*»|“[^”\n]*”"), "<value>"),
    (re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.@-]+){2,}[\\/]?"), "<path>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b"), "<hex>"),
    (re.compile(r"(?<![\w<])[-+]?\d[\d_]*(?:[.,]\d+)*(?:[eE][-+]?\d+)?"), "<number>"),
    (re.compile(r"(?<=[_-])\d+\b"), "<number>"),  # order-17
)


class ErrorKind(NamedTuple):
    error_class: str
    """Empty if the error does not name one."""
    message: str


class LetterGroup(msgspec.Struct, kw_only=True):
    """Letters of one consumer and type that died of the same error."""

    consumer: str
    event_type: str
    error_class: str
    message: str
    """Normalized: numbers, ids, times, paths and quoted values are replaced."""
    letters: int
    first_at: datetime
    """When the first of them first failed."""
    last_at: datetime
    """When the last of them died."""
    example: int
    """The number of one of them, the oldest."""


def normalize(error: str) -> ErrorKind:
    """Return what errors of the same kind have in common."""
    text = _BACKGROUND.sub("", redact(error)).strip()
    ours = _ENGINE.match(text)
    text = text[ours.end() :] if ours else text
    named = _CLASS.match(text)
    if named is not None:
        text = text[named.end() :]
    for pattern, placeholder in _VALUES:
        text = pattern.sub(placeholder, text)
    return ErrorKind("" if named is None else named[2], " ".join(text.split())[:LONGEST])


def groups(transaction: DbTransaction, rows: Sql, wanted: Filter) -> list[LetterGroup]:
    """Return all groups, the largest first."""
    condition, values = wanted.as_sql()
    found: dict[tuple[str, str, ErrorKind], LetterGroup] = {}
    for row in rows.run(transaction, _GROUPS.replace("{condition}", condition), **values).mappings():
        kind = normalize(row["text"])
        key = (row["consumer"], row["event_type"], kind)
        first, last = moment(row["first_at"]), moment(row["last_at"])
        group = found.get(key)
        if group is None:
            found[key] = LetterGroup(
                consumer=row["consumer"],
                event_type=row["event_type"],
                error_class=kind.error_class,
                message=kind.message,
                letters=row["letters"],
                first_at=first,
                last_at=last,
                example=row["example"],
            )
            continue
        group.letters += row["letters"]
        group.first_at, group.last_at = min(group.first_at, first), max(group.last_at, last)
        group.example = min(group.example, row["example"])
    return sorted(found.values(), key=lambda each: (-each.letters, each.example))


_GROUPS = """
    SELECT consumer, event_type, replace(error, '[' || message_id || ']', '[]') AS text,
        count(*) AS letters, min(first_failed_at) AS first_at,
        max(died_at) AS last_at, min(id) AS example
    FROM onceward_dead_letters WHERE {condition} GROUP BY 1, 2, 3
"""
