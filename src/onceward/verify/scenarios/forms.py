"""The same event in other forms: with a field nobody knows, without one that may be missing, in an older version."""

from __future__ import annotations

from collections import defaultdict

from onceward._text import quantity
from onceward.inbox import Event
from onceward.transaction import Transaction
from onceward.verify.plan import optional_fields, with_unknown_fields, without
from onceward.verify.report import Finding
from onceward.verify.scenarios.clean import delivered_cleanly
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import NotApplicable, Trial, Tried, deliver_all, unsettled


def unknown_fields(trial: Trial) -> Tried:
    story = "with an unknown field in each payload"
    changed = [with_unknown_fields(event) for event in trial.plan.events]
    if not any(changed):
        raise NotApplicable("the payloads have no fields")
    events = [new or old for new, old in zip(changed, trial.plan.events, strict=True)]
    run = trial.perform(lambda stage: deliver_all(stage, events))
    return Tried(unsettled(story, run.value) + trial.compare(story, run.rows), story)


def missing_fields(trial: Trial) -> Tried:
    """What the outcome is then is up to the handler; but it has to have one."""
    names = [*trial.plan.asked.optional, *optional_fields(trial.plan.contract.model)]
    if not names:
        raise NotApplicable(
            "no field is optional: the contract has no model with defaults, and optional=[…] names none"
        )
    findings: list[Finding] = []
    for name in dict.fromkeys(names):
        events = [changed for event in trial.plan.events if (changed := without(event, name)) is not None]
        if events:
            run = trial.perform(lambda stage, events=events: _each_alone(stage, events))  # type: ignore[misc]
            findings += unsettled(f"without the optional field {name!r}", run.value)
    return Tried(findings, f"without {', '.join(dict.fromkeys(names))}")


def _each_alone(stage: Stage, events: list[Transaction]) -> list[Delivery]:
    return [delivery for event in events for delivery in deliver_all(stage, [event])]


def old_versions(trial: Trial) -> Tried:
    contract = trial.plan.contract
    current = contract.schema_version
    by_version: dict[int, list[Transaction]] = defaultdict(list)
    for sample in (*trial.plan.events, *trial.plan.old):
        by_version[Event.of(sample).schema_version].append(sample)
    wanted = range(contract.oldest_version, current)
    if not wanted:
        raise NotApplicable(f"schema version {current} is the only one")
    findings = [
        Finding(
            f"there is no sample of schema version {version}, which the contract accepts; give old={{{version}: […]}}"
        )
        for version in wanted
        if not by_version[version]
    ]
    for version in wanted:
        if by_version[version]:
            findings += _version(trial, version, by_version[version])
    return Tried(findings, f"versions {', '.join(map(str, wanted))}")


def _version(trial: Trial, version: int, samples: list[Transaction]) -> list[Finding]:
    story = f"in schema version {version}"
    run = trial.perform(lambda stage: deliver_all(stage, samples))
    findings = unsettled(story, run.value)
    today = {event.id: event for event in trial.plan.events}
    if findings or not all(sample.id in today for sample in samples):
        return findings
    _, oracle = delivered_cleanly(trial, [today[sample.id] for sample in samples])
    return trial.compare(story, run.rows, oracle)


def refused(trial: Trial) -> Tried:
    """Events that must be refused leave nothing behind. Finds a handler that catches its own error and returns."""
    events = trial.plan.refused
    if not events:
        raise NotApplicable("no events that must be refused were given; refused=[…] names some")
    run = trial.perform(lambda stage: deliver_all(stage, events))
    findings = [
        Finding(f"event {each.event!r} must be refused, but the handler returned as if all were well")
        for each in run.value
        if each.succeeded
    ]
    untouched = trial.perform(lambda stage: None).rows
    told = trial.differences(run.rows, untouched)
    if told:
        findings.append(Finding("refused events left something behind", tuple(told)))
    return Tried(findings, quantity(len(events), "event"))
