"""Group dead letters that died of the same: a thousand letters are often one cause.

Errors name ids, numbers and values, so each is normalized when its letter is buried, and the letter keeps a digest of
that. A list of groups reads the digests, not the letters.
"""

from __future__ import annotations

import hashlib
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
PAGE = 500
"""Letters per statement."""

_ENGINE = re.compile(r"(?:BUSINESS|SYSTEM|TIMEOUT)(?: \[(.*?)\])?: ", re.DOTALL)
"""What the engine writes before an error: its category, and the id of the message."""
_CLASS = re.compile(r"([A-Za-z_][\w.]*\.)?([A-Z]\w*)(?:: |\Z)")
_BACKGROUND = re.compile(r"\(Background on this error at: \S+\)")
_NO_IDS = (
    r"utf|sha|md|u?int|float|base|cp|http|h|x|v|ipv|tls|ssl|oauth|s(?=3\b)|ec(?=2\b)|win|python|sqlite|psycopg|boto|"
    r"urllib|step|phase|stage|level|column|field|arg"
)
"""Words that mean something else with another number."""
_VALUES = (
    (re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "<time>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+"), "<email>"),  # trying every start takes minutes
    (re.compile(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`\n]*`|«[^«»\n]*»|“[^“”\n]*”"), "<value>"),
    (re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.@-]+){2,}[\\/]?"), "<path>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b(?=[a-fA-F]*\d)[0-9a-fA-F]{8,}\b"), "<hex>"),
    (re.compile(r"(?<![\w<])[-+]?\d[\d_]*(?:[.,]\d+)*(?:[eE][-+]?\d+)?"), "<number>"),
    (re.compile(r"(?<=[_-])\d+\b"), "<number>"),  # order-17
    (re.compile(rf"(?i)\b(?!(?:{_NO_IDS})\d)[a-z]{{1,12}}\d{{2,}}\b"), "<id>"),  # ORD17
    (re.compile(rf"(?i)(?<![\w-])(?!(?:{_NO_IDS})\d)[a-z]{{1,12}}\d\b(?!-)"), "<id>"),  # o7, not order-a7
)
_CODES = (
    re.compile(
        r"(?i)\b(?:status(?:[ _-]?code)?|https?(?:/\d(?:\.\d)?)?|(?:error|exit|return|response)[ _-]?code|errno|"
        r"sqlstate)\b['\"]?(?:\s*[:=#(]\s*|\s+(?:is\s+|was\s+)?)(-?\d[0-9A-Z]{0,4})\b(?!\.\d)"
    ),
    re.compile(r"('[1-5]\d\d [A-Z][A-Za-z]*(?: [A-Z][A-Za-z]*)*')"),  # as httpx writes the status
    re.compile(r"\b(ORA-\d{5})\b"),
)
"""Numbers that say what went wrong, not where: a 404 and a 503 are two groups."""
_PROTECT = str.maketrans("0123456789-'", "".join(map(chr, range(0xE000, 0xE00C))))
"""To characters that no pattern of `_VALUES` takes for a part of a value."""
_RESTORE = {protected: character for character, protected in _PROTECT.items()}


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
    group: str
    """Selects them: `Filter(group=…)`."""


def normalize(error: str) -> ErrorKind:
    """Return what errors of the same kind have in common."""
    text = _BACKGROUND.sub("", redact(error)).strip()
    ours = _ENGINE.match(text)
    text = text[ours.end() :] if ours else text
    named = _CLASS.match(text)
    if named is not None:
        text = text[named.end() :]
    text, id = _without_values(text), (ours[1] or "") if ours else ""
    for written in (_without_values(id), "" if id.isdecimal() else id):  # d2 is an <id>, but not in d2-1
        text = _without_id(text, written)
    return ErrorKind("" if named is None else named[2], " ".join(text.split())[:LONGEST])


def _without_values(text: str) -> str:
    for code in _CODES:
        text = code.sub(_protect, text)
    for pattern, placeholder in _VALUES:
        text = pattern.sub(placeholder, text)
    return text.translate(_RESTORE)


def _protect(code: re.Match[str]) -> str:
    before = code[0].removesuffix(code[1])
    return before + code[1].translate(_PROTECT)


def _without_id(text: str, id: str) -> str:
    """Replace the id of the message, if it is still one: a7-x, but not the `order-<number>` of order-17."""
    if not any(map(str.isdigit, id)):
        return text
    return re.sub(rf"(?<!\w){re.escape(id)}(?!\w)", "<id>", text)


def group_of(error: str) -> str:
    """Return the same short text for all errors of a kind."""
    kind = normalize(error)
    return hashlib.sha256(f"{kind.error_class}\n{kind.message}".encode()).hexdigest()[:16]


def groups(transaction: DbTransaction, rows: Sql, wanted: Filter) -> list[LetterGroup]:
    """Return all groups, the largest first."""
    fill_in(transaction, rows)
    condition, values = wanted.as_sql()
    found = rows.all(transaction, _GROUPS.replace("{condition}", condition), **values)
    errors = _errors(transaction, rows, [row["example"] for row in found])
    made = [
        LetterGroup(
            consumer=row["consumer"],
            event_type=row["event_type"],
            error_class=errors[row["example"]].error_class,
            message=errors[row["example"]].message,
            letters=row["letters"],
            first_at=moment(row["first_at"]),
            last_at=moment(row["last_at"]),
            example=row["example"],
            group=row["error_group"],
        )
        for row in found
    ]
    return sorted(made, key=lambda each: (-each.letters, each.example))


def fill_in(transaction: DbTransaction, rows: Sql) -> None:
    """Give letters of earlier versions their group."""
    while found := rows.all(transaction, _UNGROUPED, limit=PAGE):
        filled = [{"id": row["id"], "group": group_of(row["error"])} for row in found]
        rows.many(transaction, _FILL_IN, filled)


def _errors(transaction: DbTransaction, rows: Sql, ids: list[int]) -> dict[int, ErrorKind]:
    found = {}
    for at in range(0, len(ids), PAGE):
        listed = ", ".join(map(str, ids[at : at + PAGE]))
        for row in rows.all(transaction, _ERRORS.replace("{ids}", listed)):
            found[row["id"]] = normalize(row["error"])
    return found


_GROUPS = """
    SELECT consumer, event_type, error_group, count(*) AS letters, min(first_failed_at) AS first_at,
        max(died_at) AS last_at, min(id) AS example
    FROM onceward_dead_letters WHERE {condition} GROUP BY consumer, event_type, error_group
"""
_ERRORS = "SELECT id, error FROM onceward_dead_letters WHERE id IN ({ids})"
_UNGROUPED = "SELECT id, error FROM onceward_dead_letters WHERE error_group IS NULL LIMIT :limit"
_FILL_IN = "UPDATE onceward_dead_letters SET error_group = :group WHERE id = :id"
