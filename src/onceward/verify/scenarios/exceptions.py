"""An exception at each boundary, then the event again. Also finds handlers that pass over an exception."""

from __future__ import annotations

from onceward._text import quantity
from onceward.verify import tables
from onceward.verify.faults import Fault, inner_boundaries
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery
from onceward.verify.trial import Run, Trial, Tried, deliver_all, unsettled

MOST_WRITES = 8
"""Of more, some are chosen."""
MOST_FINDINGS = 4
"""Boundaries that are told of one scenario; more say the same."""


def exceptions(trial: Trial) -> Tried:
    faults = chosen(trial, inner_boundaries(trial.most("writes"), trial.most("effects"), "raise"))
    findings: list[Finding] = []
    for fault in faults:
        run = trial.perform(lambda stage, fault=fault: deliver_all(stage, trial.plan.events, fault))  # type: ignore[misc]
        findings += _judged(trial, fault, run)
        if len(findings) >= MOST_FINDINGS:
            break
    return Tried(findings, f"at {quantity(len(faults), 'boundary', 'boundaries')}")


def chosen(trial: Trial, faults: list[Fault]) -> list[Fault]:
    """All, or those around some of the writes where there are many."""
    most = max((fault.number for fault in faults), default=0)
    if most <= MOST_WRITES:
        return faults
    numbers = {0, 1, most, *trial.chance.sample(range(2, most), MOST_WRITES - 2)}
    return [fault for fault in faults if fault.number in numbers]


def _judged(trial: Trial, fault: Fault, run: Run) -> list[Finding]:
    deliveries: list[Delivery] = run.value
    story = f"after an exception {fault}, and the same event again"
    told = trial.differences(run.rows)
    swallowed = [each.event for each in deliveries if each.swallowed]
    if told and swallowed:
        return [
            Finding(
                f"an exception {fault} of event {swallowed[0]!r} was swallowed: the handler caught it and returned, "
                "so the event counts as done; let it go on",
                tuple(told),
            )
        ]
    failed = unsettled(story, deliveries)
    if not told and not failed:
        return []
    text = f"{story}, the database is not as after one clean delivery"
    if not trial.differences(_in_new_processes(trial, fault)):
        text += (
            ". With a new process for each attempt it is: the first attempt left something behind in the process, on "
            "self, on the class or in a module"
        )
    return [Finding(text, (*told, *map(str, failed)))]


def _in_new_processes(trial: Trial, fault: Fault) -> tables.Rows:
    place = trial.new_place()
    for event in trial.plan.events:
        trial.perform(lambda stage, event=event: stage.deliver(stage.instance(), event, fault), place)  # type: ignore[misc]
        trial.perform(lambda stage, event=event: deliver_all(stage, [event]), place)  # type: ignore[misc]
    return trial.rows_at(place)
