"""`onceward audit`: what operators did, and whether that log is unchanged."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from onceward._text import quantity
from onceward.cli.database import Database
from onceward.cli.dlq.options import open_letters, shorten
from onceward.cli.exit import FAILED, AsJson, option
from onceward.cli.output import echo, for_people, print_json, print_table

audit = typer.Typer(
    no_args_is_help=True,
    help="Log of what operators did: append-only, each row sealed by a hash in the next.",
)


@audit.command("list")
def list_(
    database: Database,
    limit: Annotated[int, option("N", "Maximum number, newest first.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """List what operators did, newest first.

    Exit code: 0, even if there is nothing; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_letters(database, as_json) as letters:
        rows = letters.audit(limit=limit)
    if as_json:
        print_json([{**row, "details": json.loads(row["details"])} for row in rows])
        return
    columns = {"seq": "row", "at": "at (UTC)", "operator": "by", "action": "action", "details": "details"}
    texts = [{**row, "at": for_people(row["at"]), "details": shorten(row["details"], 120)} for row in rows]
    print_table(texts, columns, "The log is empty.")


@audit.command()
def verify(database: Database, as_json: AsJson = False) -> None:
    """Recompute the hash of every row and compare.

    Keep the last hash elsewhere: anyone who can write to the database can rewrite the whole log, and only that hash
    shows it.

    Exit code: 0 if the log is unchanged; 1 if not, or if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_letters(database, as_json) as letters:
        verdict = letters.verify_audit()
    broken = verdict.broken
    if as_json:
        problem = None if broken is None else {"row": broken.seq, "what": broken.what}
        print_json({"entries": verdict.entries, "last_hash": verdict.last_hash, "broken": problem})
    elif broken is None:
        rows = quantity(verdict.entries, "row")
        echo(f"{rows}, unchanged. The last hash is {verdict.last_hash}")
    else:
        echo(f"The log is broken at row {broken.seq}: {broken.what}.", err=True)
    raise typer.Exit(0 if broken is None else FAILED)
