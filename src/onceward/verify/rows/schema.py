"""The consumer's tables: their columns, which of them the database fills, and what they refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, inspect

from onceward.verify.rows.defaults import Filled, filled_by

PREFIX = "onceward_"
_SYSTEM = ("information_schema", "pg_catalog", "pg_toast")
MOST_NUMBERS = 10_000
"""Rows of a table from the setup that are known by their numbers."""


class Reference(msgspec.Struct, frozen=True):
    """A column that refers to a generated one."""

    column: str
    place: tuple[str, str]
    """The schema and name of the other table."""
    referred: str


class Table(msgspec.Struct, frozen=True):
    name: str
    """With its schema, unless that is the default one."""
    place: tuple[str, str]
    """Its schema and its name in that."""
    quoted: str
    columns: tuple[str, ...]
    generated: tuple[str, ...]
    """Columns that the database fills: times, serial numbers, and references to them."""
    has_rows: bool
    references: tuple[Reference, ...] = ()
    """The numbers differ from run to run. Whose they are must not, unless another event may take them."""
    doubtful: tuple[str, ...] = ()
    """Columns that the database may have filled, and references to them."""
    numbers: Mapping[str, frozenset[Any]] = {}
    """Of the rows that the setup has made, by column."""

    def name_of(self, reference: Reference) -> str:
        """Its rows together with those that they refer to, as a table."""
        return f"{self.name}.{reference.column} → {reference.place[1]}"

    def name_by(self, column: str) -> str:
        """The rows that the setup has made, with their numbers, as a table."""
        return f"{self.name} by {column}"


def describe(engine: Engine) -> list[Table]:
    """The consumer's tables."""
    with engine.connect() as connection:
        return [_with_numbers(connection, each) for each in discover(connection)]


def discover(connection: Connection, known: Sequence[Table] = ()) -> list[Table]:
    """The consumer's tables that are not among the known ones: all of them, or those that a handler created."""
    here = places(connection)
    new = set(here).difference(table.place for table in known)
    if not new:
        return []
    inspector = inspect(connection)
    filled = {place: _filled(inspector, connection, *place) for place in here}
    generated = {
        place: {name for name, how in each.items() if how is not Filled.DOUBTFUL}
        for place, each in filled.items()
    }
    either = {place: set(each) for place, each in filled.items()}
    _follow_references(inspector, generated)
    _follow_references(inspector, either)
    return [
        _table(
            connection,
            inspector,
            *place,
            generated[place],
            either[place],
            _references(inspector, place, either),
        )
        for place in sorted(new)
    ]


def places(connection: Connection) -> list[tuple[str, str]]:
    """The schemas and names of the consumer's tables."""
    inspector = inspect(connection)
    inner = _inner_tables(connection)
    return [
        (schema, name)
        for schema in inspector.get_schema_names()
        if schema not in _SYSTEM and not schema.startswith("pg_")
        for name in inspector.get_table_names(schema)
        if not name.startswith((PREFIX, "sqlite_")) and (schema, name) not in inner
    ]


def _inner_tables(connection: Connection) -> set[tuple[str, str]]:
    """Tables in which SQLite keeps a virtual one, such as an index of texts: how is its own affair."""
    if connection.dialect.name != "sqlite":
        return set()
    rows = connection.exec_driver_sql("PRAGMA table_list")
    return {(row.schema, row.name) for row in rows if row.type == "shadow"}


def _table(
    connection: Connection,
    inspector: Any,
    schema: str,
    name: str,
    generated: set[str],
    either: set[str],
    references: list[Reference],
) -> Table:
    quote = connection.dialect.identifier_preparer.quote
    quoted = f"{quote(schema)}.{quote(name)}"
    columns = tuple(column["name"] for column in inspector.get_columns(name, schema))
    has_rows = connection.exec_driver_sql(f"SELECT 1 FROM {quoted} LIMIT 1").first() is not None
    full_name = name if schema in (inspector.default_schema_name, "main") else f"{schema}.{name}"
    return Table(
        full_name,
        (schema, name),
        quoted,
        columns,
        tuple(sorted(generated)),
        has_rows,
        tuple(references),
        tuple(sorted(either - generated)),
    )


def _with_numbers(connection: Connection, table: Table) -> Table:
    """The table with the numbers of its rows, which the setup has made."""
    quote = connection.dialect.identifier_preparer.quote
    referring = {each.column for each in table.references}
    numbers = {}
    for column in table.generated if table.has_rows else ():
        rows = connection.exec_driver_sql(
            f"SELECT {quote(column)} FROM {table.quoted} LIMIT {MOST_NUMBERS + 1}"
        )
        found = frozenset(value for (value,) in rows)
        if (
            column not in referring
            and len(found) <= MOST_NUMBERS
            and all(isinstance(each, int) for each in found)
        ):
            numbers[column] = found
    return msgspec.structs.replace(table, numbers=numbers)


def _references(
    inspector: Any, place: tuple[str, str], found: Mapping[tuple[str, str], set[str]]
) -> list[Reference]:
    schema, name = place
    return [
        Reference(each["constrained_columns"][0], other, each["referred_columns"][0])
        for each in inspector.get_foreign_keys(name, schema)
        for other in [(each["referred_schema"] or schema, each["referred_table"])]
        if len(each["referred_columns"]) == 1 and each["referred_columns"][0] in found.get(other, ())
    ]


def _filled(inspector: Any, connection: Connection, schema: str, name: str) -> dict[str, Filled]:
    key = inspector.get_pk_constraint(name, schema)["constrained_columns"]
    found = {}
    for column in inspector.get_columns(name, schema):
        counts = bool(column.get("identity")) or (
            # SQLite fills in such a key if the statement does not.
            connection.dialect.name == "sqlite"
            and key == [column["name"]]
            and str(column["type"]) == "INTEGER"
        )
        how = filled_by(column.get("default"), counts=counts)
        if how is not None:
            found[column["name"]] = how
    return found


def _follow_references(inspector: Any, found: dict[tuple[str, str], set[str]]) -> None:
    """Add the columns that refer to generated ones."""
    changed = True
    while changed:
        changed = False
        for (schema, name), generated in found.items():
            for reference in inspector.get_foreign_keys(name, schema):
                other = found.get(
                    (reference["referred_schema"] or schema, reference["referred_table"]), set()
                )
                pairs = zip(reference["constrained_columns"], reference["referred_columns"], strict=False)
                new = {own for own, referred in pairs if referred in other} - generated
                generated.update(new)
                changed |= bool(new)


def compared_columns(table: Table, exclude: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a table that are compared."""
    left_out = table.generated if exclude is None else exclude
    return tuple(
        column
        for column in table.columns
        if column not in left_out and f"{table.name}.{column}" not in left_out
    )


def leave_out(table: Table, columns: Iterable[str]) -> Table:
    """The table, with these columns among those that the database generates."""
    generated = tuple(sorted({*table.generated, *columns}))
    doubtful = tuple(each for each in table.doubtful if each not in generated)
    return msgspec.structs.replace(table, generated=generated, doubtful=doubtful)
