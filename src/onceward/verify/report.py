"""The report of a verification: for people, as evidence, and as JUnit XML."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib.metadata import version
from typing import Final
from xml.etree import ElementTree

import msgspec

from onceward._text import quantity
from onceward.inbox.evidence.code_digest import Code
from onceward.inbox.evidence.evidence import DUPLICATES, REPLAY, Checked, Evidence

CLEAN: Final = "clean"
NAMES: Final = (
    CLEAN,
    DUPLICATES,
    "duplicates-at-once",
    "duplicates-in-processes",
    REPLAY,
    "order",
    "unknown-fields",
    "missing-fields",
    "old-versions",
    "refused",
    "exceptions",
    "kills",
    "state",
    "early-effects",
    "outside-calls",
)
"""The scenarios in the order they run. Evidence records these names, so they must not change."""

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

    def __str__(self) -> str:
        return "\n".join(f"{self.name}: {finding}" for finding in self.findings)


class VerificationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a verification. As a string, it names the scenarios that failed, the seed and the rows."""

    consumer_id: str
    subject: str
    """The consumer, as `module:name`."""
    seed: int
    backend: str
    seconds: float
    scenarios: tuple[ScenarioResult, ...]
    code: Code
    schema_versions: tuple[int, ...]
    mechanism: str
    not_compared: tuple[str, ...]
    """Columns, as `table.column`."""

    @property
    def passed(self) -> bool:
        return all(each.result is not ScenarioStatus.FAILED for each in self.scenarios)

    @property
    def failed(self) -> list[ScenarioResult]:
        return [each for each in self.scenarios if each.result is ScenarioStatus.FAILED]

    def __getitem__(self, scenario: str) -> ScenarioResult:
        return next(each for each in self.scenarios if each.name == scenario)

    def __str__(self) -> str:
        head = f"{self.subject} (consumer {self.consumer_id!r}, {self.backend}, seed {self.seed})"
        results = [each.result for each in self.scenarios]
        passed, skipped = results.count(ScenarioStatus.PASSED), results.count(ScenarioStatus.SKIPPED)
        failed = self.failed
        if not failed:
            return (
                f"{head}: {quantity(passed, 'scenario')} passed, {skipped} skipped, in {self.seconds:.1f} s"
            )
        return "\n".join(
            [
                f"{head}: {quantity(len(failed), 'scenario')} failed, {passed} passed, {skipped} skipped",
                *map(str, failed),
                f"Reproduce with: seed={self.seed}",
            ]
        )

    def evidence(self) -> Evidence:
        """The evidence to record."""
        return Evidence(
            consumer_id=self.consumer_id,
            subject=self.subject,
            tested=tuple(Checked(each.name, str(each.result), each.note) for each in self.scenarios),
            code=self.code,
            schema_versions=self.schema_versions,
            backend=self.backend,
            mechanism=self.mechanism,
            onceward=version("onceward"),
            seed=self.seed,
        )


class VerificationError(AssertionError):
    """The consumer does not keep its contract; see `report`."""

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report))
        self.report = report


def as_junit(report: VerificationReport) -> str:
    """The report as JUnit XML for CI servers, with a test case for each scenario."""
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
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


def _clean(text: str) -> str:
    return _NOT_XML.sub("�", text)
