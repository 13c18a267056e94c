"""`onceward dlq`: dead letters, looked at, kept, sent again or set aside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward.cli.completion import one_of
from onceward.cli.database import FAILED, MISUSED, AsJson, Database, fail
from onceward.cli.exporting import export
from onceward.cli.letters import (
    Operator,
    Reason,
    Wanted,
    Yes,
    age,
    confirm,
    described,
    filtered,
    letters_in,
    shortened,
    told,
    who,
)
from onceward.cli.printing import for_people, iso_time, print_json, print_table
from onceward.counted import counted

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetter, DeadLetters, Filter, Rca

dlq = typer.Typer(
    no_args_is_help=True, help="Dead letters: what failed for good. See it, mend it, send it again."
)

Limit = Annotated[int, typer.Option(min=1, metavar="N", help="How many at most.")]


@dlq.command("list")
@filtered()
def list_(
    database: Database,
    wanted: Wanted,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List dead letters, the longest dead first.

    Exit code: 0, also if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    from onceward.deadletters import Filter

    with letters_in(database, as_json) as letters:
        chosen = wanted()
        found = letters.find(chosen, limit=limit)
        total = len(found) if len(found) < limit else letters.count(chosen)
        others = "" if found else _others(letters, chosen.consumer)
    if as_json:
        print_json([described(letter) for letter in found])
        return
    columns = {
        "id": "id",
        "consumer": "consumer",
        "what": "type, category",
        "status": "status",
        "attempts": "deliveries",
        "deaths": "deaths",
        "age": "dead for",
        "error": "error",
    }
    empty = "No dead letters." if chosen == Filter() else f"No dead letter fits{others}."
    usual = {"status": "open", "deaths": 1}
    print_table([_row(letter) for letter in found], columns, empty, usual=usual)
    if total > len(found):
        typer.echo(f"{total - len(found):,} more; see --limit")


def _others(letters: DeadLetters, consumer: str | None) -> str:
    """Whose letters there are, for somebody who asked for those of nobody: the name may be mistyped."""
    known = {row["consumer"] for row in letters.stats()}
    if consumer is None or consumer in known or not known:
        return ""
    return f": there is none of {consumer!r}, but of {', '.join(sorted(known))}"


def _row(letter: DeadLetter) -> dict[str, Any]:
    """Narrow enough for a terminal. That it is not on hold goes without saying."""
    held = None if letter.hold is None else f"held: {letter.hold}"
    return {
        "id": letter.id,
        "consumer": letter.consumer,
        "what": "\n".join(filter(None, (letter.event_type, letter.category, held))),
        "status": letter.status,
        "attempts": letter.attempts,
        "deaths": letter.deaths,
        "age": age(letter.died_at),
        "error": shortened(told(letter.error, letter.message_id), 100),
    }


@dlq.command()
def show(
    letter_id: Annotated[int, typer.Argument(metavar="ID", help="Its number in `onceward dlq list`.")],
    database: Database,
    raw: Annotated[bool, typer.Option("--raw", help="Write the body as it came to standard output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show all that is known of one letter: its history, and what was delivered.

    JSON has the body in base64, and besides as `payload` if it can be read.

    Exit code: 0; 1 if there is no such letter or the database fails; 2 for wrong arguments or missing tables.
    """
    import base64

    from onceward.deadletters import Filter

    with letters_in(database, as_json) as letters:
        found = letters.find(Filter(ids=(letter_id,)))
        if not found:
            fail(f"there is no dead letter {letter_id}; see `onceward dlq list`", as_json)
        body = letters.body(letter_id)
    if raw:
        typer.get_binary_stream("stdout").write(body)
        return
    plain = described(found[0])
    if as_json:
        print_json({**plain, **_readable(body), "body": base64.b64encode(body).decode()})
        return
    history = [
        {**each, "at": for_people(each["at"]), "error": told(each["error"], plain["message_id"])}
        for each in plain.pop("history")
    ]
    called = {"attempts": "deliveries"}
    rows = [{"field": called.get(name, name), "value": value} for name, value in plain.items()]
    print_table([*rows, {"field": "body", "value": _shown(body)}], {"field": "field", "value": "value"}, "")
    print_table(
        history, {"attempt": "delivery", "at": "at (UTC)", "category": "category", "error": "error"}, ""
    )


