"""Compares the rows of all the consumer's tables, as multisets, without the columns that the database generates."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, Engine, inspect

from onceward._text import quantity
from onceward.verify import messages
from onceward.verify.messages import MESSAGES

PREFIX = "onceward_"
OWN = (
    "onceward_dedup",
    "onceward_attempts",
    "onceward_effects",
    "onceward_sequences",
    "onceward_parked",
    "onceward_horizons",
    "onceward_outbox",
    "onceward_outbox_tally",
)
"""Inbox tables that a run fills."""
EFFECTS = "effects (onceward_effects)"
_GENERATES = re.compile(
    r"now\s*\(|current_|nextval|random|uuid|clock_timestamp|strftime|datetime\s*\(|julianday", re.IGNORECASE
)
_SYSTEM = ("information_schema", "pg_catalog", "pg_toast")
NOT_A_NUMBER = "NaN"
"""Stands for a number that does not equal itself."""
MOST_ROWS = 5
"""Rows of each kind that a message shows."""

Row = tuple[Any, ...]
Rows = dict[str, Counter[Row]]
"""By table."""
NO_ROWS: Counter[Row] = Counter()


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

    def name_of(self, reference: Reference) -> str:
        """Its rows together with those that they refer to, as a table."""
        return f"{self.name}.{reference.column} → {reference.place[1]}"


# ── tables and columns ──────────────────────────────────────────────────────────────────────────────────


def describe(engine: Engine) -> list[Table]:
    """The consumer's tables."""
    with engine.connect() as connection:
        return discover(connection)


def discover(connection: Connection, known: Sequence[Table] = ()) -> list[Table]:
    """The consumer's tables that are not among the known ones: all of them, or those that a handler created."""
    here = places(connection)
    new = set(here).difference(table.place for table in known)
    if not new:
        return []
    inspector = inspect(connection)
    found = {place: _generated(inspector, connection, *place) for place in here}
    _follow_references(inspector, found)
    return [
        _table(connection, inspector, *place, found[place], _references(inspector, place, found))
        for place in sorted(new)
    ]


def places(connection: Connection) -> list[tuple[str, str]]:
    """The schemas and names of the consumer's tables."""
    inspector = inspect(connection)
    return [
        (schema, name)
        for schema in inspector.get_schema_names()
        if schema not in _SYSTEM and not schema.startswith("pg_")
        for name in inspector.get_table_names(schema)
        if not name.startswith(PREFIX) and not name.startswith("sqlite_")
    ]


def _table(
    connection: Connection,
    inspector: Any,
    schema: str,
    name: str,
    generated: set[str],
    references: list[Reference],
) -> Table:
    quote = connection.dialect.identifier_preparer.quote
    quoted = f"{quote(schema)}.{quote(name)}"
    columns = tuple(column["name"] for column in inspector.get_columns(name, schema))
    has_rows = connection.exec_driver_sql(f"SELECT 1 FROM {quoted} LIMIT 1").first() is not None
    full_name = name if schema in (inspector.default_schema_name, "main") else f"{schema}.{name}"
    return Table(
        full_name, (schema, name), quoted, columns, tuple(sorted(generated)), has_rows, tuple(references)
    )


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


def _generated(inspector: Any, connection: Connection, schema: str, name: str) -> set[str]:
    key = inspector.get_pk_constraint(name, schema)["constrained_columns"]
    found = set()
    for column in inspector.get_columns(name, schema):
        serial = column.get("identity") or (
            # SQLite fills in such a key if the statement does not.
            connection.dialect.name == "sqlite"
            and key == [column["name"]]
            and str(column["type"]) == "INTEGER"
        )
        if serial or _GENERATES.search(str(column.get("default") or "")):
            found.add(column["name"])
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


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────


