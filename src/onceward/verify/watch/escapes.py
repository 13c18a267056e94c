"""Statements of the session that do something outside its transaction: a rollback does not undo it.

Judged by its words. What a function of the user's does in the database is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

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
        (r"\baws_lambda\.invoke\s*\(", "calls a function of AWS"),
        (r"\baws_s3\.query_export_to_s3\s*\(", "writes to S3"),
        (r"\bpg_background_(launch|submit)\s*\(", "runs a statement in a transaction of its own"),
        (r"\bpg_logical_emit_message\s*\(\s*false\b", "emits a message that no rollback takes back"),
        (r"\bsetval\s*\(", "sets a sequence, which no rollback takes back"),
        (
            r"\bpg_(terminate_backend|cancel_backend|reload_conf|rotate_logfile|switch_wal|create_restore_point|promote"
            r"|stat_reset\w*|(create|drop|copy)_\w*replication_slot|replication_slot_advance)\s*\(",
            "acts on the database server",
        ),
    )
)
_OUTLIVES = tuple(
    (re.compile(pattern, re.DOTALL), what)
    for pattern, what in (
        (r"^set\s+(?!(local|transaction|constraints)\b)", "changes a setting of the connection"),
        (r"^(reset|discard)\b", "changes a setting of the connection"),
        (r"\bupdate\s+(only\s+)?(pg_catalog\.)?pg_settings\b", "changes a setting of the connection"),
        (
            r"\bset_config\s*\((?!(?:[^()]|\([^()]*\))*,\s*true(?:\s*::\s*bool(?:ean)?)?\s*\))",
            "changes a setting of the connection",
        ),
        (r"\bpg_(try_)?advisory_lock(_shared)?\s*\(", "takes a lock of the connection"),
        (r"^prepare\s+(?!transaction\b)", "prepares a statement on the connection"),
        (r"^listen\b", "listens on the connection"),
        (r"^declare\b.*\bwith\s+hold\b", "opens a cursor of the connection"),
        (r"^create\s+(or\s+replace\s+)?(function|procedure|type)\s+pg_temp\.", "creates something temporary"),
        (
            r"^pragma\s+(\w+\.)?(?!(user_version|application_id|busy_timeout|defer_foreign_keys|optimize|wal_checkpoint"
            r"|incremental_vacuum|\w+_(x?info|list|check))\b)\w+\s*[=(]",
            "changes a setting of the connection",
        ),
    )
)
"""What the next transaction on the same connection finds, and no other worker."""
_TEMPORARY = re.compile(
    r"^create\s+(?:or\s+replace\s+)?(?:global\s+|local\s+)?(?:(?:temp|temporary)\s+(?:recursive\s+)?"
    r"(?:table|view|sequence|trigger)|(?:recursive\s+)?(?:table|view)"
    r"(?=\s+(?:if\s+not\s+exists\s+)?(?:pg_)?temp\.))\s+(?:if\s+not\s+exists\s+)?([\w.]+)|\binto\s+temp(?:orary)?\s+"
    r"(?:table\s+)?([\w.]+)"
)
_DROPPED = re.compile(r"^drop\s+(?:table|view|sequence|trigger)\s+(?:if\s+exists\s+)?([\w.]+)")
_LESS_DURABLE = re.compile(
    r"\bsynchronous_commit['\"]?\s*(?:=|to|,)\s*'?(?!on\b|true\b|yes\b|1\b|remote_apply\b|default\b)\w+",
    re.IGNORECASE,
)
_UNLOGGED = re.compile(
    r"^create\s+unlogged\s+table\b|^alter\s+table\b.*\bset\s+unlogged\b|^select\b.*\binto\s+unlogged\b",
    re.DOTALL,
)
OUTLIVES = (
    "it outlives the transaction on its connection: the pool gives it to another event of this worker, after a "
    "rollback, too, and no other worker has it. Use SET LOCAL, set_config(…, true), ON COMMIT DROP, "
    "session.advisory_lock, or a table of the database"
)
NOT_DURABLE = (
    "a crash of the database server can lose the commit when the message is acknowledged already: the event is lost, "
    "and so is the record that it was done. Leave synchronous_commit on"
)
EMPTIED = (
    "a crash of the database server empties an unlogged table, and leaves the records that its events are done: what "
    "they wrote is lost. Leave UNLOGGED out"
)
OWN_TABLES = (
    "the inbox decides by these records what has been done, and a changed one lets an event run again, or never. "
    "Leave them to onceward; its commands hold, release and purge them"
)
_REQUEST = re.compile(
    r"\bhttp\s*\(\s*(?:row\s*)?\(\s*(?!'(?:get|head)').*\bhttp_request\b", re.IGNORECASE | re.DOTALL
)
_DBLINK = re.compile(r"\bdblink\s*\(")
_TEXT = re.compile(r"'((?:[^']|'')*)'|\$(\w*)\$(.*?)\$\2\$", re.DOTALL)
_BLOCK = re.compile(r"\b(?:begin|then|else|loop)\b", re.IGNORECASE)
"""Words of PL/pgSQL before a statement."""
_ATTACH = re.compile(r"^attach\b.*\bas\s+(\w+)$", re.DOTALL)
_IN_MEMORY = re.compile(r"\battach\s+(database\s+)?'(:memory:)?'", re.IGNORECASE)
_TARGET = re.compile(
    r"\b(?:insert\s+into|update|delete\s+from|merge\s+into|truncate(?:\s+table)?|copy|replace\s+into)\s+(?:only\s+)?"
    r"([\w.]+)"
)
_CREATES = re.compile(r"^(?:create|drop|alter)\s+\w+\s+(?:if\s+(?:not\s+)?exists\s+)?([\w.]+)")

_PLACEHOLDER = re.compile(r"%%|%(?:\((\w+)\))?[sbt]")
MOST_OF_A_TEXT = 200

_in_session: ContextVar[bool] = ContextVar("onceward_in_session", default=False)
_attached: set[str] = set()
"""Names of databases that this process has attached to SQLite."""


class EscapeError(OSError):
    """Raised in place of a statement that would leave the verification's own database."""


