"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import typer

WIDE = 200
"""Characters of a line where there is no terminal: nothing is cut off in a log."""


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], empty: str) -> None:
    """`columns`: the heading of each key."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        typer.echo(empty)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key, heading in columns.items():
        is_number = all(isinstance(row[key], int) and not isinstance(row[key], bool) for row in rows)
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(row[key])) for key in columns))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def iso_time(seconds: float | None) -> str | None:
    """Of seconds since 1970."""
    return (
        None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    )


def iso_day(day: int | None) -> str | None:
    """Of days since 1970."""
    return None if day is None else (date(1970, 1, 1) + timedelta(days=day)).isoformat()
