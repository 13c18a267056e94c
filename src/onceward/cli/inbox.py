"""`onceward inbox`: the tables of an inbox, what is in them, holds and purges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onceward._text import quantity
from onceward.cli.consumers import unknown_consumer
from onceward.cli.database import Database, TrustClock, dialect_of, open_inbox
from onceward.cli.dlq.options import Operator, Reason, open_letters, who
from onceward.cli.exit import FAILED, MISUSED, AsJson, argument, fail, flag, option, refuse_mistakes
from onceward.cli.output import (
    echo,
    for_people,
    iso_day,
    iso_time,
    print_json,
    print_result,
    print_table,
    progress_bars,
)

if TYPE_CHECKING:
    from onceward.inbox import Inbox, PurgeReport

inbox = typer.Typer(no_args_is_help=True, help="Inbox tables: create, inspect and purge them.")

INTERRUPTED = 130

Consumer = Annotated[str, argument("CONSUMER", "Consumer id in the registry.")]
TrackingId = Annotated[
    str | None, argument("TRACKING_ID", "Tracking id of an event.", show_default="the whole consumer")
]


@inbox.command()
def migrate(
    database: Database,
    as_script: Annotated[bool, flag("Only print the SQL of all migrations.", "--print")] = False,
    back_to: Annotated[
        int | None, option("NUMBER", "Revert the migrations after this one.", "--back-to", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create the inbox tables, or bring them up to date.

    Creates a missing SQLite file. `--print` does not touch the database. Stop all consumers of another version before
    you run it. With `--back-to`, the tables return to what an older version needs, and no record is lost; run it
    before you install that version.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments.
    """
    if as_script:
        _print_script(database, as_json)
        return
    if back_to is not None:
        with open_inbox(database, as_json, is_new=True) as opened_inbox:
            reverted = opened_inbox.migrate(back_to=back_to)
        text = [f"reverted {name}" for name in reverted] or ["Nothing to revert."]
        print_result({"reverted": reverted}, text, as_json)
        return
    with open_inbox(database, as_json, is_new=True) as opened_inbox:
        applied = opened_inbox.migrate()
    print_result(
        {"applied": applied},
        [f"applied {name}" for name in applied] or ["Already up to date."],
        as_json,
    )


def _print_script(database: str, as_json: bool) -> None:
    from onceward.storage import migrations

    with refuse_mistakes(as_json):
        script = migrations.as_script(dialect_of(database))
    print_result({"sql": script}, script.split("\n"), as_json)


@inbox.command()
def stats(database: Database, as_json: AsJson = False) -> None:
    """Show the counts of each consumer.

    *unended*: events that were started and have not finished, because they still run or crashed. *in doubt*: effects
    whose outcome is unknown. *horizon*: events of an earlier day are refused. An unregistered consumer is listed if it
    has rows; no purge deletes those.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as opened_inbox:
        rows = opened_inbox.stats()
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
    days = {"oldest_day": "oldest_day", "horizon": "floor_day"}
    found = [
        {name: iso_day(row[days[name]]) if name in days else row[name] for name in columns} for row in rows
    ]
    if as_json:
        print_json(found)
    else:
        print_table(found, columns, "No consumer is registered.", usual={"registered": True, "horizon": None})


@inbox.command()
def purge(
    database: Database,
    consumer: Annotated[
        str | None, option("CONSUMER", "Purge only this one.", show_default="all registered")
    ] = None,
    reason: Annotated[str, option("TEXT", "Why; kept in the audit log.")] = "retention",
    trust_clock: TrustClock = False,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Delete the records of events that can no longer be delivered, while consumers keep running.

    First it raises each consumer's horizon: events of an earlier day are refused from then on. Then it deletes what is
    older than the retention, in small steps; on PostgreSQL whole days at once where possible. Records on hold and
    effects in doubt stay. You may interrupt it at any time; the next purge continues. The audit log records it.

    It deletes nothing if the database's clock was set ahead, or if more than a week seems to have passed while this
    machine was off: check the time, and confirm it once with --trust-clock.

    Exit code: 0; 1 if the database fails, its clock is in doubt, another purge is running, or something has to wait for
    the next purge; 2 for wrong arguments, an unknown consumer or missing tables; 130 after Ctrl-C.
    """
    with open_inbox(database, as_json) as opened_inbox, _progress(as_json) as progress:
        try:
            report = opened_inbox.purge(
                consumer, operator=who(operator), reason=reason, progress=progress, trust_clock=trust_clock
            )
        except KeyboardInterrupt:
            fail("interrupted; the next purge continues with the rest", as_json, INTERRUPTED)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report.unfinished:
        raise typer.Exit(FAILED)


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[PurgeReport], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    days = (MofNCompleteColumn(), "days, {task.fields[rows]:,} rows")
    with progress_bars(as_json, "purging", BarColumn(), *days, TimeElapsedColumn()) as bars:
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
    echo(
        f"Deleted {quantity(report.rows, 'dedup row')}, {quantity(report.attempts, 'attempt')} and "
        f"{quantity(report.effects, 'effect')} in {quantity(report.steps, 'step')}, the longest of "
        f"{report.longest_step * 1000:.0f} ms."
    )
    if report.dropped:
        echo(f"{len(report.dropped)} of the days were dropped as a whole: {', '.join(report.dropped)}")
    for name in report.skipped.keys() & report.floors.keys():
        echo(f"{name}: {report.skipped[name]}")
    for problem in report.unfinished:
        echo(f"Not finished: {problem}. The next purge continues with it.", err=True)


