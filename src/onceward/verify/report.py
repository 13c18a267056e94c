"""The report of a verification: for people, as evidence, and as JUnit XML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import version
from typing import Any
from xml.etree import ElementTree

import msgspec

from onceward._text import quantity
from onceward.inbox.contract import EVERY_TYPE
from onceward.inbox.evidence.code_digest import Code
from onceward.inbox.evidence.evidence import INAPPLICABLE, Checked, Evidence

NOT_CHECKED = "not checked: "
"""How the note of a scenario begins that could not run."""
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot contain, not even escaped."""


class ScenarioStatus(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """Does not apply, was left out, or was pointless after an earlier failure; the note says which."""


class Finding(msgspec.Struct, frozen=True):
    """One problem."""

    text: str
    details: tuple[str, ...] = ()
    """Rows that differ, or a stack."""
    where: str = ""
    """`file:line` of the code at fault, if known."""

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where and self.where not in self.text else ""
        return "\n".join([self.text + at, *(f"    {line}" for line in self.details)])


class ScenarioResult(msgspec.Struct, frozen=True):
    """The outcome of one scenario."""

    name: str
    result: ScenarioStatus
    seconds: float
    findings: tuple[Finding, ...] = ()
    note: str = ""
    """What was tried, or why the scenario was skipped."""
    applies: bool = True
    """False if it was skipped because there is nothing to try. Skipped for another reason, it leaves a gap."""

    def __str__(self) -> str:
        return "\n".join(f"{self.name}: {finding}" for finding in self.findings)


class VerificationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a verification. As a string, it names the scenarios that failed, the seed and the rows."""

    consumer_id: str
    subject: str
    """The consumer, as `module:name`."""
    seed: int
    backend: str
    commit: str = "each"
    isolation: str = ""
    """The isolation level on PostgreSQL."""
    seconds: float
    scenarios: tuple[ScenarioResult, ...]
    code: Code
    schema_versions: tuple[int, ...]
    mechanism: str
    not_compared: tuple[str, ...]
    """Columns, as `table.column`."""
    event_types: tuple[str, ...] = ()
    """Of the events."""
    missing_types: tuple[str, ...] = ()
    """Event types of the contract that no event has."""
    terms: Mapping[str, Any] = {}
    """What the contract promised."""
    dependencies: Mapping[str, str] = {}
    """The distributions in use, with their versions."""

    @property
    def passed(self) -> bool:
        return not self.failed and not self.missing_types

    @property
    def gaps(self) -> tuple[str, ...]:
        """The scenarios that were left out or could not run: without them it is no proof."""
        return tuple(
            each.name for each in self.scenarios if each.result is ScenarioStatus.SKIPPED and each.applies
        )

    @property
    def proves(self) -> bool:
        """Whether its evidence opens the gate of production."""
        return self.passed and not self.gaps

    @property
    def failed(self) -> list[ScenarioResult]:
        return [each for each in self.scenarios if each.result is ScenarioStatus.FAILED]

    @property
    def reach(self) -> str:
        """What the samples leave unproven."""
        types = ", ".join(map(repr, self.event_types))
        others = "Other types and branches" if EVERY_TYPE in self.terms.get("event_types", ()) else "Branches"
        return f"Tried with events of type {types}. {others} that no sample reaches are not proven."

    def __getitem__(self, scenario: str) -> ScenarioResult:
        return next(each for each in self.scenarios if each.name == scenario)

    def __str__(self) -> str:
        head = f"{self.subject} (consumer {self.consumer_id!r}, {self.backend}, seed {self.seed})"
        results = [each.result for each in self.scenarios]
        passed, skipped = results.count(ScenarioStatus.PASSED), results.count(ScenarioStatus.SKIPPED)
        failed = self.failed
        lines = [f"{head}: {quantity(passed, 'scenario')} passed, {skipped} skipped, in {self.seconds:.1f} s"]
        if failed:
            lines = [
                f"{head}: {quantity(len(failed), 'scenario')} failed, {passed} passed, {skipped} skipped",
                *map(str, failed),
                f"Reproduce with: seed={self.seed}",
            ]
        if self.missing_types:
            lines.append(
                f"Not proven: no event of type {', '.join(self.missing_types)}, which its contract accepts; add one to "
                "its events, or remove the type from the contract"
            )
        if not failed:
            lines += [self.reach]
        lines += [f"{each.name}: {each.note}" for each in self.scenarios if each.note.startswith(NOT_CHECKED)]
        if not failed and self.gaps:
            gaps = ", ".join(self.gaps) if len(self.gaps) <= 5 else quantity(len(self.gaps), "scenario")
            lines.append(
                f"Not proven: {gaps} did not run, and a partial verification does not open production"
            )
        return "\n".join(lines)

    def evidence(self) -> Evidence:
        """The evidence to record."""
        return Evidence(
            consumer_id=self.consumer_id,
            subject=self.subject,
            tested=tuple(
                Checked(each.name, str(each.result) if each.applies else INAPPLICABLE, each.note)
                for each in self.scenarios
            ),
            code=self.code,
            schema_versions=self.schema_versions,
            backend=self.backend,
            isolation=self.isolation,
            commit=self.commit,
            mechanism=self.mechanism,
            onceward=version("onceward"),
            seed=self.seed,
            event_types=self.event_types,
            terms=self.terms,
            dependencies=self.dependencies,
        )


class VerificationError(AssertionError):
    """The consumer does not keep its contract; see `report`."""

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report))
        self.report = report


def as_junit(*reports: VerificationReport) -> str:
    """Reports as JUnit XML for CI servers, with a suite for each consumer and a test case for each scenario."""
    suites = ElementTree.Element("testsuites")
    suites.extend(map(_suite, reports))
    root = suites if len(reports) > 1 else suites[0]
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _suite(report: VerificationReport) -> ElementTree.Element:
    counts = [each.result for each in report.scenarios]
    suite = ElementTree.Element(
        "testsuite",
        name=f"onceward verify {report.subject}",
        tests=str(len(counts)),
        failures=str(counts.count(ScenarioStatus.FAILED)),
        errors="0",
        skipped=str(counts.count(ScenarioStatus.SKIPPED)),
        time=f"{report.seconds:.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("seed", report.seed), ("backend", report.backend), ("code", report.code.digest)):
        ElementTree.SubElement(properties, "property", name=name, value=str(value))
    for each in report.scenarios:
        case = ElementTree.SubElement(
            suite, "testcase", classname=report.subject, name=each.name, time=f"{each.seconds:.3f}"
        )
        if each.result is ScenarioStatus.SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_clean(each.note))
        elif each.result is ScenarioStatus.FAILED:
            failure = ElementTree.SubElement(case, "failure", message=_clean(each.findings[0].text))
            failure.text = _clean(f"{each}\nseed {report.seed}")
    return suite


def _clean(text: str) -> str:
    return _NOT_XML.sub("�", text)
