"""kill -9 at each boundary, in a real process; then another process, and the event again."""

from __future__ import annotations

import msgspec

from onceward._text import quantity
from onceward.transaction import Transaction
from onceward.verify.faults import Boundary, Fault, inner_boundaries
from onceward.verify.report import Finding
from onceward.verify.scenarios.exceptions import MOST_FINDINGS, chosen
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Trial, Tried, deliver_all, unsettled


def kills(trial: Trial) -> Tried:
    inner = inner_boundaries(trial.most("writes"), trial.most("effects"), "kill")
    faults = chosen(trial, [Fault(Boundary.BEFORE_DEDUP, 0, "kill"), *inner])
    findings: list[Finding] = []
    killed = 0
    for fault in faults:
        found, times = _killed_at(trial, fault)
        findings += found
        killed += times
        if len(findings) >= MOST_FINDINGS:
            break
    boundaries = quantity(len(faults), "boundary", "boundaries")
    return Tried(findings, f"{quantity(killed, 'process', 'processes')} killed at {boundaries}")


def _killed_at(trial: Trial, fault: Fault) -> tuple[list[Finding], int]:
    """Each process does what the one before it left undone, and is killed with the next event."""
    story = f"after kill -9 {fault}, and the same event again"
    place = trial.new_place()
    killed = 0
    undone: list[Transaction] = []
    for event in trial.plan.events:
        if trial.doom(_resume(undone, event, fault), place):
            undone = [event]
            killed += 1
        else:
            undone = []  # it never came to that boundary, and is done
    run = trial.perform(_resume(undone, None, fault), place)
    findings = unsettled(story, run.value)
    return findings + trial.compare(story, run.rows), killed


class _resume(msgspec.Struct, frozen=True):
    """What a process does after a restart."""

    undone: list[Transaction]
    event: Transaction | None
    fault: Fault

    def __call__(self, stage: Stage) -> list[Delivery]:
        stage.let_leases_run_out()
        task = stage.instance()
        deliveries = deliver_all(stage, self.undone, task=task)
        if self.event is not None:
            stage.settle(task, self.event, self.fault)
        return deliveries
