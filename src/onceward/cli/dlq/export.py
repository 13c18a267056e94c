"""`onceward dlq export`: letters with their bodies, one line of JSON each."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onceward._text import quantity
from onceward.cli.database import Database
from onceward.cli.dlq.options import Operator, Wanted, add_filter_options, as_plain, open_letters, who
from onceward.cli.exit import MISUSED, AsJson, fail
from onceward.cli.output import print_json

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetters, Filter

PAGE = 100


@add_filter_options()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="New file to write.")],
    database: Database,
    wanted: Wanted,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Write letters to a file, one line of JSON each: all fields, the body in base64, and its SHA-256.

    The file gets its name only when it is complete. The export is recorded in the audit log.

    Exit code: 0; 1 if no letter matches, the file cannot be written or the database fails; 2 for wrong arguments, an
    existing file or missing tables.
    """
    if file.exists():
        fail(f"{file} exists already; name another file", as_json, MISUSED)
    from onceward._sync import run_blocking

    with open_letters(database, as_json) as letters:
        chosen = wanted()
        total = letters.count(chosen)
        if not total:
            fail("no letter matches; nothing was written", as_json)
        details = {"filter": chosen.as_dict(), "letters": total, "file": str(file)}
        run_blocking(letters.operations.note(who(operator), "export", details))
        part = file.with_name(f"{file.name}.part")
        try:
            with part.open("w", encoding="utf-8") as lines, _progress(total, as_json) as progress:
                number = 0
                for line in _lines(letters, chosen):
                    lines.write(line + "\n")
                    number += 1
                    progress(number)
            part.rename(file)
        except OSError as error:
            part.unlink(missing_ok=True)
            fail(f"{file} cannot be written: {error.strerror or error}", as_json)
    if as_json:
        print_json({"letters": number, "file": str(file)})
    else:
        typer.echo(f"{quantity(number, 'letter')} written to {file}")


def _lines(letters: DeadLetters, wanted: Filter) -> Iterator[str]:
    from onceward._sync import run_blocking

    after = 0
    while page := run_blocking(letters.operations.find(wanted, PAGE, after)):
        for letter in page:
            body = base64.b64encode(letters.body(letter.id)).decode()
            yield json.dumps({**as_plain(letter), "body": body}, ensure_ascii=False)
        after = page[-1].id


@contextmanager
def _progress(total: int, as_json: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda number: None
        return
    columns = (TextColumn("exporting"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda number: bars.update(task, completed=number)
