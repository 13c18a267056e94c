"""Statements of PostgreSQL whose effect stays on a connection after its transaction. Other sessions of the pool would
get that connection next.

Only the text is known: a function or a DO block may do the same.
"""

from __future__ import annotations

import re
from typing import Final


def _statement(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"[\s\ufeff]*{pattern}", re.IGNORECASE | re.DOTALL)


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
        _anywhere(r"set_config\s*\([^()]*,\s*false\s*\)"),
        "pass true as the last argument of set_config, and it ends with the transaction",
    ),
    (_anywhere(r"pg_(try_)?advisory_lock(_shared)?\s*\("), _LOCK),
    (
        _statement(r"create\s+((global|local)\s+)?temp(orary)?\s+table\b(?!.*\bon\s+commit\s+drop\b)"),
        _TABLE,
    ),
    (_statement(r"create\s+(or\s+replace\s+)?((global|local)\s+)?temp(orary)?\s+(?!table\b)"), _TABLE),
    (
        _statement(
            r"(select|with)\b.*(?<!\s)(?<!insert)(?<!merge)\s+into\s+((global|local)\s+)?temp(orary)?\b"
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


def left_by(statement: str) -> str | None:
    """Return what to write instead of this statement, without its strings, names in quotes and comments; None if it
    leaves nothing on the connection."""
    return next((instead for pattern, instead in _LEFT if pattern.match(statement)), None)
