"""Each event once, in its own process, without faults: the oracle. Done twice, on two databases, to compare the two."""

from __future__ import annotations

import time

from onceward._text import quantity
from onceward.transaction import Transaction
from onceward.verify.report import Finding
from onceward.verify.rows import tables
from onceward.verify.rows.messages import MESSAGES, ids_of
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, Trial, deliver_all, deliver_cleanly, other_keys, unsettled


def clean(trial: Trial) -> Assessment:
    first, rows = _deliver_first(trial)
    trial.deliveries, trial.oracle = first, rows
    findings = unsettled("delivered once to a new instance", first)
    findings += [
        Finding(
            f"for event {each.event!r} the handler returned an exception instead of raising it: {each.returned}"
        )
        for each in first
        if each.returned
    ]
    findings += [
        Finding(
            f"for event {each.event!r} a message was not sent, and the handler caught the error and returned, so the "
            f"event counts as done: {each.unsent}. Let it raise"
        )
        for each in first
        if each.unsent
    ]
    if not findings:
        _let_clocks_go_on(trial, rows)
        trial.again, again = deliver_cleanly(trial, trial.plan.events)
        again = trial.settle_doubts(again)
        findings = other_keys(first, trial.again) + _compare(trial, trial.oracle, again) + _attached(trial)
    events, writes = quantity(len(trial.plan.events), "event"), quantity(trial.most("writes"), "write")
    return Assessment(findings, f"{events}, {writes} at most")


def _deliver_first(trial: Trial) -> tuple[list[Delivery], tables.Rows]:
    """Deliver the events, and note which tables each of them changes."""
    database = trial.new_database()
    deliveries: list[Delivery] = []
    rows: tables.Rows = {}

    def deliver(stage: Stage, event: Transaction) -> tuple[list[Delivery], list[str]]:
        before = stage.rows(trial.tables, all_columns=True)
        found = deliver_all(stage, [event])
        after = stage.rows(trial.tables, all_columns=True)
        return found, [name for name in after if after[name] != before.get(name, tables.NO_ROWS)]

    for event in trial.plan.events:
        run = trial.perform(lambda stage, event=event: deliver(stage, event), database)  # type: ignore[misc]
        found, trial.changes[event.id] = run.value
        deliveries += found
        rows = run.rows
    return deliveries, rows


def _let_clocks_go_on(trial: Trial, rows: tables.Rows) -> None:
    """If times are compared that are not those of a clock, a default may have computed them: SQLite's change once a
    second."""
    doubtful = [table for table in trial.tables if table.doubtful and table.name in rows]
    may_be_computed = trial.plan.options.exclude is None and trial.databases.backend == "sqlite"
    if may_be_computed and any(tables.has_other_times(rows[each.name], each) for each in doubtful):
        time.sleep(1.1)


def _compare(trial: Trial, one: tables.Rows, other: tables.Rows) -> list[Finding]:
    exclude = trial.plan.options.exclude
    lines = trial.differences(other, one)
    if not lines:
        return []
    if ids_of(one, exclude) != ids_of(other, exclude) and one[MESSAGES].total() == other[MESSAGES].total():
        return [
            Finding(
                "two clean deliveries of the same events send messages with other ids, so a consumer takes a copy for "
                "another message. Leave id out, and session.send derives one from event, consumer and name; or make "
                "it of what the event says",
                tuple(line for line in lines if line.startswith(MESSAGES)),
            )
        ]
    columns = tables.differing_columns(one, other, trial.tables, exclude)
    advice = f"exclude={columns}" if columns else "exclude=[…]"
    return [
        Finding(
            "two clean deliveries of the same events leave different rows, so nothing can be compared; take these "
            f"values from the event, or leave the columns out with {advice}",
            tuple(lines),
        )
    ]


def _attached(trial: Trial) -> list[Finding]:
    if trial.databases.backend != "sqlite":
        return []
    attached = {table.name: table.place[0] for table in trial.tables if table.place[0] != "main"}
    return [
        Finding(
            f"event {event!r} wrote to {name}, in the attached database {attached[name]!r}: SQLite commits each file "
            "on its own, so a crash can keep one without the other. Keep the tables of a consumer in one database"
        )
        for event, changed in trial.changes.items()
        for name in changed
        if name in attached
    ]
