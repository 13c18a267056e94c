"""kill -9 at each boundary, in a real process; then the event again, in another process."""

from __future__ import annotations

import msgspec

from onceward._text import quantity
from onceward.transaction import Transaction
from onceward.verify.faults import DeliveryBoundary, Fault, handler_faults
from onceward.verify.report import Finding
from onceward.verify.scenarios.exceptions import MOST_FINDINGS, choose
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, Trial, deliver_all, unsettled


def kills(trial: Trial) -> Assessment:
    inner = handler_faults(trial.most("writes"), trial.most("effects"), "kill")
    faults = choose(trial, [Fault(DeliveryBoundary.BEFORE_DEDUP, 0, "kill"), *inner])
    findings: list[Finding] = []
    killed = 0
    for fault in faults:
        found, times = _kill_at(trial, fault)
        findings += found
        killed += times
        if len(findings) >= MOST_FINDINGS:
            break
    boundaries = quantity(len(faults), "boundary", "boundaries")
    return Assessment(findings, f"{quantity(killed, 'process', 'processes')} killed at {boundaries}")


def _kill_at(trial: Trial, fault: Fault) -> tuple[list[Finding], int]:
    """Each process does what its predecessor left undone, and is killed during the next event."""
    story = f"after kill -9 {fault}, and the same event again"
    database = trial.new_database()
    killed = 0
    undone: list[Transaction] = []
    for event in trial.plan.events:
        if trial.perform_until_killed(_Resume(undone, event, fault), database):
            undone = [event]
            killed += 1
        else:
            undone = []  # it never reached that boundary, and is done
    run = trial.perform(_Resume(undone, None, fault), database)
    findings = unsettled(story, run.value)
    return findings + trial.compare(story, run.rows), killed


class _Resume(msgspec.Struct, frozen=True):
    """What a process does after a restart."""

    undone: list[Transaction]
    event: Transaction | None
    fault: Fault

    def __call__(self, stage: Stage) -> list[Delivery]:
        stage.expire_leases()
        task = stage.instance()
        deliveries = deliver_all(stage, self.undone, task=task)
        if self.event is not None:
            stage.settle(task, self.event, self.fault)
        return deliveries
