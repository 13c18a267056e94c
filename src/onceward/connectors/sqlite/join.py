"""A named queue in transactions of the application, which has the same file open."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection

from onceward._time import boot_id, uptime
from onceward.connectors.identities import identity_of, pack
from onceward.connectors.leased_deliveries import Held
from onceward.connectors.sqlite import statements as sql
from onceward.transaction import Transaction


def is_joint(connection: Connection, path: Path) -> bool:
    """Whether this connection of the application is to this file."""
    if connection.dialect.name != "sqlite":
        return False
    file = connection.exec_driver_sql(sql.DATABASE_FILE).scalar()
    return bool(file) and path.is_file() and path.samefile(str(file))


def remove_in(connection: Connection, queue: str | None, held: Held, delivered: Transaction) -> bool:
    """Remove a delivery in the transaction of the application. Return whether its lease was still ours."""
    if _run(connection, queue, sql.REMOVE, *held).rowcount != 1:
        return False
    _run(connection, queue, sql.COUNT_DONE, 1)
    _run(connection, queue, sql.NOTE_DONE, pack([identity_of(delivered)]))
    return True


def append_in(
    connection: Connection, queue: str, bodies: Sequence[bytes], visible_at: float | None = None
) -> None:
    """Put messages on a named queue of this file, in the transaction that is open on the connection.

    They are there when it commits, and if it rolls back they never were. `encode_all` of `onceward.connectors.codec`
    makes bodies from transactions. `visible_at`, in seconds since 1970, is for messages that come later. The queue
    must exist already: a connector creates it when it is opened.
    """
    comes_at = 0.0 if visible_at is None else max(visible_at - time.time() + _now(connection, queue), 0.001)
    for body in bodies:
        _run(connection, queue, sql.APPEND_FOR, time.time(), body, comes_at)
    _run(connection, queue, sql.COUNT_APPENDED, len(bodies))


def _now(connection: Connection, queue: str) -> float:
    """The time by the clock of the queue; see `statements.CLOCK`."""
    known = _run(connection, queue, sql.READ_CLOCK).first()
    return uptime() + float(known[1]) if known is not None and known[0] == boot_id() else time.time()


def _run(connection: Connection, queue: str | None, statement: str, *values: Any) -> Any:
    return connection.exec_driver_sql(sql.named(statement, queue), values)
