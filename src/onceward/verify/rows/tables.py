"""Compares the rows of all the consumer's tables, as multisets, without the columns that the database generates.

Numbers that the database counts differ from run to run. Those of rows that the setup has made do not, so such rows can
also be compared with their numbers, and rows together with those that they refer to.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection

from onceward._text import quantity
from onceward.verify.rows import messages
from onceward.verify.rows.defaults import NOW, without_clock
from onceward.verify.rows.messages import MESSAGES
from onceward.verify.rows.odd_values import rows_of
from onceward.verify.rows.schema import Reference, Table, compared_columns, leave_out, places

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
NOT_A_NUMBER = "NaN"
"""Stands for a number that does not equal itself."""
MOST_ROWS = 5
"""Rows of each kind that a message shows."""

Row = tuple[Any, ...]
Rows = dict[str, Counter[Row]]
"""By table."""
NO_ROWS: Counter[Row] = Counter()


# ── what is compared ────────────────────────────────────────────────────────────────────────────────────


class Cell(msgspec.Struct, frozen=True):
    """A column of compared rows."""

    table: Table
    name: str
    alias: str = "a"
    known: frozenset[Any] | None = None
    """Values that are compared; all others count as one."""

    def plain(self, value: Any, keys: Mapping[str, str]) -> Any:
        if self.known is not None:
            return value if value in self.known else None
        plain = _plain(value, keys)
        return without_clock(plain) if self.name in self.table.doubtful else plain


class Shape(msgspec.Struct, frozen=True):
    """A table as it is compared, alone or together with another one, with or without numbers."""

    name: str
    table: Table
    cells: tuple[Cell, ...]
    reference: Reference | None = None
    other: Table | None = None

    @property
    def is_plain(self) -> bool:
        return self.name == self.table.name

    def query(self, quote: Callable[[str], str]) -> str:
        names = ", ".join(f"{cell.alias}.{quote(cell.name)}" for cell in self.cells)
        query = f"SELECT {names or '1'} FROM {self.table.quoted} AS a"
        if self.reference is not None and self.other is not None:
            on = f"a.{quote(self.reference.column)} = b.{quote(self.reference.referred)}"
            query += f" LEFT JOIN {self.other.quoted} AS b ON {on}"
        return query

    def rows(self, found: Iterable[Sequence[Any]], keys: Mapping[str, str]) -> Counter[Row]:
        """Rows that the query has found. With numbers, only those of the setup."""
        if not self.cells:
            return Counter(tuple(row) for row in found)
        plain = (
            tuple(cell.plain(value, keys) for cell, value in zip(self.cells, row, strict=True))
            for row in found
        )
        if self.is_plain or self.reference is not None:
            return Counter(plain)
        return Counter(row for row in plain if row[0] is not None)


def shapes(table: Table, tables: Sequence[Table], exclude: Sequence[str] | None) -> list[Shape]:
    """The ways in which a table is compared: as it is, and unless `exclude` says which columns count, its rows from the
    setup with their numbers, and all together with the rows that they refer to."""
    own = tuple(Cell(table, name) for name in compared_columns(table, exclude))
    found = [Shape(table.name, table, own)]
    if exclude is not None:
        return found
    for name, known in table.numbers.items():
        found.append(Shape(table.name_by(name), table, (Cell(table, name, known=known), *own)))
    for each in table.references:
        other = next((other for other in tables if other.place == each.place), None)
        if other is not None:
            number = Cell(table, each.column, known=other.numbers.get(each.referred, frozenset()))
            theirs = tuple(Cell(other, name, "b") for name in compared_columns(other, exclude))
            found.append(Shape(table.name_of(each), table, (*own, number, *theirs), each, other))
    return found


def without_unsteady(one: Rows, other: Rows, tables: Sequence[Table]) -> list[Table]:
    """The tables without doubtful columns whose values change by themselves, as two clean deliveries show."""
    return [leave_out(table, _unsteady(one, other, table)) for table in tables]


def without_chance(one: Rows, other: Rows, tables: Sequence[Table]) -> list[Table]:
    """The tables without numbers and references that differ in two clean deliveries: which row is taken is left to
    chance."""
    differing = {name for name in one if one[name] != other.get(name, NO_ROWS)}
    return [
        msgspec.structs.replace(
            table,
            references=tuple(each for each in table.references if table.name_of(each) not in differing),
            numbers={
                name: each for name, each in table.numbers.items() if table.name_by(name) not in differing
            },
        )
        for table in tables
    ]


def has_other_times(rows: Counter[Row], table: Table) -> bool:
    """Whether a doubtful column has a value that is not a time of about now."""
    places = [index for index, name in enumerate(compared_columns(table, None)) if name in table.doubtful]
    return any(row[place] not in (None, NOW) for row in rows for place in places)


def _unsteady(one: Rows, other: Rows, table: Table) -> set[str]:
    before, after = one.get(table.name, NO_ROWS), other.get(table.name, NO_ROWS)
    if before == after or not table.doubtful:
        return set()
    names = compared_columns(table, None)
    found = {name for name in table.doubtful if _values(before, names, name) != _values(after, names, name)}
    less = leave_out(table, found)
    same = [project({table.name: rows}, [table], [less])[table.name] for rows in (before, after)]
    return found if same[0] == same[1] else set(table.doubtful)


def _values(rows: Counter[Row], names: Sequence[str], name: str) -> Counter[Any]:
    at = names.index(name)
    return Counter(row[at] for row in rows.elements())


def project(rows: Rows, before: Sequence[Table], after: Sequence[Table]) -> Rows:
    """Rows as they would have been read if fewer columns of the tables were compared."""
    kept = {table.place: compared_columns(table, None) for table in after}
    found = dict(rows)
    for table in before:
        for shape in shapes(table, before, None):
            places = [
                index
                for index, cell in enumerate(shape.cells)
                if cell.known is not None or cell.name in kept[cell.table.place]
            ]
            if shape.name in rows and len(places) < len(shape.cells):
                found[shape.name] = _merged(
                    (tuple(row[place] for place in places) or (1,), count)
                    for row, count in rows[shape.name].items()
                )
    return found


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────


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
        for shape in shapes(table, tables, exclude):
            found[shape.name] = shape.rows(rows_of(connection, shape.query(quote)), keys)
    found[EFFECTS] = Counter(tuple(row[:3]) for row in effects)
    fields = messages.compared(exclude)
    found[MESSAGES] = Counter(
        tuple(_plain(getattr(each, name), keys) for name in fields) for each in messages.read(connection)
    )
    return found


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
    """Missing and extra rows, a line for each table and kind. If asked for, also by the numbers of rows from the setup,
    and by the rows that others refer to."""
    columns = {
        shape.name: tuple(cell.name for cell in shape.cells)
        for table in tables
        for shape in shapes(table, tables, exclude)
        if references or shape.is_plain
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


def differ_in_digits(one: Rows, other: Rows) -> bool:
    """Whether all that differs is the last digits of numbers with a fraction."""
    return one != other and _rounded(one) == _rounded(other)


def _rounded(rows: Rows) -> Rows:
    return {
        name: _merged(
            (tuple(float(f"{each:.9g}") if isinstance(each, float) else each for each in row), count)
            for row, count in counted.items()
        )
        for name, counted in rows.items()
    }


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