@dlq.command()
@filtered(status=False)
def redrive(
    database: Database,
    wanted: Wanted,
    rca: Annotated[int | None, typer.Option(metavar="N", help="The number of an open root cause.")] = None,
    cause_category: Annotated[
        str | None, typer.Option(metavar="NAME", **one_of("infrastructure", "contract", "business"))
    ] = None,
    root_cause: Annotated[str | None, typer.Option(metavar="TEXT", help="Why the letters died.")] = None,
    fix_ref: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The fix that has been deployed: a version, a change.")
    ] = None,
    rate: Annotated[int, typer.Option(metavar="N", help="Letters a minute, 1000 at most.")] = 100,
    redrive_id: Annotated[
        str | None, typer.Option(metavar="ID", help="An id of yours: made again, it does nothing.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run them in a transaction that is rolled back; needs --task.")
    ] = False,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="The consumer: a function of an app, a class, or a function that makes one.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Of a dry run: how many at most.")] = 100,
    operator: Operator = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Have open letters of one consumer delivered again, so many a minute.

    It needs a filter beside the consumer, and a root cause: `--rca` names an open one, or `--cause-category`,
    `--root-cause` and `--fix-ref` make one. Poison is never sent again. What was applied before is a duplicate then,
    and has no second effect. With `--dry-run` nothing is sent and nothing stays in the database: it shows what would
    come of each letter, and which rows would change.

    Exit code: 0; 1 if it is refused, the database fails, or in a dry run a letter would die again; 2 for wrong
    arguments or missing tables.
    """
    with letters_in(database, as_json) as letters:
        chosen = wanted()
        if dry_run:
            from onceward.cli.rehearsal import rehearse

            if task is None:
                fail("a dry run needs the consumer: --task MODULE:NAME", as_json, MISUSED)
            raise typer.Exit(rehearse(letters, chosen, task, limit, as_json))
        cause = _cause(rca, cause_category, root_cause, fix_ref, as_json)
        _check_redrive(letters, chosen, cause, rate, yes, as_json)
        made = letters.redrive(chosen, rca=cause, operator=who(operator), rate=rate, redrive_id=redrive_id)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(made))
    elif made.repeated:
        typer.echo(
            f"Redrive {made.id} was made before, of {counted(made.letters, 'letter')}. Nothing was done."
        )
    else:
        typer.echo(
            f"Redrive {made.id}: {counted(made.letters, 'letter')} at {rate} a minute, the last one due at "
            f"{iso_time(made.last_at)}. Root cause {made.rca_id}."
        )
        if made.left:
            typer.echo(f"{made.left:,} more fit, and need another redrive.")
        typer.echo(
            f"They come to {chosen.consumer} while it runs: `onceward run MODULE:APP`. What became of them: "
            "`onceward dlq redrives`"
        )


def _cause(
    rca: int | None, category: str | None, root_cause: str | None, fix_ref: str | None, as_json: bool
) -> Rca | int:
    from onceward.deadletters import Rca

    described = (category, root_cause, fix_ref)
    if rca is not None:
        if any(each is not None for each in described):
            fail("name an open root cause with --rca, or describe a new one, not both", as_json, MISUSED)
        return rca
    if category is None:
        fail(
            "a redrive needs a root cause: --rca N, or --cause-category, --root-cause and --fix-ref", as_json
        )
    return Rca(category=category, root_cause=root_cause or "", fix_ref=fix_ref or "")  # type: ignore[arg-type]


def _check_redrive(
    letters: DeadLetters, wanted: Filter, cause: Rca | int, rate: int, yes: bool, as_json: bool
) -> None:
    """What is refused is refused before anybody is asked."""
    import msgspec

    from onceward.deadletters.redrive import check

    check(wanted, cause, rate)
    if not yes:
        number = letters.count(msgspec.structs.replace(wanted, status="open"))
        if number:  # else there is nothing to ask, and the redrive says why
            what = f"{counted(number, 'letter')} of {wanted.consumer}"
            confirm(f"Send {what} again, {rate} a minute?", yes, as_json)


@dlq.command()
@filtered(status=False)
def discard(
    database: Database,
    reason: Reason,
    wanted: Wanted,
    operator: Operator = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Close open letters without sending them again. They are kept for 90 days, like all others.

    Letters on hold are passed over.

    Exit code: 0; 1 if none was open or the database fails; 2 for wrong arguments or missing tables.
    """
    with letters_in(database, as_json) as letters:
        chosen = wanted(status="open")
        if open_ := letters.count(chosen):
            confirm(f"Discard {counted(open_, 'letter')}?", yes, as_json)
        number = letters.discard(chosen, reason=reason, operator=who(operator))
    _done("discarded", number, as_json)