@inbox.command()
def hold(
    consumer: Consumer,
    database: Database,
    reason: Reason,
    tracking_id: TrackingId = None,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Protect the records of one event, or of a whole consumer, from every purge until they are released.

    It takes effect at once, even in a running purge. Placing a hold twice is the same as once: the first reason
    stays, and the output says who gave it. An event can be held before it arrives; the output says if it has no
    records, because its id may be wrong.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments, an unknown consumer or missing tables.
    """
    with open_inbox(database, as_json) as opened_inbox:
        _check_known(opened_inbox, consumer, as_json)
        is_new = opened_inbox.hold(consumer, tracking_id, reason=reason, operator=who(operator))
        known = tracking_id is None or _has_records(opened_inbox, consumer, tracking_id)
        earlier = "" if is_new else _earlier_hold(opened_inbox, consumer, tracking_id)
    hint = (
        "" if known else " The inbox has no record of this event: check the id, unless it has yet to arrive."
    )
    print_result(
        {"consumer_id": consumer, "tracking_id": tracking_id, "placed": is_new, "known": known},
        f"{_name(consumer, tracking_id)} {'is on hold' if is_new else 'was on hold already'}{earlier}.{hint}",
        as_json,
    )


@inbox.command()
def release(
    consumer: Consumer,
    database: Database,
    reason: Reason,
    tracking_id: TrackingId = None,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """End a hold. The next purge deletes what is past its retention.

    Without a tracking id it ends the hold on the whole consumer; holds on single events stay.

    Exit code: 0; 1 if there was no such hold or the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as opened_inbox:
        was_held = opened_inbox.release(consumer, tracking_id, reason=reason, operator=who(operator))
    if not was_held:
        fail(f"{_name(consumer, tracking_id)} was not on hold; see `onceward inbox holds`", as_json)
    print_result(
        {"consumer_id": consumer, "tracking_id": tracking_id, "released": True},
        f"{_name(consumer, tracking_id)} is no longer on hold.",
        as_json,
    )


@inbox.command()
def holds(database: Database, as_json: AsJson = False) -> None:
    """List what is on hold, since when, why and by whom.

    Exit code: 0, even if there is none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as opened_inbox:
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
    texts = [
        {**row, "tracking_id": row["tracking_id"] or "everything", "placed_at": for_people(row["placed_at"])}
        for row in found
    ]
    print_table(texts, columns, "Nothing is on hold.")


@inbox.command()
def effects(
    database: Database,
    every: Annotated[bool, flag("Include those whose outcome is known.", "--all/--in-doubt")] = False,
    limit: Annotated[int, option("N", "Maximum number, oldest first.", min=1)] = 100,
    as_json: AsJson = False,
) -> None:
    """List effects in doubt: begun, with an unknown outcome. Ask the provider with the key, and record its answer with
    `onceward inbox resolve`.

    *expired*: the provider has forgotten the key, so nothing calls the effect again.

    Exit code: 0, even if there is none; 1 if the database fails; 2 for wrong arguments or missing tables.
    """
    with open_inbox(database, as_json) as opened_inbox:
        rows = opened_inbox.effects(in_doubt=not every, limit=limit)
    found = [
        {
            **row,
            "expired": bool(row["expired"]),
            "intended_at": iso_time(row["intended_at"]),
            "settled_at": iso_time(row["settled_at"]),
        }
        for row in rows
    ]
    if as_json:
        print_json(found)
        return
    empty = "No effects." if every else "No effect is in doubt."
    print_table([effect_cells(row) for row in found], EFFECT_COLUMNS, empty)


EFFECT_COLUMNS = {"effect": "consumer\neffect", "event": "event\nkey\nerror", "state": "state\nbegun (UTC)"}


def effect_cells(effect: dict[str, Any]) -> dict[str, Any]:
    """Ids and keys have a line of their own, to be copied from a narrow terminal."""
    state = "in doubt" if effect["state"] == "intended" else effect["state"]
    return {
        "effect": (effect["consumer_id"], effect["name"]),
        "event": tuple(filter(None, (effect["tracking_id"], effect["effect_key"], effect["error"]))),
        "state": (f"{state}{', expired' if effect['expired'] else ''}", for_people(effect["intended_at"])),
    }


@inbox.command()
def resolve(
    consumer: Consumer,
    tracking_id: Annotated[str, argument("TRACKING_ID", "Tracking id of the event.")],
    effect: Annotated[str, argument("EFFECT", "Name of the effect, as in `onceward inbox effects`.")],
    database: Database,
    reason: Annotated[str, option("TEXT", "How you know; kept in the audit log.")],
    happened: Annotated[
        bool | None,
        flag(
            "What the provider says about the effect's key; one of the two is required.",
            "--happened/--did-not-happen",
        ),
    ] = None,
    result: Annotated[
        str | None, option("JSON", "What the call would have returned.", show_default="null")
    ] = None,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """Record whether an effect in doubt has happened. Ask the provider first: nothing can check your answer.

    After `--happened` the handler gets the result and does not call. After `--did-not-happen` it calls with a new key.
    Redrive the dead letter of the event afterwards.

    Exit code: 0; 1 if the database fails; 2 for wrong arguments, an effect that is not in doubt, an event in flight, or
    missing tables.
    """
    import json

    if happened is None:
        fail("what does the provider say? Add --happened or --did-not-happen", as_json, MISUSED)
    if result is not None and not happened:
        fail("only an effect that happened has a result; remove --result", as_json, MISUSED)
    try:
        returned = None if result is None else json.loads(result)
    except ValueError as error:
        fail(f"--result is not JSON: {error}", as_json, MISUSED)
    with open_letters(database, as_json) as letters:
        letters.resolve_effect(
            consumer,
            tracking_id,
            effect,
            happened=happened,
            result=returned,
            reason=reason,
            operator=who(operator),
        )
    state = "done" if happened else "refused"
    print_result(
        {"consumer_id": consumer, "tracking_id": tracking_id, "name": effect, "state": state},
        f"Effect {effect} of event {tracking_id} is recorded as {state}. If the event is a dead letter, redrive it.",
        as_json,
    )


def _check_known(opened_inbox: Inbox, consumer: str, as_json: bool) -> None:
    """Refuse an unknown consumer: a hold on a mistyped name would protect nothing."""
    registered: list[Any] = [row["consumer_id"] for row in opened_inbox.consumers()]
    if consumer not in registered:
        fail(unknown_consumer(consumer, registered), as_json, MISUSED)


def _has_records(opened_inbox: Inbox, consumer: str, tracking_id: str) -> bool:
    from onceward._ids import same_id
    from onceward.db import DbSession

    this = {"consumer": consumer, "tracking": same_id(tracking_id)}
    with DbSession(opened_inbox.engine) as session:
        return any(session.fetch_one(_RECORD.format(table=table), this) for table in _RECORDS)


_RECORDS = ("onceward_dedup", "onceward_attempts", "onceward_effects", "onceward_parked")
_RECORD = "SELECT 1 FROM {table} WHERE consumer_id = :consumer AND tracking_id = :tracking LIMIT 1"


def _earlier_hold(inbox: Inbox, consumer: str, tracking_id: str | None) -> str:
    """Who placed it, and why."""
    from onceward._ids import same_id

    held = (consumer, same_id(tracking_id or ""))
    for row in inbox.holds():
        if (row["consumer_id"], same_id(row["tracking_id"])) == held:
            since = for_people(iso_time(row["placed_at"]))
            return f", by {row['operator']} since {since} UTC: {row['reason']}. The new reason was not stored"
    return ""


def _name(consumer: str, tracking_id: str | None) -> str:
    return f"Everything of {consumer}" if tracking_id is None else f"Event {tracking_id} of {consumer}"
