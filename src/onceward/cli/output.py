"""Tables and lines for people, JSON for machines. All that commands print goes through here, so nothing that comes from
a message or a server controls the terminal."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from onceward._text import BEYOND_JSON, printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.text import Text

WIDE = 200
"""Characters per line without a terminal, so nothing is cut off in a log."""
WORD = 14
"""Characters up to which a word is not broken, as in `infrastructure`."""
LAST_WORD = 8
"""The same for the last column if there is no room for more."""
GAP = 3
"""Characters between two columns."""


def print_json(value: Any) -> None:
    write_json(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False))


def write_json(text: str) -> None:
    """Print JSON. In JSON, too, a terminal would obey what is not escaped."""
    typer.echo(BEYOND_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def echo(*lines: str, err: bool = False, color: str | None = None, dim: bool | None = None) -> None:
    """Print lines. A line break inside one of them is shown as `\\n`."""
    for line in lines:
        typer.secho(printable(line), err=err, fg=color, dim=dim)


def clean_text(text: str, style: str = "") -> Text:
    """A text for rich, as `echo` would print it."""
    from rich.text import Text

    return Text(printable(text), style)


def print_result(value: Any, text: str | list[str], as_json: bool) -> None:
    """Print a result as JSON, or as a line or lines for people."""
    if as_json:
        print_json(value)
    else:
        echo(*([text] if isinstance(text, str) else text))


def progress_bars(as_json: bool, *columns: str | ProgressColumn) -> Progress:
    """Progress bars on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    console.quiet = as_json or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=console.quiet)


def print_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    empty: str,
    *,
    usual: Mapping[str, Any] | None = None,
    right: Collection[str] = (),
) -> None:
    """`columns` maps each key to its heading. A cell that is a tuple has several lines. A column is left out if each of
    its values is the `usual` one or None. Numbers are aligned right, and the columns in `right`, which may have other
    values among their numbers; with these, columns move together where a terminal is narrow."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        echo(empty)
        return
    boring = {key for key, value in (usual or {}).items() if all(row[key] in (None, value) for row in rows)}
    shown = {key: [_cell(row[key]) for row in rows] for key in columns if key not in boring}
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    texts = {key: [columns[key], *cells] for key, cells in shown.items()}
    widths = _widths(texts, console.width - GAP * len(texts) + 1)
    is_tight = bool(right) and not all(widths.get(key) == _width(cells) for key, cells in texts.items())
    if is_tight:
        widths = _widths(texts, console.width - len(texts))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if is_tight else 1))
    for key in shown:
        is_number = all(isinstance(row[key], int) and not isinstance(row[key], bool) for row in rows)
        table.add_column(
            columns[key],
            justify="right" if is_number or key in right else "left",
            overflow="fold",
            width=widths.get(key),
        )
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*map(Text, cells))
    console.print(table)


def print_lines(text: str, *, color: str | None = None, err: bool = False) -> None:
    """Print a sentence, broken into lines where a terminal is narrow."""
    from rich.console import Console

    console = Console(stderr=err)
    width = console.width if console.is_terminal else max(console.width, WIDE)
    lines = wrap(
        " ".join(text.split()), width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    echo(*lines, color=color, err=err)


def _widths(texts: Mapping[str, Sequence[str]], room: int) -> dict[str, int]:
    """The width of each column. If space is short, the last column shrinks first, because it is often a sentence; short
    words stay whole as long as there is room."""
    from rich.cells import cell_len

    widths = {key: _width(cells) for key, cells in texts.items()}
    words = {key: min(max(map(cell_len, _split(cells))), WORD) for key, cells in texts.items()}
    *others, last = widths
    for key, least in (
        (last, words[last]),
        *((key, words[key]) for key in others),
        (last, min(words[last], LAST_WORD)),
    ):
        excess = max(sum(widths.values()) - room, 0)
        widths[key] = max(widths[key] - excess, min(least, widths[key]))
    return widths if sum(widths.values()) <= room else {}


def _width(cells: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, _split(cells, "\n")))


def _split(cells: Sequence[str], by: str | None = None) -> list[str]:
    return [part for cell in cells for part in cell.split(by) or [""]]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):  # lines
        return "\n".join(printable(str(each)) for each in value)
    return printable(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def iso_time(seconds: float | None) -> str | None:
    """Format seconds since 1970."""
    return (
        None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    )


def for_people(iso: str | None) -> str | None:
    """Format a time for a table, to the second, in UTC."""
    return None if iso is None else iso[:19].replace("T", " ")


def iso_day(day: int | None) -> str | None:
    """Format days since 1970."""
    return None if day is None else (date(1970, 1, 1) + timedelta(days=day)).isoformat()
