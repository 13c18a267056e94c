"""Tables and columns as SQLAlchemy constructs, so that every name is quoted where it has to be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ClauseElement, ColumnElement, Table, TableClause, and_, bindparam, column, table

from onceward.errors import ConfigurationError

AnyTable = str | TableClause | type[Any]
"""A name, a `Table` or `sqlalchemy.table(…)`, or a mapped class."""


def table_of(given: AnyTable, columns: Iterable[str]) -> TableClause:
    """The table, with at least these columns."""
    found = getattr(given, "__table__", given)
    if isinstance(found, str):
        found = table(found)
    if not isinstance(found, TableClause):
        raise ConfigurationError(f"a table is a name, a Table or a mapped class, not {given!r}")
    missing = [name for name in columns if name not in found.c]
    if not missing:
        return found
    if isinstance(found, Table):
        raise ConfigurationError(f"table {found.name} has no column {', '.join(missing)}")
    return table(
        found.name, *(column(c.name, c.type) for c in found.c), *map(column, missing), schema=found.schema
    )


def row_is(target: TableClause, key: Mapping[str, Any]) -> ColumnElement[bool]:
    """The condition that names one row."""
    if not key:
        raise ConfigurationError(f"a row of {target.name} is named by its key columns; none were given")
    prefix = "key"
    while any(column.key.startswith(prefix) for column in target.c):
        prefix += "_"
    return and_(*(_equals(target.c[name], key[name], f"{prefix}{n}") for n, name in enumerate(key)))


def _equals(left: ColumnElement[Any], right: Any, parameter: str) -> ColumnElement[bool]:
    # SQLAlchemy would name the parameter `id_1`, and in an UPDATE that is the name of the value for a column `id_1`.
    if right is None or isinstance(right, ClauseElement):
        return left == right
    return left == bindparam(parameter, right, left.type)
