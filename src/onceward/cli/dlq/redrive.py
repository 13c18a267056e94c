"""`onceward dlq redrive` and `redrives`: redeliver dead letters, and see how that went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from onceward._text import quantity
from onceward.cli.completion import one_of
from onceward.cli.database import Database
from onceward.cli.dlq.options import (
    Limit,
    Operator,
    Reason,
    Wanted,
    Yes,
    add_filter_options,
    confirm,
    open_letters,
    who,
)
from onceward.cli.exit import MISUSED, AsJson, argument, fail, flag, option
from onceward.cli.output import echo, for_people, iso_time, print_json, print_result, print_table

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetters, Filter, Rca


TASK = "The consumer: a function of an app, a class, or a function that returns a task."


@add_filter_options(status=False)
def redrive(
    database: Database,
    wanted: Wanted,
    rca: Annotated[int | None, option("N", "Number of an open root cause.")] = None,
    cause_category: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", **one_of("infrastructure", "contract", "business", "poison", "in_doubt")
        ),
    ] = None,
    root_cause: Annotated[str | None, option("TEXT", "Why the letters died.")] = None,
    fix_ref: Annotated[str | None, option("TEXT", "The deployed fix, such as a version or a change.")] = None,
    rate: Annotated[int, option("N", "Letters per minute, at most 1000.")] = 100,
    redrive_id: Annotated[
        str | None, option("ID", "Your own id; a redrive with the same id does nothing.")
    ] = None,
    poison_fixed: Annotated[
        bool, flag("Include poison: what killed its processes is fixed.", "--poison-fixed")
    ] = False,
    dry_run: Annotated[
        bool, flag("Try them in a transaction that is rolled back; needs --task.", "--dry-run")
    ] = False,
    task: Annotated[str | None, option("MODULE:NAME", TASK)] = None,
    limit: Annotated[int, option("N", "Maximum number in a dry run.", min=1)] = 100,
    operator: Operator = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Redeliver open letters of one consumer at a limited rate.

    It needs a filter in addition to the consumer, and a root cause: `--rca` names an open one; `--cause-category`,
    `--root-cause` and `--fix-ref` create one. Poison is redriven only with `--poison-fixed`: its starts count from
    zero, it is delivered alone, and is poison again if it kills its process again. A letter that was already applied
    counts as a duplicate and has no second effect. `--dry-run` sends nothing and changes nothing in the database: it
    shows what would happen to each letter, and which rows would change.

    Exit code: 0; 1 if it is refused, the database fails, or in a dry run a letter would die again; 2 for wrong
    arguments or missing tables.
    """
    with open_letters(database, as_json) as letters:
        chosen = wanted()
        if dry_run:
            from onceward.cli.dlq.dry_run import show_rehearsal

            if task is None:
                fail("a dry run needs the consumer; add --task MODULE:NAME", as_json, MISUSED)
            raise typer.Exit(show_rehearsal(letters, chosen, task, limit, as_json, poison_fixed))
        cause = _cause(rca, cause_category, root_cause, fix_ref, as_json)
        _check_redrive(letters, chosen, cause, rate, poison_fixed, yes, as_json)
        made = letters.redrive(
            chosen,
            rca=cause,
            operator=who(operator),
            rate=rate,
            redrive_id=redrive_id,
            poison_fixed=poison_fixed,
        )
    if as_json:
        print_json(made)
    elif made.repeated:
        echo(f"Redrive {made.id} already exists, with {quantity(made.letters, 'letter')}. Nothing was done.")
    else:
        echo(
            f"Redrive {made.id}: {quantity(made.letters, 'letter')} at {rate} per minute, the last one due at "
            f"{iso_time(made.last_at)}. Root cause {made.rca_id}."
        )
        if made.left:
            echo(f"{made.left:,} more match and need another redrive.")
        echo(
            f"{chosen.consumer} gets them while it runs: `onceward run MODULE:APP`. See the results with "
            "`onceward dlq redrives`"
        )


