"""All events in one batch, which share a commit: without a fault, with an exception and with kill -9 inside it."""

from __future__ import annotations

from math import ceil

from onceward._text import quantity
from onceward.inbox.commits.group import commit_of
from onceward.verify.faults import DeliveryBoundary, Fault
from onceward.verify.report import Finding
from onceward.verify.scenarios.exceptions import MOST_FINDINGS, choose
from onceward.verify.scenarios.lost_updates import like
from onceward.verify.stage import Stage
from onceward.verify.trial import Assessment, NotApplicable, Trial, deliver_all, unsettled

TOGETHER = "delivered together"
MANY = 100
"""Events of a large batch."""


def groups(trial: Trial) -> Assessment:
    plan = trial.plan
    if commit_of(plan.consumer, plan.contract, trial.databases.backend) == "each":
        raise NotApplicable("its events are committed one by one")
    if len(plan.events) < 2 and not _takes_others(trial):
        raise NotApplicable("there is only one event")
    writes = sum(each.writes for each in trial.deliveries if each.succeeded)
    places = [Fault(DeliveryBoundary.AFTER_WRITE, number) for number in range(1, writes + 1)]
    places += [Fault(DeliveryBoundary.BEFORE_COMMIT), Fault(DeliveryBoundary.AFTER_COMMIT)]
    findings = _deliver(trial, None) or _deliver_many(trial)
    killed = 0
    for place in choose(trial, places):
        if len(findings) >= MOST_FINDINGS:
            break
        findings += _deliver(trial, place)
        found, was_killed = _kill(trial, Fault(place.boundary, place.number, "kill"))
        findings += found
        killed += was_killed
    return Assessment(findings, f"{quantity(killed, 'process', 'processes')} killed inside a group")


def _deliver(trial: Trial, fault: Fault | None) -> list[Finding]:
    story = f"{TOGETHER}, after an exception {fault}" if fault else f"{TOGETHER}, in one group"
    run = trial.perform(lambda stage: stage.settle_together(stage.instance(), trial.plan.events, fault))
    return _not_done(story, run.value) + trial.compare(story, run.rows)


def _deliver_many(trial: Trial) -> list[Finding]:
    """A large batch of events like the samples: a handler that takes a list may stop before its end. A group needs no
    more than two."""
    plan = trial.plan
    most = MANY if getattr(plan.consumer, "takes_batches", False) else 2
    if most <= len(plan.events) or not _takes_others(trial):
        return []
    times = ceil(most / len(plan.events))
    more = [like(each, number) for number in range(1, times) for each in plan.events]
    events = [*plan.events, *more]
    alone = trial.perform(lambda stage: deliver_all(stage, events))
    if unsettled("", alone.value):  # such a payload may come only once
        return []
    story = f"{TOGETHER}, {len(events)} events like the samples in one batch"
    run = trial.perform(lambda stage: stage.settle_together(stage.instance(), events, None))
    lines = trial.differences(run.rows, alone.rows)
    differs = [Finding(f"{story}, the rows differ from those of one after another", tuple(lines))]
    return _not_done(story, run.value) + (differs if lines else [])


def _takes_others(trial: Trial) -> bool:
    """Whether other events like the samples are for it: the producer's numbers say which come next."""
    return trial.plan.contract.sequencing == "none"


def _kill(trial: Trial, fault: Fault) -> tuple[list[Finding], bool]:
    events, database = trial.plan.events, trial.new_database()
    story = f"{TOGETHER}, after kill -9 {fault} of the group, and all of them again"

    def again(stage: Stage) -> list[str]:
        stage.expire_leases()
        return stage.settle_together(stage.instance(), events, None)

    was_killed = trial.perform_until_killed(
        lambda stage: stage.settle_together(stage.instance(), events, fault), database
    )
    run = trial.perform(again, database)
    return _not_done(story, run.value) + trial.compare(story, run.rows), was_killed


def _not_done(story: str, problems: list[str]) -> list[Finding]:
    return [Finding(f"{story}, {problem}") for problem in problems]
