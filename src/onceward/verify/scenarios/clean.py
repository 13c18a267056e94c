"""Each event once, in a process of its own, without any trouble; twice over, on two databases. That is the oracle."""

from __future__ import annotations

from collections.abc import Sequence

from onceward._text import quantity
from onceward.transaction import Transaction
from onceward.verify import tables
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery
from onceward.verify.trial import Trial, Tried, deliver_all, unsettled


def clean(trial: Trial) -> Tried:
    first, rows = delivered_cleanly(trial, trial.plan.events)
    trial.deliveries, trial.oracle = first, rows
    findings = unsettled("delivered once, to a new instance", first)
    findings += [
        Finding(
            f"with event {each.event!r} the handler returned an exception instead of raising it: {each.returned}"
        )
        for each in first
        if each.returned
    ]
    if not findings:
        _, again = delivered_cleanly(trial, trial.plan.events)
        findings = _same_twice(trial, rows, again)
    events, writes = quantity(len(trial.plan.events), "event"), quantity(trial.most("writes"), "write")
    return Tried(findings, f"{events}, {writes} at most")


def delivered_cleanly(trial: Trial, events: Sequence[Transaction]) -> tuple[list[Delivery], tables.Rows]:
    place = trial.new_place()
    deliveries: list[Delivery] = []
    rows: tables.Rows = {}
    for event in events:
        run = trial.perform(lambda stage, event=event: deliver_all(stage, [event]), place)  # type: ignore[misc]
        deliveries += run.value
        rows = run.rows
    return deliveries, rows


def _same_twice(trial: Trial, one: tables.Rows, other: tables.Rows) -> list[Finding]:
    told = trial.differences(other, one)
    if not told:
        return []
    columns = tables.differing_columns(one, other, trial.tables, trial.plan.asked.exclude)
    advice = f"exclude={columns}" if columns else "exclude=[…]"
    return [
        Finding(
            "two clean deliveries of the same events leave different rows, so nothing can be compared; take such "
            f"values from the event, or leave these columns out with {advice}",
            tuple(told),
        )
    ]
