"""Watch what a handler changes in the database, from inside its transaction."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import event

from onceward.db.transaction import DbTransaction

SMALL = 500
"""A table with at most this many rows is compared row by row."""
LONGEST = 200
"""Characters shown of a value."""

_WRITE = re.compile(
    r"""^(?:\s|--[^\n]*\n|/\*.*?\*/)*(?:with\b.*?\)\s*)?
        (insert|update|delete|replace|merge)\b(?:\s+or\s+\w+)?(?:\s+(?:into|from|only))*
        \s+((?:"[^"]+"|[\w$]+)(?:\.(?:"[^"]+"|[\w$]+))?)""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)


class TableWrites(msgspec.Struct, frozen=True):
    """All statements of one kind on one table."""

    table: str
    verb: str
    statements: int
    rows: int


class TableDiff(msgspec.Struct, frozen=True):
    """Added and removed rows of a small table. A changed row is in both."""

    table: str
    added: tuple[dict[str, Any], ...]
    removed: tuple[dict[str, Any], ...]


class RowWatch:
    """Call `begin`, the handler, and `end`, all in one transaction that the caller rolls back."""

    def __init__(self) -> None:
        self._statements: Counter[tuple[str, str]] = Counter()
        self._rows: Counter[tuple[str, str]] = Counter()
        self.diffs: list[TableDiff] = []

    def begin(self, transaction: DbTransaction) -> None:
        connection = transaction.connection
        connection.exec_driver_sql("SAVEPOINT onceward_dry_run")
        event.listen(connection, "after_cursor_execute", self._count)

    def end(self, transaction: DbTransaction) -> None:
        """Read the changed tables, roll back to `begin`, and read them again."""
        connection = transaction.connection
        event.remove(connection, "after_cursor_execute", self._count)
        tables = list(dict.fromkeys(table for table, _ in self._statements))
        after = {table: self._read(transaction, table) for table in tables}
        connection.exec_driver_sql("ROLLBACK TO SAVEPOINT onceward_dry_run")
        for table, new in after.items():
            old = self._read(transaction, table)
            if old is not None and new is not None:
                added, removed = _difference(new, old), _difference(old, new)
                self.diffs.append(TableDiff(table, added, removed))

    def changes(self) -> tuple[TableWrites, ...]:
        return tuple(
            TableWrites(table, verb, number, self._rows[table, verb])
            for (table, verb), number in self._statements.items()
        )

    def _count(
        self, connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: bool
    ) -> None:
        found = _WRITE.match(statement)
        if found is None:
            return
        written = (found[2], found[1].lower())
        self._statements[written] += 1
        self._rows[written] += max(cursor.rowcount, 0)

    def _read(self, transaction: DbTransaction, table: str) -> list[dict[str, Any]] | None:
        """Return all rows as text, or None for a table that is not small."""
        result = transaction.connection.exec_driver_sql(f"SELECT * FROM {table} LIMIT {SMALL + 1}")
        rows = [{name: _show(value) for name, value in row.items()} for row in result.mappings()]
        return rows if len(rows) <= SMALL else None


def _difference(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the rows that `others` lacks, or has fewer of."""
    left = Counter(repr(row) for row in others)
    missing = []
    for row in rows:
        if left[repr(row)]:
            left[repr(row)] -= 1
        else:
            missing.append(row)
    return tuple(missing)


def _show(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value.hex() if isinstance(value, bytes | memoryview) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
