"""The same event in other forms: with an unknown field, without an optional one, in an older version. And events that
must be refused."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from onceward._text import quantity
from onceward.inbox import Event
from onceward.transaction import Transaction
from onceward.verify.plan import optional_fields, with_unknown_fields, without
from onceward.verify.report import Finding
from onceward.verify.rows import tables
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, NotApplicable, Trial, deliver_all, deliver_cleanly, unsettled


def unknown_fields(trial: Trial) -> Assessment:
    story = "with an unknown field in each payload"
    changed = [with_unknown_fields(event) for event in trial.plan.events]
    if not any(changed):
        raise NotApplicable("the payloads have no fields")
    events = [new or old for new, old in zip(changed, trial.plan.events, strict=True)]
    run = trial.perform(lambda stage: deliver_all(stage, events))
    findings = unsettled(story, run.value)
    if not findings:
        rows, oracle = tables.without_unknown(run.rows), tables.without_unknown(trial.oracle)
        findings = [
            msgspec.structs.replace(each, text=f"{each.text}. {_kept(trial, oracle, rows)}")
            for each in trial.compare(story, rows, oracle)
        ]
    return Assessment(findings, story)


def _kept(trial: Trial, oracle: tables.Rows, rows: tables.Rows) -> str:
    columns = tables.differing_columns(oracle, rows, trial.tables, trial.plan.options.exclude)
    return f"If a column keeps the payload as it came, leave it out with exclude={columns or '[…]'}"


def missing_fields(trial: Trial) -> Assessment:
    """The handler decides what to do then, but it must succeed."""
    names = [*trial.plan.options.optional, *optional_fields(trial.plan.contract.model)]
    if not names:
        raise NotApplicable(
            "no optional fields; declare a model with defaults in the contract, or name some in optional=[…]"
        )
    findings: list[Finding] = []
    for name in dict.fromkeys(names):
        events = [changed for event in trial.plan.events if (changed := without(event, name)) is not None]
        if events:
            run = trial.perform(lambda stage, events=events: _each_alone(stage, events))  # type: ignore[misc]
            findings += unsettled(f"without the optional field {name!r}", run.value)
    return Assessment(findings, f"without {', '.join(dict.fromkeys(names))}")


def _each_alone(stage: Stage, events: list[Transaction]) -> list[Delivery]:
    return [delivery for event in events for delivery in deliver_all(stage, [event])]


def old_versions(trial: Trial) -> Assessment:
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
            f"no sample of schema version {version}, which the contract accepts; pass old={{{version}: […]}}"
        )
        for version in wanted
        if not by_version[version]
    ]
    for version in wanted:
        if by_version[version]:
            findings += _deliver_version(trial, version, by_version[version])
    return Assessment(findings, f"versions {', '.join(map(str, wanted))}")


def _deliver_version(trial: Trial, version: int, samples: list[Transaction]) -> list[Finding]:
    story = f"in schema version {version}"
    run = trial.perform(lambda stage: deliver_all(stage, samples))
    findings = unsettled(story, run.value)
    current = {event.id: event for event in trial.plan.events}
    if findings or not all(sample.id in current for sample in samples):
        return findings
    _, oracle = deliver_cleanly(trial, [current[sample.id] for sample in samples])
    return trial.compare(story, run.rows, oracle)


def refused_events(trial: Trial) -> Assessment:
    """Refused events must leave nothing behind. Finds a handler that catches its own error and returns."""
    events = trial.plan.refused
    if not events:
        raise NotApplicable("no events to refuse; pass some in refused=[…]")
    run = trial.perform(lambda stage: deliver_all(stage, events))
    findings = [
        Finding(f"event {each.event!r} must be refused, but the handler returned normally")
        for each in run.value
        if each.succeeded
    ]
    untouched = trial.perform(lambda stage: None).rows
    lines = trial.differences(run.rows, untouched)
    if lines:
        findings.append(Finding("refused events left rows behind", tuple(lines)))
    return Assessment(findings, quantity(len(events), "event"))