@dlq.command()
@filtered()
def hold(
    database: Database,
    reason: Reason,
    wanted: Wanted,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Keep letters from every purge, until they are released.

    Exit code: 0; 1 if there was none or the database fails; 2 for wrong arguments or missing tables.
    """
    with letters_in(database, as_json) as letters:
        chosen = wanted()
        number = letters.hold(chosen, reason=reason, operator=who(operator))
    _done("held", number, as_json)


@dlq.command()
@filtered()
def release(
    database: Database,
    reason: Reason,
    wanted: Wanted,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """End the hold on letters.

    Exit code: 0; 1 if there was none or the database fails; 2 for wrong arguments or missing tables.
    """
    with letters_in(database, as_json) as letters:
        chosen = wanted()
        number = letters.release(chosen, reason=reason, operator=who(operator))
    _done("released", number, as_json)


@dlq.command()
def redrives(database: Database, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the last redrives and what became of them, and the root causes they were made for.

    Exit code: 0, also if there are none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    import json

    with letters_in(database, as_json) as letters:
        made, causes = letters.redrives(limit=limit), letters.rcas(limit=limit)
    rows = [{**row, "made_at": iso_time(row["made_at"]), "last_at": iso_time(row["last_at"])} for row in made]
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
        "rca_id": "cause",
    }
    print_table([{**row, "what": _redrive(row)} for row in rows], columns, "Nothing was redriven yet.")
    if rcas:
        _show_causes(rcas)


def _redrive(row: dict[str, Any]) -> str:
    last = for_people(row["last_at"])
    return f"{row['id']}\n{row['consumer']}, {row['rate']} a minute, by {row['operator']}, the last at {last} UTC"


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


@dlq.command()
def purge(database: Database, operator: Operator = None, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove letters that are resolved or discarded, dead for more than 90 days, and not on hold.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with letters_in(database, as_json) as letters:
        confirm("Remove for good what is settled and old enough?", yes, as_json)
        number = letters.purge(operator=who(operator))
    if as_json:
        print_json({"removed": number})
    else:
        typer.echo(f"{counted(number, 'letter')} removed.")


def _done(what: str, number: int, as_json: bool) -> None:
    if as_json:
        print_json({what: number})
    else:
        typer.echo(f"{counted(number, 'letter')} {what}." if number else "No letter fits.", err=not number)
    raise typer.Exit(0 if number else FAILED)


def _readable(body: bytes) -> dict[str, Any]:
    """For machines: the payload, if it is that of a transaction, or JSON."""
    import json

    import msgspec

    from onceward.connectors.codec import DecodeError, decode

    try:
        payload = decode(body).payload
    except DecodeError:
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError):
            return {}
    return {"payload": msgspec.to_builtins(payload, str_keys=True)}


def _shown(body: bytes) -> Any:
    """For people: JSON or a transaction's payload as text, anything else as its first bytes."""
    from onceward.connectors.codec import DecodeError, decode

    try:
        return shortened(repr(decode(body).payload), 2000)
    except DecodeError:
        pass
    try:
        return shortened(body.decode(), 2000)
    except UnicodeDecodeError:
        return body[:100].hex(" ") + (" …" if len(body) > 100 else "")


dlq.command()(export)
