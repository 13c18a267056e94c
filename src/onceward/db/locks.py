"""Locks that end with the session: on one row, or on a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from math import isfinite
from typing import Any, Final

from sqlalchemy import Table, literal_column, select
from sqlalchemy.exc import DBAPIError

from onceward.db.exceptions import LockTimeoutError
from onceward.db.statements import Row, fetch_one
from onceward.db.tables import AnyTable, row_is, table_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError

DEFAULT_TIMEOUT: Final = 10.0
"""Seconds to wait for a lock."""


def lock_row(
    transaction: DbTransaction, table: AnyTable, key: Mapping[str, Any], timeout: float
) -> Row | None:
    target = table_of(table, key)
    columns = list(target.c) if isinstance(target, Table) else [literal_column("*")]
    query = select(*columns).select_from(target).where(row_is(target, key)).with_for_update()
    with _waiting(transaction, timeout, f"{target.name} {dict(key)}"):
        return fetch_one(transaction, query, None)


def advisory_lock(transaction: DbTransaction, name: str | int, timeout: float) -> None:
    with _waiting(transaction, timeout, f"the advisory lock {name!r}"):
        transaction.backend.take_advisory_lock(transaction.connection, key_of(name))


@contextmanager
def _waiting(transaction: DbTransaction, timeout: float, what: str) -> Iterator[None]:
    if not (isfinite(timeout) and timeout >= 0):
        raise ConfigurationError(f"a timeout is a number of seconds from 0 on, not {timeout!r}")
    try:
        with transaction.backend.lock_timeout(transaction.connection, timeout):
            yield
    except DBAPIError as error:
        if not transaction.backend.is_lock_timeout(error):
            raise
        raise LockTimeoutError(f"{what} was locked by somebody else for longer than {timeout:g} s") from error


def key_of(name: str | int) -> int:
    """The 64 bits a lock is known by. Two names of one key would wait for each other, and nothing worse."""
    if isinstance(name, str):
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
    if not -(2**63) <= name < 2**63:
        raise ConfigurationError(f"an advisory lock is a name or a number of 64 bits, not {name}")
    return name
