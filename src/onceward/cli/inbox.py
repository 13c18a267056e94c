"""`onceward inbox`: the tables of an inbox, what is in them, and what must stay or may go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward._text import quantity
from onceward.cli.consumers import unknown
from onceward.cli.database import Database, dialect_of, opened
from onceward.cli.exit import FAILED, MISUSED, AsJson, fail
from onceward.cli.output import for_people, iso_day, iso_time, print_json, print_table

if TYPE_CHECKING:
    from onceward.inbox import Inbox, PurgeReport

inbox = typer.Typer(no_args_is_help=True, help="The inbox's tables: make them, look into them, purge them.")

INTERRUPTED = 130

Consumer = Annotated[str, typer.Argument(metavar="CONSUMER", help="Its id in the registry.")]
TrackingId = Annotated[
    str | None,
    typer.Argument(
        metavar="[TRACKING_ID]", show_default="everything of the consumer", help="The event's tracking id."
    ),
]


@inbox.command()
def migrate(
    database: Database,
    as_script: Annotated[
        bool, typer.Option("--print", help="Print the SQL of all migrations instead, and change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make the inbox's tables, or bring them up to date. Does nothing if they are.

    An SQLite file that is not there is made. With `--print` the database is not touched.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments.
    """
    if as_script:
        _print_script(database, as_json)
        return
    with opened(database, as_json, is_new=True) as opened_inbox:
        applied = opened_inbox.migrate()
    if as_json:
        print_json({"applied": applied})
    else:
        typer.echo("\n".join(f"applied {name}" for name in applied) or "Everything is up to date.")


def _print_script(database: str, as_json: bool) -> None:
    from onceward.errors import ConfigurationError
    from onceward.storage import migrations

    try:
        script = migrations.as_script(dialect_of(database))
    except ConfigurationError as error:
        fail(str(error), as_json, MISUSED)
    if as_json:
        print_json({"sql": script})
    else:
        typer.echo(script)


@inbox.command()
def stats(database: Database, as_json: AsJson = False) -> None:
    """Count what there is of each consumer.

    *unended*: events that were started and have not come to an end, now or in a crash. *in doubt*: effects of which
    nobody knows whether they happened. *horizon*: events of an earlier day are refused. A consumer that is not
    registered is listed if it has rows; no purge takes these.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with opened(database, as_json) as opened_inbox:
        rows = opened_inbox.stats()
    found = [
        {
            "consumer_id": row["consumer_id"],
            "registered": row["registered"],
            "dedup_rows": row["dedup_rows"],
            "oldest_day": iso_day(row["oldest_day"]),
            "horizon": iso_day(row["floor_day"]),
            "unended": row["unended"],
            "effects_in_doubt": row["effects_in_doubt"],
            "parked": row["parked"],
            "holds": row["holds"],
        }
        for row in rows
    ]
    if as_json:
        print_json(found)
        return
    columns = {
        "consumer_id": "consumer",
        "registered": "registered",
        "dedup_rows": "dedup rows",
        "oldest_day": "oldest day",
        "horizon": "horizon",
        "unended": "unended",
        "effects_in_doubt": "in doubt",
        "parked": "parked",
        "holds": "holds",
    }
    print_table(found, columns, "No consumer is registered.", usual={"registered": True, "horizon": None})


@inbox.command()
def purge(
    database: Database,
    consumer: Annotated[
        str | None,
        typer.Option(metavar="CONSUMER", show_default="every registered one", help="Purge this one only."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove the records of events that nothing can deliver any more, while consumers go on.

    First each consumer's horizon is raised: events of an earlier day are refused from then on. Then what is older than
    its retention goes, in small steps; on PostgreSQL whole days at once where nobody needs them. What is on hold stays,
    and so does every effect in doubt. It may be interrupted at any time, and the next purge goes on.

    Exit code: 0; 1 if the database fails, somebody else is purging, or something has to wait for the next purge;
    2 for wrong arguments, an unknown consumer or missing tables; 130 after Ctrl-C.
    """
    with opened(database, as_json) as opened_inbox, _progress(as_json) as progress:
        try:
            report = opened_inbox.purge(consumer, progress=progress)
        except KeyboardInterrupt:
            fail(
                "interrupted; what is gone is gone, the next purge goes on with the rest",
                as_json,
                INTERRUPTED,
            )
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(report))
    else:
        _show(report)
    if report.unfinished:
        raise typer.Exit(FAILED)


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[PurgeReport], None]]:
    """A bar on a terminal, nothing anywhere else."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if as_json or not console.is_terminal:
        yield lambda report: None
        return
    columns = (
        TextColumn("purging"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("days, {task.fields[rows]:,} rows"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None, rows=0)
        yield lambda report: bars.update(
            task, total=report.days, completed=report.days_done, rows=report.rows
        )


def _show(report: PurgeReport) -> None:
    rows = [{"consumer": name, "kept": f"from {day} on"} for name, day in report.floors.items()]
    skipped = {
        name: f"everything: {why}" for name, why in report.skipped.items() if name not in report.floors
    }
    rows += [{"consumer": name, "kept": why} for name, why in skipped.items()]
    print_table(rows, {"consumer": "consumer", "kept": "kept"}, "No consumer is registered.")
    typer.echo(
        f"Removed {quantity(report.rows, 'dedup row')}, {quantity(report.attempts, 'attempt')} and "
        f"{quantity(report.effects, 'effect')} in {quantity(report.steps, 'step')}, the longest of "
        f"{report.longest_step * 1000:.0f} ms."
    )
    if report.dropped:
        typer.echo(f"{len(report.dropped)} of the days went as a whole: {', '.join(report.dropped)}")
    for name in report.skipped.keys() & report.floors.keys():
        typer.echo(f"{name}: {report.skipped[name]}")
    for problem in report.unfinished:
        typer.echo(f"Not finished: {problem}. The next purge goes on with it.", err=True)


@inbox.command()
def hold(
    consumer: Consumer,
    database: Database,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why: a case, a ticket.")],
    tracking_id: TrackingId = None,
    operator: Annotated[
        str | None, typer.Option(metavar="NAME", show_default="your user name", help="Who places it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep the records of one event, or all of a consumer, from every purge until they are released.

    It counts at once, also for a purge that is running. Placing it twice is placing it once.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments, an unknown consumer or missing tables.
    """
    import getpass

    with opened(database, as_json) as opened_inbox:
        _check_known(opened_inbox, consumer, as_json)
        who = getpass.getuser() if operator is None else operator
        is_new = opened_inbox.hold(consumer, tracking_id, reason=reason, operator=who)
    if as_json:
        print_json({"consumer_id": consumer, "tracking_id": tracking_id, "placed": is_new})
    else:
        typer.echo(f"{_named(consumer, tracking_id)} {'is on hold' if is_new else 'was on hold already'}.")