class Escape(NamedTuple):
    what: str
    stopped: bool = True
    """Whether the statement is not run. SQLite files that a handler attaches are its own."""
    advice: str = ""
    """Replaces the usual advice."""
    until_dropped: str = ""
    """The name of a temporary table: nothing outlives the transaction if it is dropped in it."""


@contextmanager
def in_session() -> Iterator[None]:
    """Statements from here on are the handler's, through its session."""
    token = _in_session.set(True)
    try:
        yield
    finally:
        _in_session.reset(token)


def with_values(sql: str, values: Any) -> str:
    """A statement with the flags and texts that are bound to it, as far as they matter here: of several rows, the
    first."""
    if isinstance(values, list) and values and isinstance(values[0], Mapping | tuple):
        values = values[0]
    in_order = iter(values if isinstance(values, list | tuple) else ())

    def insert(found: re.Match[str]) -> str:
        if found[0] == "%%":
            return found[0]
        named = values.get(found[1]) if found[1] and isinstance(values, Mapping) else None
        value = named if found[1] else next(in_order, None)
        if isinstance(value, bool):
            return str(value).lower()
        text = value[:MOST_OF_A_TEXT].replace("'", "''") if isinstance(value, str) else None
        return found[0] if text is None else f"'{text}'"

    return _PLACEHOLDER.sub(insert, sql)


def escape_of(sql: str, foreign_tables: Callable[[], Collection[str]]) -> Escape | None:
    """What a statement of the handler does outside the session's transaction; None if it does nothing there."""
    if not _in_session.get():
        return None
    for body in _bodies(sql):
        if (escape := escape_of(body, foreign_tables)) is not None:
            return escape
    for statement in filter(None, (each.strip() for each in plain_words(sql).split(";"))):
        for pattern, what in _PATTERNS:
            if pattern.search(statement):
                return Escape(what)
        if _REQUEST.search(sql):
            return Escape(_HTTP)
        if _LESS_DURABLE.search(sql) and not statement.startswith("show"):
            return Escape("makes its commit less durable", False, NOT_DURABLE)
        if _UNLOGGED.search(statement):
            return Escape("makes a table that is not durable", False, EMPTIED)
        if (lasting := _lasting(statement)) is not None:
            return lasting
        if _DBLINK.search(statement) and not _queries(sql):
            return Escape(_ELSEWHERE)
        if (attaching := _ATTACH.match(statement)) and not _IN_MEMORY.search(sql):
            _attached.add(attaching[1])
        targets = (*_TARGET.findall(statement), *_CREATES.findall(statement))
        if own := [each for each in map(plain_name, targets) if each.startswith("onceward_")]:
            return Escape(f"writes to a table of onceward, {own[0]!r}", False, OWN_TABLES)
        target = _TARGET.search(statement) or _CREATES.match(statement)
        schema, _, table = target[1].rpartition(".") if target else ("", "", "")
        if schema in _attached:
            return Escape(
                f"writes to the attached database {schema!r}, which SQLite commits on its own", False
            )
        if table and table in foreign_tables():
            return Escape(f"writes to the foreign table {table!r}, which is in another database")
    return None


def _bodies(sql: str) -> list[str]:
    """The code of a DO block, as statements of their own."""
    if not plain_words(sql).strip().startswith("do "):
        return []
    texts = [(plain or dollars).replace("''", "'") for plain, _, dollars in _TEXT.findall(sql)]
    return [_BLOCK.sub(";", each) for each in texts]


def _lasting(statement: str) -> Escape | None:
    """What of a statement outlives its transaction on the connection."""
    for pattern, what in _OUTLIVES:
        if pattern.search(statement):
            return Escape(what, False, OUTLIVES)
    temporary = _TEMPORARY.search(statement)
    if temporary is None or re.search(r"\bon\s+commit\s+drop\b", statement):
        return None
    return Escape("creates something temporary", False, OUTLIVES, plain_name(temporary[1] or temporary[2]))


def dropped_by(sql: str) -> str | None:
    """The table that a statement of the handler drops."""
    found = _DROPPED.match(plain_words(sql).strip())
    return plain_name(found[1]) if found else None


def plain_name(name: str) -> str:
    return name.rpartition(".")[2]


def _queries(sql: str) -> bool:
    """Whether a text in a statement is a query that plainly reads, as in `dblink('…', 'SELECT …')`."""
    texts = [(plain or dollars).replace("''", "'").strip() for plain, _, dollars in _TEXT.findall(sql)]
    return any(
        each.lower().startswith(("select", "with", "values", "table")) and only_reads(each) for each in texts
    )
