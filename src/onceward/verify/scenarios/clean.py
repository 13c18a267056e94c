"""Each event once, in its own process, without faults: the oracle. Done twice, on two databases, to compare the two."""

from __future__ import annotations

from collections.abc import Sequence

from onceward._text import quantity
from onceward.transaction import Transaction
from onceward.verify import tables
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery
from onceward.verify.trial import Assessment, Trial, deliver_all, unsettled


def clean(trial: Trial) -> Assessment:
    first, rows = deliver_cleanly(trial, trial.plan.events)
    trial.deliveries, trial.oracle = first, rows
    findings = unsettled("delivered once to a new instance", first)
    findings += [
        Finding(
            f"for event {each.event!r} the handler returned an exception instead of raising it: {each.returned}"
        )
        for each in first
        if each.returned
    ]
    if not findings:
        _, again = deliver_cleanly(trial, trial.plan.events)
        findings = _compare(trial, rows, again)
    events, writes = quantity(len(trial.plan.events), "event"), quantity(trial.most("writes"), "write")
    return Assessment(findings, f"{events}, {writes} at most")


def deliver_cleanly(trial: Trial, events: Sequence[Transaction]) -> tuple[list[Delivery], tables.Rows]:
    database = trial.new_database()
    deliveries: list[Delivery] = []
    rows: tables.Rows = {}
    for event in events:
        run = trial.perform(lambda stage, event=event: deliver_all(stage, [event]), database)  # type: ignore[misc]
        deliveries += run.value
        rows = run.rows
    return deliveries, rows


def _compare(trial: Trial, one: tables.Rows, other: tables.Rows) -> list[Finding]:
    lines = trial.differences(other, one)
    if not lines:
        return []
    columns = tables.differing_columns(one, other, trial.tables, trial.plan.options.exclude)
    advice = f"exclude={columns}" if columns else "exclude=[…]"
    return [
        Finding(
            "two clean deliveries of the same events leave different rows, so nothing can be compared; take these "
            f"values from the event, or leave the columns out with {advice}",
            tuple(lines),
        )
    ]