def _cause(
    rca: int | None, category: str | None, root_cause: str | None, fix_ref: str | None, as_json: bool
) -> Rca | int:
    from onceward.deadletters import Rca

    new = (category, root_cause, fix_ref)
    if rca is not None:
        if any(each is not None for each in new):
            fail("name an open root cause with --rca, or describe a new one, not both", as_json, MISUSED)
        return rca
    if category is None:
        fail(
            "a redrive needs a root cause: --rca N, or --cause-category, --root-cause and --fix-ref", as_json
        )
    return Rca(category=category, root_cause=root_cause or "", fix_ref=fix_ref or "")  # type: ignore[arg-type]


def _check_redrive(
    letters: DeadLetters,
    wanted: Filter,
    cause: Rca | int,
    rate: int,
    poison_fixed: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Refuse what is not allowed before asking for confirmation."""
    from onceward.deadletters.redrive import check

    check(wanted, cause, rate, poison_fixed)
    if not yes:
        number = letters.count(msgspec.structs.replace(wanted, status="open"))
        if number:  # otherwise there is nothing to ask, and the redrive says why
            what = f"{quantity(number, 'letter')} of {wanted.consumer}"
            confirm(f"Redrive {what}, {rate} per minute?", yes, as_json)


def stop_redrive(
    database: Database,
    redrive_id: Annotated[str, argument("ID", "The redrive, as `onceward dlq redrives` lists it.")],
    reason: Reason,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Stop a redrive: letters that no worker has yet are open again.

    A letter that is in a handler finishes there. The next redrive can start at once.

    Exit code: 0; 1 if there is no such redrive, none of its letters waits, or the database fails; 2 for wrong arguments
    or missing tables.
    """
    with open_letters(database, as_json) as letters:
        opened = letters.stop_redrive(redrive_id, reason=reason, operator=who(operator))
    text = f"Redrive {redrive_id} is stopped. {quantity(opened, 'letter')} of it returned to the open ones."
    print_result({"opened": opened}, text, as_json)


def redrives(database: Database, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the last redrives with their results and root causes.

    Exit code: 0, even if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    import json

    with open_letters(database, as_json) as letters:
        made, causes = letters.redrives(limit=limit), letters.rcas(limit=limit)
    rows = [
        {**row, **{name: iso_time(row[name]) for name in ("made_at", "last_at", "stopped_at")}}
        for row in made
    ]
    rcas = [
        {**row, "opened_at": iso_time(row["opened_at"]), "closed_at": iso_time(row["closed_at"])}
        for row in causes
    ]
    if as_json:
        print_json({"redrives": [{**row, "filter": json.loads(row["filter"])} for row in rows], "rcas": rcas})
        return
    columns = {
        "what": "redrive",
        "letters": "letters",
        "waiting": "waiting",
        "succeeded": "succeeded",
        "died_again": "died again",
        "withdrawn": "withdrawn",
        "rca_id": "cause",
    }
    shown = [{**row, "what": _redrive(row)} for row in rows]
    print_table(shown, columns, "No redrives yet.", usual={"withdrawn": 0})
    if rcas:
        _show_causes(rcas)


def _redrive(row: dict[str, Any]) -> str:
    stopped = row["stopped_at"]
    end = (
        f"the last at {for_people(row['last_at'])}"
        if stopped is None
        else f"stopped at {for_people(stopped)}"
    )
    return f"{row['id']}\n{row['consumer']}, {row['rate']} per minute, by {row['operator']}, {end} UTC"


def _show_causes(rcas: list[dict[str, Any]]) -> None:
    columns = {
        "id": "cause",
        "category": "category",
        "root_cause": "why they died",
        "fix_ref": "fix",
        "operator": "by",
        "opened_at": "opened (UTC)",
        "closed_at": "closed (UTC)",
        "reopened": "reopened",
    }
    rows = [
        {**row, "opened_at": for_people(row["opened_at"]), "closed_at": for_people(row["closed_at"])}
        for row in rcas
    ]
    print_table(rows, columns, "", usual={"closed_at": None, "reopened": 0})
