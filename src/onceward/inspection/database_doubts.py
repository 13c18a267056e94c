"""What weakens the database of an inbox: where its file is, what its URL says, how its server is set up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from onceward.connectors.file_place import doubt_place
from onceward.inspection.guarantees import Strength, WeakLink

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

NOT_DURABLE = "database not durable"
UNSAFE = "database not safe"
NO_WRITES = "database cannot be written"
_RECORDS_EVENTS = re.compile(r"onceward_dedup|(?!onceward_)")
_RECORDED = {
    "onceward_effects": "which effects it has called",
    "onceward_outbox": "the messages that wait to be sent",
    "onceward_dead_letters": "the dead letters",
}
ORDINARY = (None, "unix", "win32")
"""Virtual file systems of SQLite that lock and write as it expects."""


def sqlite_file(url: URL) -> Path | None:
    """The file of a SQLite database; None if it is in memory."""
    name, options = _uri(url)
    if name in ("", ":memory:") or options.get("mode") == "memory" or options.get("vfs") == "memdb":
        return None
    return Path(name)


def _uri(url: URL) -> tuple[str, dict[str, str]]:
    """Its path, and the settings that SQLite itself reads."""
    name = url.database or ""
    if not (name.startswith("file:") and url.query.get("uri")):
        return name, {}
    name, _, query = name.removeprefix("file:").partition("?")
    given = {key: str(value) for key, value in url.query.items()}
    return unquote(name.removeprefix("//")), {**dict(parse_qsl(query)), **given}


def doubt_sqlite(url: URL) -> Iterator[WeakLink]:
    path, (_, options) = sqlite_file(url), _uri(url)
    if path is None:
        return
    if doubt := doubt_place("the database", path):
        strength = Strength.UNKNOWN if doubt.survives is None else Strength.MAY_LOSE
        yield WeakLink(strength, doubt.why, doubt.advice, doubt.label and f"database {doubt.label}")
    if _is_on(options.get("nolock")):
        yield WeakLink(
            Strength.MAY_LOSE,
            "the database is opened with nolock=1: two connections may write at the same time, and break the file",
            "remove nolock from its URL",
            UNSAFE,
        )
    if options.get("mode") == "ro" or _is_on(options.get("immutable")):
        yield WeakLink(
            Strength.UNKNOWN,
            "the database is opened only for reading: no event can be done",
            "remove mode=ro and immutable from its URL",
            NO_WRITES,
        )
    if (vfs := options.get("vfs")) not in ORDINARY:
        yield WeakLink(
            Strength.UNKNOWN,
            f"the database is opened with vfs={vfs}: whether it locks and writes as SQLite expects is unknown",
            "remove vfs from its URL",
        )


def doubt_postgresql(connection: Connection) -> Iterator[WeakLink]:
    def ask(query: str) -> str:
        return str(connection.exec_driver_sql(query).scalar_one())

    if ask("SHOW full_page_writes") == "off":
        yield WeakLink(
            Strength.MAY_LOSE,
            "PostgreSQL runs with full_page_writes=off: a power cut may break pages of the database",
            "set full_page_writes = on in postgresql.conf",
            NOT_DURABLE,
        )
    unlogged = list(connection.exec_driver_sql(_UNLOGGED).scalars())
    if unlogged:
        yield WeakLink(
            Strength.MAY_LOSE,
            f"unlogged tables: {_few(unlogged)}; PostgreSQL empties them after a crash, and forgets "
            f"{_recorded_in(unlogged)}",
            f"ALTER TABLE {unlogged[0]} SET LOGGED",
            NOT_DURABLE,
        )
    own = list(connection.exec_driver_sql(_OF_THE_USER).scalars())
    if own:
        yield WeakLink(
            Strength.HOLDS,
            f"your unlogged tables: {_few(own)}; PostgreSQL empties them "
            "after a crash: what a handler has written there is lost, and its event is done",
            f"ALTER TABLE {own[0]} SET LOGGED, unless no handler writes to it, or what it writes may be lost",
            "not in unlogged tables",
        )
    if ask("SHOW synchronous_commit") == "local" and ask("SHOW synchronous_standby_names"):
        yield WeakLink(
            Strength.MAY_LOSE,
            "PostgreSQL has a synchronous standby, and commits with synchronous_commit=local: it does not wait for the "
            "standby, and a failover may undo the last effects after their messages were acknowledged",
            "set synchronous_commit = on for this database",
            NOT_DURABLE,
        )
    if ask("SHOW transaction_read_only") == "on":
        yield WeakLink(
            Strength.UNKNOWN,
            "PostgreSQL refuses to write: this is a replica, or default_transaction_read_only is on; no event can be "
            "done",
            "name the primary server in the URL, and set default_transaction_read_only = off for this role",
            NO_WRITES,
        )


def _is_on(value: str | None) -> bool:
    return value is not None and value.lower() in ("1", "true", "yes", "on")


def _recorded_in(names: list[str]) -> str:
    """What these tables record. A partition may have any name."""
    plain = [name.rpartition(".")[2].strip('"') for name in names]
    found = ["which events are done"] if any(_RECORDS_EVENTS.match(name) for name in plain) else []
    found += [what for table, what in _RECORDED.items() if table in plain]
    if any(name not in _RECORDED and not _RECORDS_EVENTS.match(name) for name in plain):
        found.append("what else they record" if found else "what they record")
    return " and ".join(found)


def _few(names: list[str]) -> str:
    return ", ".join([*names[:3], "…"] if len(names) > 3 else names)


_UNLOGGED = r"""
    SELECT CAST(CAST(c.oid AS regclass) AS text) FROM pg_class c
    WHERE c.relpersistence = 'u' AND c.relkind IN ('r', 'p') AND (
        (c.relname LIKE 'onceward\_%%' AND pg_table_is_visible(c.oid))
        OR c.oid IN (
            SELECT i.inhrelid FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
            WHERE p.relname LIKE 'onceward\_%%' AND pg_table_is_visible(p.oid)))
    ORDER BY 1
"""
_OF_THE_USER = r"""
    SELECT CAST(CAST(c.oid AS regclass) AS text) FROM pg_class c
    WHERE c.relpersistence = 'u' AND c.relkind = 'r' AND c.relname NOT LIKE 'onceward\_%%' AND NOT EXISTS (
        SELECT 1 FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
        WHERE i.inhrelid = c.oid AND p.relname LIKE 'onceward\_%%')
    ORDER BY 1
"""
