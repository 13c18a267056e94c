"""Statements of the session that do something outside its transaction: a rollback does not undo it.

Judged by its words. What a function of the user's does in the database is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from onceward.verify.watch.statements import only_reads, plain_words

_FILES = "writes a file on the database server"
_ELSEWHERE = "writes to another database"
_HTTP = "makes an HTTP call"
_PATTERNS = tuple(
    (re.compile(pattern, re.DOTALL), what)
    for pattern, what in (
        (r"^copy\b.*\b(to|from)\s+program\b", "runs a program on the database server"),
        (r"^copy\b.*\bto\s+''", _FILES),
        (r"\b(lo_export|pg_file_write|pg_file_rename|pg_file_unlink|writefile|edit)\s*\(", _FILES),
        (r"^vacuum\b.*\binto\b", _FILES),
        (r"\bload_extension\s*\(", "loads code into the database"),
        (r"\b(dblink_exec|dblink_send_query)\s*\(", _ELSEWHERE),
        (r"(?<!net\.)\bhttp_(post|put|patch|delete)\s*\(", _HTTP),
    )
)
_DBLINK = re.compile(r"\bdblink\s*\(")
_TEXT = re.compile(r"'((?:[^']|'')*)'|\$(\w*)\$(.*?)\$\2\$", re.DOTALL)
_ATTACH = re.compile(r"^attach\b.*\bas\s+(\w+)$", re.DOTALL)
_IN_MEMORY = re.compile(r"\battach\s+(database\s+)?'(:memory:)?'", re.IGNORECASE)
_TARGET = re.compile(
    r"\b(?:insert\s+into|update|delete\s+from|merge\s+into|truncate(?:\s+table)?|copy|replace\s+into)\s+(?:only\s+)?"
    r"([\w.]+)"
)
_CREATES = re.compile(r"^(?:create|drop|alter)\s+\w+\s+(?:if\s+(?:not\s+)?exists\s+)?([\w.]+)")

_in_session: ContextVar[bool] = ContextVar("onceward_in_session", default=False)
_attached: set[str] = set()
"""Names of databases that this process has attached to SQLite."""


class EscapeError(OSError):
    """Raised in place of a statement that would leave the verification's own database."""


class Escape(NamedTuple):
    what: str
    stopped: bool = True
    """Whether the statement is not run. SQLite files that a handler attaches are its own."""


@contextmanager
def in_session() -> Iterator[None]:
    """Statements from here on are the handler's, through its session."""
    token = _in_session.set(True)
    try:
        yield
    finally:
        _in_session.reset(token)


def escape_of(sql: str, foreign_tables: Callable[[], Collection[str]]) -> Escape | None:
    """What a statement of the handler does outside the session's transaction; None if it does nothing there."""
    if not _in_session.get():
        return None
    for statement in filter(None, (each.strip() for each in plain_words(sql).split(";"))):
        for pattern, what in _PATTERNS:
            if pattern.search(statement):
                return Escape(what)
        if _DBLINK.search(statement) and not _queries(sql):
            return Escape(_ELSEWHERE)
        if (attaching := _ATTACH.match(statement)) and not _IN_MEMORY.search(sql):
            _attached.add(attaching[1])
        target = _TARGET.search(statement) or _CREATES.match(statement)
        schema, _, table = target[1].rpartition(".") if target else ("", "", "")
        if schema in _attached:
            return Escape(
                f"writes to the attached database {schema!r}, which SQLite commits on its own", False
            )
        if table and table in foreign_tables():
            return Escape(f"writes to the foreign table {table!r}, which is in another database")
    return None


def _queries(sql: str) -> bool:
    """Whether a text in a statement is a query that plainly reads, as in `dblink('…', 'SELECT …')`."""
    texts = [(plain or dollars).replace("''", "'").strip() for plain, _, dollars in _TEXT.findall(sql)]
    return any(
        each.lower().startswith(("select", "with", "values", "table")) and only_reads(each) for each in texts
    )
