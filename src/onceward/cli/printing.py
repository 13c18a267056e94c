"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import typer

WIDE = 200
"""Characters of a line where there is no terminal: nothing is cut off in a log."""

WORD = 14
"""Characters of a word that is not broken, as in `infrastructure`."""
GAP = 3
"""Between two columns."""


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    empty: str,
    *,
    usual: Mapping[str, Any] | None = None,
) -> None:
    """`columns`: the heading of each key. One is left out where every row has what is `usual` in it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        typer.echo(empty)
        return
    boring = {key for key, value in (usual or {}).items() if all(row[key] == value for row in rows)}
    shown = {key: [_cell(row[key]) for row in rows] for key in columns if key not in boring}
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    words = {key: _longest_word([columns[key], *cells]) for key, cells in shown.items()}
    fits = sum(words.values()) + GAP * len(words) <= console.width
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in shown:
        is_number = all(isinstance(row[key], int) and not isinstance(row[key], bool) for row in rows)
        table.add_column(
            columns[key],
            justify="right" if is_number else "left",
            overflow="fold",
            min_width=words[key] if fits else None,
        )
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))
    console.print(table)


def _longest_word(texts: Sequence[str]) -> int:
    """Where a table is made narrow, short words stay whole."""
    return min(max(len(word) for text in texts for word in text.split() or [""]), WORD)


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


def for_people(iso: str | None) -> str | None:
    """A time in a table, to the second, in UTC."""
    return None if iso is None else iso[:19].replace("T", " ")


def iso_day(day: int | None) -> str | None:
    """Of days since 1970."""
    return None if day is None else (date(1970, 1, 1) + timedelta(days=day)).isoformat()
