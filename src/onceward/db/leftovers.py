"""Statements of PostgreSQL whose effect stays on a connection after its transaction. Other sessions of the pool would
get that connection next.

Only the text is known: a function or a DO block may do the same.
"""

from __future__ import annotations

import re
from typing import Final


def _statement(pattern: str) -> re.Pattern[str]:
    """EXPLAIN may run the statement after it."""
    explained = r"(explain\b(\s*\([^)]*\)|(\s+(analyze|verbose)\b)*)\s*)?"
    return re.compile(rf"[\s\ufeff]*{explained}(?:{pattern})", re.IGNORECASE | re.DOTALL)


def _anywhere(pattern: str) -> re.Pattern[str]:
    return re.compile(rf".*\b{pattern}", re.IGNORECASE | re.DOTALL)


_TABLE: Final = "write CREATE TEMP TABLE … ON COMMIT DROP"
_LOCK: Final = "call session.advisory_lock(…) or pg_advisory_xact_lock(…), which end with the transaction"
_LEFT: Final = (
    (
        _statement(r"set\b(?!\s+(local|transaction|constraints)\b)"),
        "write SET LOCAL …, which ends with the transaction; a search_path must include the schema of onceward",
    ),
    (_statement(r"reset\b"), "write SET LOCAL … TO DEFAULT, which ends with the transaction"),
    (
        _statement(r"update\s+(only\s+)?(pg_catalog\s*\.\s*)?pg_settings\b"),
        "write SET LOCAL …, which ends with the transaction",
    ),
    (_anywhere(r"pg_(try_)?advisory_lock(_shared)?\s*\("), _LOCK),
    (
        _statement(r"create\s+((global|local)\s+)?temp(orary)?\s+table\b(?!.*\bon\s+commit\s+drop\b)"),
        _TABLE,
    ),
    (_statement(r"create\s+(or\s+replace\s+)?((global|local)\s+)?temp(orary)?\s+(?!table\b)"), _TABLE),
    (
        _statement(
            r"create\s+(or\s+replace\s+)?(table|view|sequence|type|domain|function|procedure|aggregate)\s+"
            r"(if\s+not\s+exists\s+)?pg_temp\s*\.(?!.*\bon\s+commit\s+drop\b)"
        ),
        _TABLE,
    ),
    (
        _statement(
            r"(select|with)\b.*(?<!\s)(?<!insert)(?<!merge)\s+into\s+"
            r"(((global|local)\s+)?temp(orary)?\b|pg_temp\s*\.)"
        ),
        _TABLE,
    ),
    (_statement(r"(un)?listen\b"), "listen on a connection of your own"),
    (
        _statement(r"(prepare|deallocate)\b"),
        "run the statement itself: the driver prepares what it runs often",
    ),
    (
        _statement(r"declare\b.*\bwith\s+hold\b"),
        "leave out WITH HOLD: the cursor then ends with the transaction",
    ),
)

_SETS: Final = re.compile(r"\bset_config\s*\(", re.IGNORECASE)
_IS_LOCAL: Final = re.compile(r"\s*(true|%\(\w+\)s|%s|:\w+|\$\d+)\s*(::\s*\w+\s*)?", re.IGNORECASE)
"""A value that is passed as a parameter is not known here."""


def left_by(statement: str) -> str | None:
    """Return what to write instead of this statement, without its strings, names in quotes and comments; None if it
    leaves nothing on the connection."""
    if any(
        _IS_LOCAL.fullmatch(_last_argument(statement, at.end())) is None for at in _SETS.finditer(statement)
    ):
        return "pass true as the last argument of set_config, and it ends with the transaction"
    return next((instead for pattern, instead in _LEFT if pattern.match(statement)), None)


def _last_argument(statement: str, begin: int) -> str:
    """The text after the last comma of a call whose arguments begin there."""
    depth = 1
    for at in range(begin, len(statement)):
        depth += {"(": 1, ")": -1}.get(statement[at], 0)
        if statement[at] == "," and depth == 1:
            begin = at + 1
        if not depth:
            return statement[begin:at]
    return statement[begin:]
