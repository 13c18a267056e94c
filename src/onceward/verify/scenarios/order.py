"""Every order of a few events, some orders of more. If the contract declares sequencing, outcomes are not compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, permutations
from typing import Any

from onceward.transaction import Transaction
from onceward.verify import tables
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, NotApplicable, Trial, unsettled

SMALL = 5
"""Up to this many events, every order is tried."""
SOME = 60
"""Orders to try of more events."""
FEW = 12
"""Orders to try if each needs a copy of the database, or if outcomes are not compared."""
ROUNDS = 4
"""Extra deliveries of an event that cannot succeed yet."""

Order = Sequence[Transaction]


def order(trial: Trial) -> Assessment:
    events = trial.plan.events
    if len(events) < 2:
        raise NotApplicable("one event has no order; pass at least two")
    declared = trial.plan.contract.sequencing != "none"
    orders = list(_orders(trial, few=declared or not trial.databases.renewing_is_cheap))
    tried = f"{len(orders)} orders of {len(events)} events"

    def act(stage: Stage) -> Any:
        return next(_wrong_orders(trial, stage, orders, compared=not declared), None)

    wrong = trial.perform(act).value
    if declared:
        findings = [] if wrong is None else unsettled(f"in the order {_format(wrong[0])}", wrong[1])
        return Assessment(findings, f"{tried}, not compared: sequencing={trial.plan.contract.sequencing!r}")
    return Assessment([] if wrong is None else [_finding(trial, *wrong)], tried)


def _finding(trial: Trial, wrong: Order, deliveries: list[Delivery], rows: tables.Rows) -> Finding:
    return Finding(
        f"the outcome depends on the order of events: in the order {_format(wrong)} it differs from the order "
        f"{_format(trial.plan.events)}. Events may overtake one another: declare sequencing='latest-wins' or 'strict' "
        "in the contract, or make the writes independent of the order",
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


def _wrong_orders(trial: Trial, stage: Stage, orders: list[Order], *, compared: bool) -> Iterator[Any]:
    """The orders that do not lead to the oracle. In one child for speed, each on a fresh database."""
    for number, each in enumerate(orders):
        if number:
            act = partial(deliver_in_rounds, events=each)
            deliveries, rows = trial.on_fresh_database(stage, act)
        else:
            deliveries, rows = deliver_in_rounds(stage, each), stage.rows(trial.tables)
        failed = bool(unsettled("", deliveries))
        if failed or (compared and trial.differences(rows)):
            yield each, deliveries, rows


def deliver_in_rounds(stage: Stage, events: Order) -> list[Delivery]:
    """Deliver each event once, then redeliver those that failed or were parked, as a source does."""
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


def _format(events: Order) -> str:
    ids = ", ".join(event.id for event in islice(events, 6))
    return f"({ids}{', …' if len(events) > 6 else ''})"
