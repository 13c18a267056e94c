"""The same event again: right after the first, at the same time, in other processes, and everything after a restart."""

from __future__ import annotations

from typing import Any

from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, Trial, deliver_all, not_done_once, unsettled

IN_SERIES = 3
IN_THREADS = 4
PROCESSES = 3


def in_series(trial: Trial) -> Assessment:
    story = f"delivered {IN_SERIES} times in a row"

    def act(stage: Stage) -> list[Delivery]:
        task = stage.instance()
        events = [event for event in trial.plan.events for _ in range(IN_SERIES)]
        return deliver_all(stage, events, task=task)

    run = trial.perform(act)
    return Assessment(_findings(trial, story, run), story)


def at_once(trial: Trial) -> Assessment:
    kind = "tasks" if trial.plan.asynchronous else "threads"
    story = f"delivered in {IN_THREADS} {kind} at once"
    run = trial.perform(lambda stage: stage.settle_at_once(trial.plan.events, IN_THREADS))
    return Assessment(_findings(trial, story, run), story)


def in_processes(trial: Trial) -> Assessment:
    story = f"delivered in {PROCESSES} processes at once"
    database = trial.new_database()
    answers = trial.perform_at_once(
        [lambda stage: deliver_all(stage, trial.plan.events)] * PROCESSES, database
    )
    deliveries = [delivery for answer in answers for delivery in answer]
    findings = unsettled(story, deliveries) + not_done_once(story, deliveries)
    return Assessment(findings + trial.compare(story, trial.rows_in(database)), story)


def replay(trial: Trial) -> Assessment:
    story = "after a restart, delivered from the beginning, twice"
    database = trial.new_database()
    trial.perform(lambda stage: deliver_all(stage, trial.plan.events), database)
    run = trial.perform(lambda stage: deliver_all(stage, [*trial.plan.events, *trial.plan.events]), database)
    findings = unsettled(story, run.value)
    findings += [
        Finding(f"{story}, the handler was called again for event {each.event!r}")
        for each in run.value
        if each.called
    ]
    return Assessment(findings + trial.compare(story, run.rows), story)


def _findings(trial: Trial, story: str, run: Any) -> list[Finding]:
    findings = unsettled(story, run.value) + not_done_once(story, run.value)
    return findings + trial.compare(story, run.rows)
