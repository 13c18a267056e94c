"""`sqlite:///orders.db`: a queue in a file."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from onceward._time import boot_id, uptime
from onceward.connectors.file_place import doubt_place
from onceward.connectors.identities import seen, seen_in, unpack
from onceward.connectors.reports import (
    Durability,
    Forgotten,
    Messages,
    Seen,
    ServerUnreachable,
    SourceBacklog,
    SourceCounts,
    SourceFacts,
    Survives,
    explain_unlisted,
)
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme, Setting
from onceward.connectors.sqlite import statements as sql
from onceward.connectors.sqlite.connector import AsyncSqliteConnector, SqliteConnector
from onceward.connectors.sqlite.database import Synchronous
from onceward.errors import ConfigurationError

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from onceward.connectors.urls import Address

USE_FULL = "remove synchronous from the source's URL: FULL is the default"
SAFE = Durability(
    Survives.MACHINE_CRASH,
    "the queue's file is written through to the disk with every call; kill -9 and a power cut lose nothing",
)
DURABILITY = {
    "OFF": Durability(
        Survives.PROCESS_CRASH,
        "the queue runs with synchronous=OFF: a power cut may lose messages, and break the file",
        USE_FULL,
    ),
    "NORMAL": Durability(
        Survives.PROCESS_CRASH,
        "the queue runs with synchronous=NORMAL: a power cut may undo the last calls; messages sent by them are lost, "
        "messages acknowledged by them are delivered again",
        USE_FULL,
    ),
    "FULL": SAFE,
    "EXTRA": SAFE,
}


def file_of(address: Address) -> str:
    """Return the path of the queue file."""
    return address.path.removeprefix("/")


def check(address: Address) -> None:
    if address.netloc or file_of(address) in ("", ":memory:") or file_of(address).endswith("/"):
        address.refuse("it names no file; write sqlite:///orders.db, or sqlite:////var/lib/orders.db")
    queue = address.settings.get("queue")
    if queue is not None and re.fullmatch(r"[a-z][a-z0-9_]{0,39}", queue) is None:
        address.refuse(
            f"queue must be a name of up to 40 lower-case letters, digits and _, as in queue=orders, not {queue!r}"
        )
    mode, modes = address.settings.get("synchronous", "FULL"), get_args(Synchronous)
    if mode not in modes:
        address.refuse(f"synchronous must be one of {', '.join(modes)}, not {mode!r}")


def identity_of(address: Address) -> str | None:
    queue = address.settings.get("queue")
    return None if queue is None else f"sqlite://{address.place}?queue={queue}"


def joins(address: Address, connection: Connection) -> bool:
    from onceward.connectors.sqlite.join import is_joint

    return is_joint(connection, Path(file_of(address)).absolute())


def open_queue(address: Address, *, asynchronous: bool) -> Any:
    kind: Any = AsyncSqliteConnector if asynchronous else SqliteConnector
    return kind(file_of(address), **address.settings)


def facts(address: Address) -> SourceFacts:
    mode = DURABILITY[address.settings.get("synchronous", "FULL")]
    return SourceFacts(durability=doubt_place("the queue", Path(file_of(address))) or mode, redelivers=True)


def counts(address: Address) -> SourceCounts:
    path = Path(file_of(address)).absolute()
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory, not a queue; check the source {str(address)!r}")
    if not path.is_file():
        return _count_nothing(
            f"nothing has been sent yet: there is no file {path.name}",
            f"there is no file {path}; check the source {str(address)!r} (three slashes: a path relative to "
            "this directory, four: an absolute path)",
        )
    with _connect(path) as connection:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("BEGIN")  # so all numbers are of one moment
        connection.queue = address.settings.get("queue")
        version = _version(connection, path, address)
        if version is None:
            missing = f"there is no queue {connection.queue!r} in {path}; check the source {str(address)!r}"
            return _count_nothing("nothing has been sent yet: the queue does not exist", missing)
        if version < sql.TALLIED_SINCE:
            pending, dead = connection.execute(sql.HELD).fetchone()
            why = {
                "appended": "an older onceward did not count; counting starts when the file is next opened"
            }
            return SourceCounts(pending=pending, dead=dead, notes=why)
        connection.row_factory = sqlite3.Row
        found = connection.execute(sql.BALANCE).fetchone()
        connection.row_factory = None
        if found is None:
            pending, dead = connection.execute(sql.HELD).fetchone()
            why = {"appended": "its count was removed from the queue's file"}
            return SourceCounts(pending=pending, dead=dead, notes=why)
        tallies = dict(found)
        if version < sql.LISTED_SINCE:
            ended = Forgotten(undated=tallies["done"] + tallies["moved"])
            return SourceCounts(**tallies, messages=Messages([], [], _held(connection), ended))
        listed = _list(connection)
        unlisted = tallies["done"] + tallies["moved"] - len(listed.done) - len(listed.moved)
        why_unknown = explain_unlisted(unlisted - listed.forgotten.total, "the queue's file")
        return SourceCounts(**tallies, messages=listed, unknown=why_unknown)


def backlog(address: Address) -> SourceBacklog:
    path = Path(file_of(address)).absolute()
    if not path.is_file():
        return _EMPTY
    with _connect(path) as connection:
        connection.execute("PRAGMA query_only = ON")
        connection.queue = address.settings.get("queue")
        version = _version(connection, path, address)
        if version is None:
            return _EMPTY
        clock = connection.execute(sql.READ_CLOCK).fetchone() if version >= sql.CLOCK_SINCE else None
        is_current = clock is not None and clock[0] == boot_id() != ""
        now = uptime() + clock[1] if clock is not None and is_current else time.time()
        waiting, in_flight, delayed, dead = connection.execute(sql.COUNTS, {"now": now}).fetchone()
        oldest = connection.execute(sql.OLDEST).fetchone()
    age = 0.0 if oldest is None else max(time.time() - oldest[0], 0.0)
    return SourceBacklog(waiting=waiting, in_flight=in_flight, delayed=delayed, dead=dead, oldest_age=age)


_EMPTY = SourceBacklog(waiting=0, in_flight=0, delayed=0, dead=0, oldest_age=0.0)


def _count_nothing(note: str, missing: str) -> SourceCounts:
    return SourceCounts(
        appended=0,
        done=0,
        pending=0,
        dead=0,
        moved=0,
        messages=Messages([], [], []),
        notes={"appended": note},
        missing=missing,
    )


class QueueConnection(sqlite3.Connection):
    """Executes the statements of `statements` for one queue."""

    queue: str | None = None

    def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:
        return super().execute(sql.named(statement, self.queue), values)


def _version(connection: QueueConnection, path: Path, address: Address) -> int | None:
    """Of its tables; None if there is no queue of this name."""
    if connection.queue is None:
        if connection.execute(sql.READ_APPLICATION_ID).fetchone()[0] != sql.APPLICATION_ID:
            raise ConfigurationError(f"{path} is not a queue of onceward; check the source {str(address)!r}")
        return int(connection.execute(sql.READ_USER_VERSION).fetchone()[0])
    if not connection.execute(sql.READ_HAS_QUEUES).fetchone()[0]:
        return None
    found = connection.execute(sql.READ_QUEUE_VERSION, (connection.queue,)).fetchone()
    return None if found is None else int(found[0])


def _list(connection: sqlite3.Connection) -> Messages:
    done: list[Seen] = []
    moved: list[Seen] = []
    for packed, at, digest in connection.execute(sql.ALL_ENDED):
        like = done if digest is None else moved
        like += [seen(*identity, at, digest or b"") for identity in unpack(packed)]
    numbers = {(first, last): rest for first, last, *rest in connection.execute(sql.ALL_FORGOTTEN)}
    undated, _ = numbers.pop((sql.UNDATED, sql.UNDATED), (0, 0))
    forgotten = Forgotten(
        {days: ids for days, (ids, _) in numbers.items()},
        undated,
        sum(copies for _, copies in numbers.values()),
    )
    return Messages(done, moved, _held(connection), forgotten)


def _held(connection: sqlite3.Connection) -> list[Seen]:
    return [seen_in(body, at) for body, at in connection.execute(sql.ALL_HELD)]


@contextmanager
def _connect(path: Path) -> Iterator[QueueConnection]:
    try:
        opened = sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=10.0, factory=QueueConnection)
        with closing(opened) as connection:
            yield connection
    except sqlite3.Error as error:
        raise ServerUnreachable(f"the queue {path} cannot be read: {error}") from None


SCHEME = Scheme(
    names=("sqlite",),
    keeps_order=True,
    settings={**LEASE_SETTINGS, "queue": Setting(), "synchronous": Setting(str.upper)},
    check=check,
    identity=identity_of,
    open=open_queue,
    waits=True,
    facts=facts,
    counts=counts,
    backlog=backlog,
    joins=joins,
)
