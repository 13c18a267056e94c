"""`onceward dlq export`: letters with their bodies, one line of JSON each."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from onceward._files.private import NewFile
from onceward._text import quantity
from onceward.cli.database import Database
from onceward.cli.dlq.options import Operator, Wanted, add_filter_options, open_letters, who
from onceward.cli.exit import MISUSED, AsJson, argument, fail, is_taken, refuse_path
from onceward.cli.output import print_result, progress_bars

if TYPE_CHECKING:
    from rich.progress import Progress

    from onceward.deadletters import DeadLetters, Filter

PAGE = 100


@add_filter_options()
def export(
    file: Annotated[Path, argument("FILE", "New file to write.", dir_okay=False)],
    database: Database,
    wanted: Wanted,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Write letters to a file, one line of JSON each: all fields, the body in base64, and its SHA-256.

    The file gets its name only when it is complete, and only you may read it. The export is recorded in the audit log.

    Exit code: 0; 1 if no letter matches, the file cannot be written or the database fails; 2 for wrong arguments, an
    existing file or missing tables.
    """
    with refuse_path(file, as_json, doing="written"):
        if is_taken(file):
            fail(f"{file} exists already; name another file", as_json, MISUSED)
    from onceward._sync import run_blocking

    with open_letters(database, as_json) as letters:
        chosen = wanted()
        total = letters.count(chosen)
        if not total:
            fail("no letter matches; nothing was written", as_json)
        try:
            with NewFile(file) as lines, _progress(as_json) as bars:
                number = 0
                for line in bars.track(_lines(letters, chosen), total):
                    lines.write(f"{line}\n".encode())
                    number += 1
                lines.flush()
                # Before the file gets its name: nothing is exported that the audit log does not know.
                details = {"filter": chosen.as_dict(), "letters": number, "file": str(file)}
                run_blocking(letters.operations.note(who(operator), "export", details))
        except OSError as error:
            fail(f"{file} cannot be written: {error.strerror or error}", as_json)
    print_result(
        {"letters": number, "file": str(file)}, f"{quantity(number, 'letter')} written to {file}", as_json
    )


def _lines(letters: DeadLetters, wanted: Filter) -> Iterator[str]:
    from onceward._sync import run_blocking

    after = 0
    while page := run_blocking(letters.operations.find(wanted, PAGE, after)):
        for letter in page:
            bodies = {"body": base64.b64encode(letters.body(letter.id)).decode()}
            if letter.edited_at is not None:
                bodies["edited_body"] = base64.b64encode(letters.edited_body(letter.id) or b"").decode()
            yield json.dumps({**msgspec.to_builtins(letter), **bodies}, ensure_ascii=False)
        after = page[-1].id


def _progress(as_json: bool) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    return progress_bars(as_json, "exporting", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
