"""Update a row only if nobody else has: optimistic concurrency by a version column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import update

from onceward.db.exceptions import OptimisticConflict, RetryRefusedError, RowError
from onceward.db.tables import AnyTable, row_is, table_of
from onceward.db.transaction import DbTransaction
from onceward.errors import ConfigurationError


def occ_update(
    transaction: DbTransaction,
    table: AnyTable,
    key: Mapping[str, Any],
    values: Mapping[str, Any],
    expected: int,
    version_column: str,
) -> int:
    if transaction.had_conflict:
        raise RetryRefusedError(
            "an optimistic update has met a conflict in this session, and a retry inside it would be judged by what "
            "was read before; end this session, open a new session and read again"
        )
    if not key or version_column in key or version_column in values:
        raise ConfigurationError(
            f"occ_update needs the key of one row, and {version_column} in neither key nor values"
        )
    target = table_of(table, [*key, *values, version_column])
    found = transaction.connection.execute(
        update(target)
        .where(row_is(target, {**key, version_column: expected}))
        .values({**values, version_column: expected + 1})
    ).rowcount
    if found == 1:
        return expected + 1
    if found == 0:
        transaction.had_conflict = True
        raise OptimisticConflict(target.name, key, expected)
    error = RowError(f"{dict(key)} names {found} rows of {target.name}; give the columns of a unique key")
    transaction.lose(error)  # they are all changed
    raise error
