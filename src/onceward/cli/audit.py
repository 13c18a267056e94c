"""`onceward audit`: what operators did, and whether that record is what was written."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from onceward._text import quantity
from onceward.cli.database import Database
from onceward.cli.dlq.options import letters_in, shortened
from onceward.cli.exit import FAILED, AsJson
from onceward.cli.output import for_people, print_json, print_table

audit = typer.Typer(
    no_args_is_help=True, help="What operators did: append-only, and each row sealed by the next."
)


@audit.command("list")
def list_(
    database: Database,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most, the newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List what operators did, newest first.

    Exit code: 0, also if there is nothing; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with letters_in(database, as_json) as letters:
        rows = letters.audit(limit=limit)
    if as_json:
        print_json([{**row, "details": json.loads(row["details"])} for row in rows])
        return
    columns = {"seq": "row", "at": "at (UTC)", "operator": "by", "action": "action", "details": "details"}
    shown = [{**row, "at": for_people(row["at"]), "details": shortened(row["details"], 120)} for row in rows]
    print_table(shown, columns, "Nothing was done yet.")


@audit.command()
def verify(database: Database, as_json: AsJson = False) -> None:
    """Compute the hash of every row again, and compare.

    Keep the last hash somewhere else: who can write to the database can rewrite all of it, and only that shows.

    Exit code: 0 if all is as it was written; 1 if not, or if the database fails; 2 for wrong arguments or missing
    tables.
    """
    with letters_in(database, as_json) as letters:
        verdict = letters.verify_audit()
    broken = verdict.broken
    if as_json:
        print_json(
            {
                "entries": verdict.entries,
                "last_hash": verdict.last_hash,
                "broken": None if broken is None else {"row": broken.seq, "what": broken.what},
            }
        )
    elif broken is None:
        rows = quantity(verdict.entries, "row")
        typer.echo(f"{rows}, as written. The last hash is {verdict.last_hash}")
    else:
        typer.echo(f"Row {broken.seq} is not as it was written: {broken.what}.", err=True)
    raise typer.Exit(0 if broken is None else FAILED)
