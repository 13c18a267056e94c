"""Running SQL in a session's transaction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import CursorResult, Executable, TextClause, text

from onceward.db.exceptions import RowError, SessionError
from onceward.db.transaction import DbTransaction

Sql = str | Executable
"""SQL with `:name` parameters, or a SQLAlchemy construct."""
Params = Mapping[str, Any]
Row = dict[str, Any]

_ENDS_TRANSACTION = re.compile(
    r"""(\s | --[^\n]*\n | /\*.*?\*/)*
        (begin | start\s+transaction | commit | end | abort | rollback(?!(\s+(work|transaction))?\s+to\b))\b""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


def execute(transaction: DbTransaction, sql: Sql, params: Params | Sequence[Params] | None) -> int:
    if params is not None and not params and not isinstance(params, Mapping):
        return 0  # nothing to do for nobody; SQLAlchemy would run it once, without parameters
    with _result(transaction, sql, params) as result:
        return int(result.rowcount)


def execute_scalar(transaction: DbTransaction, sql: Sql, params: Params | None) -> Any:
    with _result(transaction, sql, params) as result:
        return result.scalar()


def fetch_one(transaction: DbTransaction, sql: Sql, params: Params | None) -> Row | None:
    with _result(transaction, sql, params) as result:
        rows = _rows(result, at_most=2)
    if len(rows) > 1:
        raise RowError("the query gave more than one row; narrow it down, or use fetch_all")
    return rows[0] if rows else None


def fetch_all(transaction: DbTransaction, sql: Sql, params: Params | None) -> list[Row]:
    with _result(transaction, sql, params) as result:
        return _rows(result)


def _result(
    transaction: DbTransaction, sql: Sql, params: Params | Sequence[Params] | None
) -> CursorResult[Any]:
    statement = _text(sql) if isinstance(sql, str) else sql
    if isinstance(statement, TextClause) and _ends_transaction(statement.text):
        raise SessionError(
            "a session begins and ends its transaction itself: leave the block to commit, raise to roll back"
        )
    return transaction.connection.execute(statement, params, execution_options={"preserve_rowcount": True})


@lru_cache(500)
def _text(sql: str) -> TextClause:
    return text(sql)


@lru_cache(500)
def _ends_transaction(sql: str) -> bool:
    return _ENDS_TRANSACTION.match(sql) is not None


def _rows(result: CursorResult[Any], at_most: int | None = None) -> list[Row]:
    names = list(result.keys())
    if len(set(names)) < len(names):
        raise RowError(f"two columns have the same name in {', '.join(names)}; give one an alias with AS")
    rows = result.fetchall() if at_most is None else result.fetchmany(at_most)
    return [dict(zip(names, row, strict=True)) for row in rows]
