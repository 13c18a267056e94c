"""Insert a row unless it is there: the atomic form of *check, then insert*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, TableClause, insert, literal, select
from sqlalchemy.exc import IntegrityError

from onceward.db.tables import AnyTable, row_is, table_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError


def insert_idempotent(
    transaction: DbTransaction, table: AnyTable, values: Mapping[str, Any], key: Sequence[str] | None
) -> bool:
    target = table_of(table, values)
    named = _named(values, key)
    connection = transaction.connection
    try:
        with connection.begin_nested():  # PostgreSQL would give up the whole transaction otherwise
            connection.execute(insert(target).values(dict(values))).close()
    except IntegrityError as error:
        if not transaction.backend.is_duplicate(error):
            raise
        if named and not _is_there(connection, target, named):
            raise
        return False
    return True


def _is_there(connection: Connection, target: TableClause, key: Mapping[str, Any]) -> bool:
    # SQLite tells only in its text which constraint was violated, so ask which row it was.
    if any(value is None for value in key.values()):
        return False  # NULL is unlike every other NULL to a constraint
    found = connection.execute(select(literal(1)).select_from(target).where(row_is(target, key)).limit(1))
    return found.first() is not None


def _named(values: Mapping[str, Any], key: Sequence[str] | None) -> dict[str, Any]:
    if key is None:
        return {}
    names = [key] if isinstance(key, str) else list(key)
    missing = [name for name in names if name not in values]
    if missing or not names:
        raise ConfigurationError(
            f"key columns are columns of the row; {missing or 'none'} is not among {list(values)}"
        )
    return {name: values[name] for name in names}
