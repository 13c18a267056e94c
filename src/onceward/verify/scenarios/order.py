"""Every order of a few events, some orders of more. With `order_by`, those in which no event overtakes another of its
key. If the contract declares sequencing, outcomes are not compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice, permutations
from typing import Any

from onceward.transaction import Transaction
from onceward.verify.report import Finding
from onceward.verify.rows import tables
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
    given = _orders(trial, few=declared or not trial.databases.renewing_is_cheap)
    orders = [*{_ids(each): each for each in (_in_lines(trial, each) for each in given)}.values()]
    if orders == [events]:
        raise NotApplicable("order_by keeps these events in order: they have one key; pass some of another")
    tried = f"{len(orders)} orders of {len(events)} events"

    def act(stage: Stage) -> Any:
        return next(_wrong_orders(trial, stage, orders, compared=not declared), None)

    wrong = trial.perform(act).value
    if declared:
        findings = [] if wrong is None else unsettled(f"in the order {_format(wrong[0])}", wrong[1])
        return Assessment(findings, f"{tried}, not compared: sequencing={trial.plan.contract.sequencing!r}")
    return Assessment([] if wrong is None else [_finding(trial, *wrong)], tried)


def _finding(trial: Trial, wrong: Order, deliveries: list[Delivery], rows: tables.Rows) -> Finding:
    advice = (
        "Events may overtake one another: declare sequencing='latest-wins' or 'strict' in the contract, keep those of "
        "one key in order with order_by=…, or make the writes independent of the order"
    )
    if tables.differ_in_digits(trial.oracle, rows):
        advice = (
            "Only the last digits differ: floating-point numbers add up to another sum in another order. Use whole "
            "numbers, such as cents, or NUMERIC on PostgreSQL"
        )
    return Finding(
        f"the outcome depends on the order of events: in the order {_format(wrong)} it differs from the order "
        f"{_format(trial.plan.events)}. {advice}",
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


def _in_lines(trial: Trial, order: Order) -> Order:
    """The order in which the events run if they arrive in the order of the samples, and no line overtakes itself."""
    lines: dict[str | None, Iterator[Transaction]] = {}
    for event in trial.plan.events:
        line = trial.plan.line_of(event)
        if line is not None and line not in lines:
            lines[line] = iter([each for each in trial.plan.events if trial.plan.line_of(each) == line])
    found = (lines.get(trial.plan.line_of(event)) for event in order)
    return tuple(event if line is None else next(line) for event, line in zip(order, found, strict=True))


def _ids(order: Order) -> tuple[str, ...]:
    return tuple(event.id for event in order)


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
    """Deliver each event once, then redeliver those that failed or were parked, as a source does. Those behind them in
    line wait."""
    task = stage.instance()
    waiting, last = list(events), {}
    for attempt in range(ROUNDS + len(events)):
        undone: list[Transaction] = []
        for event in waiting:
            if all(stage.plan.may_meet(event, each) for each in undone):
                last[event.id] = stage.deliver(task, event)
                if last[event.id].succeeded:
                    continue
            undone.append(event)
        waiting = undone
        if not waiting:
            break
        time.sleep(0.005 * attempt)
    return list(last.values())


def _format(events: Order) -> str:
    ids = ", ".join(event.id for event in islice(events, 6))
    return f"({ids}{', …' if len(events) > 6 else ''})"