def compared_columns(table: Table, exclude: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a table that are compared."""
    left_out = table.generated if exclude is None else exclude
    return tuple(
        column
        for column in table.columns
        if column not in left_out and f"{table.name}.{column}" not in left_out
    )


def read(connection: Connection, tables: Sequence[Table], exclude: Sequence[str] | None) -> Rows:
    quote = connection.dialect.identifier_preparer.quote
    effects = connection.exec_driver_sql(
        "SELECT tracking_id, name, state, effect_key FROM onceward_effects"
    ).fetchall()
    # A key contains the number of a claim, which changes after a fault. Compare whose key it is instead.
    keys = {key: f"<key of {name!r} of {tracking_id}>" for tracking_id, name, _, key in effects}
    found: Rows = {}
    here = set(places(connection))
    for table in tables:
        if table.place not in here:  # a handler creates it, and has not yet
            found[table.name] = Counter()
            continue
        columns = compared_columns(table, exclude)
        names = ", ".join(map(quote, columns)) or "1"
        rows = connection.exec_driver_sql(f"SELECT {names} FROM {table.quoted}")
        found[table.name] = Counter(tuple(_plain(value, keys) for value in row) for row in rows)
        for reference in table.references if exclude is None else ():
            other = next((each for each in tables if each.place == reference.place), None)
            if other is not None:
                rows = connection.exec_driver_sql(_joined(table, reference, other, quote))
                found[table.name_of(reference)] = Counter(
                    tuple(_plain(value, keys) for value in row) for row in rows
                )
    found[EFFECTS] = Counter(tuple(row[:3]) for row in effects)
    fields = messages.compared(exclude)
    found[MESSAGES] = Counter(
        tuple(_plain(getattr(each, name), keys) for name in fields) for each in messages.read(connection)
    )
    return found


def _joined(table: Table, reference: Reference, other: Table, quote: Callable[[str], str]) -> str:
    own = [f"a.{quote(each)}" for each in compared_columns(table, None)]
    theirs = [f"b.{quote(each)}" for each in compared_columns(other, None)]
    return (
        f"SELECT {', '.join([*own, *theirs]) or '1'} FROM {table.quoted} AS a LEFT JOIN {other.quoted} AS b "
        f"ON a.{quote(reference.column)} = b.{quote(reference.referred)}"
    )


def _plain(value: Any, keys: Mapping[str, str]) -> Any:
    """The value in a form that can be compared, counted and sent to another process."""
    if isinstance(value, str):
        return keys.get(value, value)
    if isinstance(value, memoryview):
        return bytes(value)
    if isinstance(value, Mapping | list):
        return json.dumps(value, sort_keys=True, default=str)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value if value == value else NOT_A_NUMBER


def without_unknown(rows: Rows) -> Rows:
    """The same rows, as if events had no unknown field that a column with JSON could keep."""
    return {
        name: _merged((tuple(map(_forget_unknown, row)), count) for row, count in counted.items())
        for name, counted in rows.items()
    }


def _merged(rows: Iterable[tuple[Row, int]]) -> Counter[Row]:
    found: Counter[Row] = Counter()
    for row, count in rows:
        found[row] += count
    return found


def _forget_unknown(value: Any) -> Any:
    if not isinstance(value, str | bytes) or value[:1] not in ("{", "[", b"{", b"["):
        return value
    try:
        content = json.loads(value)
    except ValueError:
        return value
    return json.dumps(messages.without_unknown(content), sort_keys=True)


# ── differences ─────────────────────────────────────────────────────────────────────────────────────────


def differences(
    expected: Rows,
    found: Rows,
    tables: Sequence[Table],
    exclude: Sequence[str] | None,
    *,
    references: bool = False,
) -> list[str]:
    """Missing and extra rows, a line for each table and kind. References to generated keys count if asked for."""
    columns = {table.name: compared_columns(table, exclude) for table in tables}
    if references:
        columns |= {
            table.name_of(each): (*compared_columns(table, None), *compared_columns(other, None))
            for table in tables
            for each in table.references
            for other in tables
            if other.place == each.place
        }
    columns[EFFECTS] = ("tracking_id", "name", "state")
    columns[MESSAGES] = messages.compared(exclude)
    lines = []
    for name in (each for each in expected | found if each in columns):
        before, after = expected.get(name, NO_ROWS), found.get(name, NO_ROWS)
        missing, extra = before - after, after - before
        for rows, what in ((missing, "missing"), (extra, "too many")):
            if rows:
                lines.append(
                    f"{name}: {quantity(rows.total(), 'row')} {what}: {_format(rows, columns[name])}"
                )
    return lines


def differing_columns(
    one: Rows, other: Rows, tables: Sequence[Table], exclude: Sequence[str] | None
) -> list[str]:
    """Columns whose values differ between the two, as `table.column`."""
    names = []
    compared = [(table.name, table.name, compared_columns(table, exclude)) for table in tables]
    for name, shown, columns in [*compared, (MESSAGES, messages.TABLE, messages.compared(exclude))]:
        before, after = one.get(name, NO_ROWS), other.get(name, NO_ROWS)
        if before == after:
            continue
        differs = [
            index
            for index in range(len(columns))
            if Counter(row[index] for row in before.elements())
            != Counter(row[index] for row in after.elements())
        ]
        names += [f"{shown}.{columns[index]}" for index in differs]
    return names


def _format(rows: Counter[Row], columns: tuple[str, ...]) -> str:
    each = [
        "{" + ", ".join(f"{name}: {value!r:.60}" for name, value in zip(columns, row, strict=True)) + "}"
        for row in list(rows.elements())[:MOST_ROWS]
    ]
    if rows.total() > MOST_ROWS:
        each.append("…")
    return ", ".join(each)
