"""Every order of a small set, some of a larger one. A contract that declares sequencing has answered for its order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from typing import Any

from onceward.transaction import Transaction
from onceward.verify import tables
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import NotApplicable, Trial, Tried, unsettled

SMALL = 5
"""Events of which every order is tried."""
SOME = 60
"""Orders that are tried of a larger set."""
FEW = 12
"""Orders that are tried where each needs a database to be copied, or where they are not compared."""
ROUNDS = 4
"""Deliveries of an event that fails because its time has not come."""

Order = Sequence[Transaction]


def order(trial: Trial) -> Tried:
    events = trial.plan.events
    if len(events) < 2:
        raise NotApplicable("one event has no order; give two at least")
    declared = trial.plan.contract.sequencing != "none"
    orders = list(_orders(trial, few=declared or not trial.databases.renewing_is_cheap))
    tried = f"{len(orders)} orders of {len(events)} events"

    def act(stage: Stage) -> Any:
        return next(_wrong(trial, stage, orders, compared=not declared), None)

    wrong = trial.perform(act).value
    if declared:
        findings = [] if wrong is None else unsettled(f"in the order {_named(wrong[0])}", wrong[1])
        return Tried(findings, f"{tried}, not compared: sequencing={trial.plan.contract.sequencing!r}")
    return Tried([] if wrong is None else [_finding(trial, *wrong)], tried)


def _finding(trial: Trial, wrong: Order, deliveries: list[Delivery], rows: tables.Rows) -> Finding:
    return Finding(
        f"the outcome depends on the order of events: in the order {_named(wrong)} it is another than in the order "
        f"{_named(trial.plan.events)}. Events may overtake one another: declare sequencing='latest-wins' or 'strict' "
        "in the contract, or write so that the order does not matter",
        (*trial.differences(rows), *map(str, unsettled("in that order", deliveries))),
    )


def _orders(trial: Trial, *, few: bool) -> Iterator[Order]:
    events = trial.plan.events
    if len(events) <= SMALL and not few:
        yield from permutations(events)
        return
    yield tuple(reversed(events))
    for _ in range((FEW if few else SOME) - 1):
        yield trial.chance.sample(events, len(events))


def _wrong(trial: Trial, stage: Stage, orders: list[Order], *, compared: bool) -> Iterator[Any]:
    """The orders that do not lead to the oracle. In one child, for speed, each on a fresh database."""
    for number, each in enumerate(orders):
        if number:
            deliveries, rows = trial.on_another(stage, lambda other, each=each: _in_rounds(other, each))  # type: ignore[misc]
        else:
            deliveries, rows = _in_rounds(stage, each), stage.rows(trial.tables)
        failed = bool(unsettled("", deliveries))
        if failed or (compared and trial.differences(rows)):
            yield each, deliveries, rows


def _in_rounds(stage: Stage, events: Order) -> list[Delivery]:
    """Each once, then those again that failed or had to wait: a source brings them back later."""
    task = stage.instance()
    waiting, last = list(events), {}
    for attempt in range(ROUNDS + len(events)):
        for event in waiting:
            last[event.id] = stage.deliver(task, event)
        waiting = [event for event in waiting if not last[event.id].succeeded]
        if not waiting:
            break
        time.sleep(0.005 * attempt)
    return list(last.values())


def _named(events: Order) -> str:
    shown = ", ".join(event.id for event in islice(events, 6))
    return f"({shown}{', …' if len(events) > 6 else ''})"
