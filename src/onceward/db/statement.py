"""What a text of SQL would do to the session's transaction: it must be one statement, must not end it, and must leave
nothing on its connection.

Each database reads a text in its own way: comments nest in PostgreSQL and end at a carriage return, SQLite takes a byte
order mark for a blank and knows more quotes. Reading it differently from the database would miss what it runs.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Connection, event

from onceward.db.errors import SessionError
from onceward.db.leftovers import left_by

_LEXICON: Final = r"""
        (?P<comment>--[^{ends}]*)
      | (?P<opens>/\*)
      | \b[eE]'([^'\\]|''|\\.)*('|\Z)                        # a string with backslashes
      | '([^']|'')*('|\Z)
      | "([^"]|"")*("|\Z)
      {more}
      | (?P<end>;)"""
_POSTGRESQL = re.compile(
    _LEXICON.format(ends=r"\n\r", more=r"| (?<![\w$])\$(?P<tag>([^\W\d]\w*)?)\$.*?(\$(?P=tag)\$|\Z)"),
    re.VERBOSE | re.DOTALL,
)
_SQLITE = re.compile(
    _LEXICON.format(ends=r"\n", more=r"| `([^`]|``)*(`|\Z) | \[[^\]]*(\]|\Z)").replace("[eE]'", "(?!)'"),
    re.VERBOSE | re.DOTALL,
)
_EDGE_OF_COMMENT = re.compile(r"/\*|\*/")
_BLANK: Final = r"[\s\ufeff]"
_ENDS_TRANSACTION = re.compile(
    rf"""{_BLANK}*(begin | start\s+transaction | commit | end | abort | prepare\s+transaction
        | rollback(?!(\s+(work|transaction))?\s+to\b))\b""",
    re.IGNORECASE | re.VERBOSE,
)
_OPENS_BODY = {
    "postgresql": re.compile(
        rf"{_BLANK}*create\s+(or\s+replace\s+)?(function|procedure)\b.*\bbegin\s+atomic\b(?!\s+end\b)",
        re.I | re.S,
    ),
    "sqlite": re.compile(rf"{_BLANK}*create\s+(temp\s+|temporary\s+)?trigger\b.*\bbegin\b", re.I | re.S),
}
"""The body of a trigger or function is statements that end with semicolons; no transaction can end there."""
_CLOSES_BODY = re.compile(r"\s*end\s*", re.IGNORECASE)

_GUARDED: Final = "onceward_guarded"
"""Option of a connection whose statements are checked on their way to the driver."""
ENDS_ITSELF = (
    "a session begins and ends its transaction itself: leave the block to commit, raise to roll back"
)


@lru_cache(500)
def refusal(sql: str, database: str) -> str | None:
    """Return why a session on this database does not run this text; None if it does."""
    statements = _statements(sql, database)
    if any(map(_ENDS_TRANSACTION.match, statements)):
        return ENDS_ITSELF
    if len(statements) > 1:
        return f"a session runs one statement at a time, and this text has {len(statements)}; run each on its own"
    instead = left_by(statements[0]) if statements and database != "sqlite" else None
    if instead is not None:
        return (
            f"this would stay on the connection when the session has ended, and others get it next; {instead}"
        )
    return None


def guard(connection: Connection) -> None:
    """Check every statement of this connection on its way to the driver."""
    if not is_guarded(connection):
        event.listen(connection, "before_cursor_execute", check_compiled)
        connection.execution_options(**{_GUARDED: True})


def is_guarded(connection: Connection) -> bool:
    return _GUARDED in connection.get_execution_options()


def check_compiled(connection: Connection, cursor: Any, statement: str, *_: Any) -> None:
    check(connection, statement)


def check(connection: Connection, sql: str) -> None:
    why = refusal(sql, connection.dialect.name)
    if why is not None:
        raise SessionError(why)


def _statements(sql: str, database: str) -> list[str]:
    """The statements of a text; one with a body is whole."""
    found: list[str] = []
    in_body = False
    for part in _split(sql, database):
        if in_body:
            in_body = _CLOSES_BODY.fullmatch(part) is None
        elif part.strip("\ufeff \t\r\n\f\v"):
            found.append(part)
            in_body = _OPENS_BODY[database].match(part) is not None
    return found


def _split(sql: str, database: str) -> list[str]:
    """Split at semicolons outside of strings, names and comments, of which only blanks are left."""
    pattern = _SQLITE if database == "sqlite" else _POSTGRESQL
    parts, text, at = [], "", 0
    while token := pattern.search(sql, at):
        text += sql[at : token.start()]
        at = token.end()
        if token["end"]:
            parts.append(text)
            text = ""
            continue
        text += " "
        if token["opens"]:
            at = _end_of_comment(sql, at, nests=database != "sqlite")
    return [*parts, text + sql[at:]]


def _end_of_comment(sql: str, at: int, *, nests: bool) -> int:
    depth = 1
    while depth and (edge := _EDGE_OF_COMMENT.search(sql, at)):
        at = edge.end()
        if edge[0] == "*/":
            depth -= 1
        elif nests:
            depth += 1
    return len(sql) if depth else at
