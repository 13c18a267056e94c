"""Each event type writes a row or has an effect, unless the contract says that it has none."""

from __future__ import annotations

from collections import defaultdict

from onceward._text import quantity
from onceward.inbox import Event
from onceward.verify.report import Finding
from onceward.verify.stage import Delivery
from onceward.verify.trial import Assessment, Trial


def every_type(trial: Trial) -> Assessment:
    """Looks at the clean delivery. A sample may do nothing, such as a cancellation of what was never ordered; all
    samples of a type may not."""
    contract = trial.plan.contract
    types = {event.id: Event.of(event).event_type for event in trial.plan.events}
    handled: dict[str, list[Delivery]] = defaultdict(list)
    for delivery in trial.deliveries:
        if delivery.called:  # a superseded event never reaches the handler
            handled[types[delivery.event]].append(delivery)
    findings = [
        _finding(event_type, deliveries)
        for event_type, deliveries in handled.items()
        if contract.has_effects(event_type) and not any(_did_something(trial, each) for each in deliveries)
    ]
    findings += [
        Finding(
            f"the contract says that events of type {event_type!r} change nothing, but event {each.event!r} wrote a "
            "row or had an effect; remove the type from no_effects"
        )
        for event_type, deliveries in handled.items()
        for each in deliveries
        if not contract.has_effects(event_type) and _did_something(trial, each)
    ]
    return Assessment(findings, quantity(len(handled), "event type"))


def _did_something(trial: Trial, delivery: Delivery) -> bool:
    return bool(trial.changes[delivery.event]) or delivery.touched or delivery.effects > 0


def _finding(event_type: str, deliveries: list[Delivery]) -> Finding:
    samples = ", ".join(repr(each.event) for each in deliveries)
    return Finding(
        f"no sample of event type {event_type!r} ({samples}) wrote a row or had an effect. If the handler is to do "
        "something, it does not, or not for these samples: add one that it acts upon. If it is not, say so in the "
        f"contract: no_effects=[{event_type!r}]"
    )
