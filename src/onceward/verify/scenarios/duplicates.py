"""The same event again: at once after the first, at the same time, in other processes, and everything once more."""

from __future__ import annotations

from typing import Any

from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Trial, Tried, deliver_all, done_twice, unsettled

IN_SERIES = 3
IN_THREADS = 4
PROCESSES = 3


def in_series(trial: Trial) -> Tried:
    story = f"delivered {IN_SERIES} times in a row"

    def act(stage: Stage) -> list[Delivery]:
        task = stage.instance()
        events = [event for event in trial.plan.events for _ in range(IN_SERIES)]
        return deliver_all(stage, events, task=task)

    run = trial.perform(act)
    return Tried(_judged(trial, story, run), story)


def at_once(trial: Trial) -> Tried:
    kind = "tasks" if trial.plan.asynchronous else "threads"
    story = f"delivered in {IN_THREADS} {kind} at once"
    run = trial.perform(lambda stage: stage.settle_at_once(trial.plan.events, IN_THREADS), watched=False)
    return Tried(_judged(trial, story, run), story)


def in_processes(trial: Trial) -> Tried:
    story = f"delivered in {PROCESSES} processes at once"
    place = trial.new_place()
    answers = trial.perform_at_once(lambda stage: deliver_all(stage, trial.plan.events), PROCESSES, place)
    deliveries = [delivery for answer in answers for delivery in answer]
    findings = unsettled(story, deliveries) + done_twice(story, deliveries)
    return Tried(findings + trial.compare(story, trial.rows_at(place)), story)


def replay(trial: Trial) -> Tried:
    story = "after a restart, delivered from the beginning, twice"
    place = trial.new_place()
    trial.perform(lambda stage: deliver_all(stage, trial.plan.events), place)
    run = trial.perform(lambda stage: deliver_all(stage, [*trial.plan.events, *trial.plan.events]), place)
    findings = unsettled(story, run.value)
    findings += [
        Finding(f"{story}, the handler was called again for event {each.event!r}")
        for each in run.value
        if each.called
    ]
    return Tried(findings + trial.compare(story, run.rows), story)


def _judged(trial: Trial, story: str, run: Any) -> list[Finding]:
    findings = unsettled(story, run.value) + done_twice(story, run.value)
    return findings + trial.compare(story, run.rows)