@inbox.command()
def release(
    consumer: Consumer, database: Database, tracking_id: TrackingId = None, as_json: AsJson = False
) -> None:
    """End a hold. The next purge takes what is past its retention by then.

    Without a tracking id it is the hold on the whole consumer that ends; holds on single events stay.

    Exit code: 0; 1 if there was no such hold or the database fails; 2 for wrong arguments or missing tables.
    """
    with opened(database, as_json) as opened_inbox:
        was_held = opened_inbox.release(consumer, tracking_id)
    if not was_held:
        fail(f"{_named(consumer, tracking_id)} was not on hold; see `onceward inbox holds`", as_json)
    if as_json:
        print_json({"consumer_id": consumer, "tracking_id": tracking_id, "released": True})
    else:
        typer.echo(f"{_named(consumer, tracking_id)} is not on hold any more.")


@inbox.command()
def holds(database: Database, as_json: AsJson = False) -> None:
    """List what is on hold, since when, why, and by whom.

    Exit code: 0, also if there is none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with opened(database, as_json) as opened_inbox:
        rows = opened_inbox.holds()
    found = [
        {**row, "tracking_id": row["tracking_id"] or None, "placed_at": iso_time(row["placed_at"])}
        for row in rows
    ]
    if as_json:
        print_json(found)
        return
    columns = {
        "consumer_id": "consumer",
        "tracking_id": "event",
        "reason": "reason",
        "operator": "by",
        "placed_at": "since (UTC)",
    }
    print_table(
        [
            {
                **row,
                "tracking_id": row["tracking_id"] or "everything",
                "placed_at": for_people(row["placed_at"]),
            }
            for row in found
        ],
        columns,
        "Nothing is on hold.",
    )


@inbox.command()
def effects(
    database: Database,
    every: Annotated[bool, typer.Option("--all", help="Also those whose outcome is known.")] = False,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at most, the oldest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """List effects in doubt: begun, and nobody knows whether they happened. Ask the provider with the key.

    Exit code: 0, also if there is none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with opened(database, as_json) as opened_inbox:
        rows = opened_inbox.effects(in_doubt=not every, limit=limit)
    found = [
        {**row, "intended_at": iso_time(row["intended_at"]), "settled_at": iso_time(row["settled_at"])}
        for row in rows
    ]
    if as_json:
        print_json(found)
        return
    columns: dict[str, str] = {
        "consumer_id": "consumer",
        "tracking_id": "event",
        "name": "effect",
        "state": "state",
        "effect_key": "key",
        "intended_at": "begun (UTC)",
        "error": "error",
    }
    rows = [{**row, "intended_at": for_people(row["intended_at"])} for row in found]
    print_table(rows, columns, "There are none." if every else "No effect is in doubt.")


def _check_known(opened_inbox: Inbox, consumer: str, as_json: bool) -> None:
    """A hold on a mistyped name would hold nothing."""
    registered: list[Any] = [row["consumer_id"] for row in opened_inbox.consumers()]
    if consumer not in registered:
        fail(unknown(consumer, registered), as_json, MISUSED)


def _named(consumer: str, tracking_id: str | None) -> str:
    return f"Everything of {consumer}" if tracking_id is None else f"Event {tracking_id} of {consumer}"
