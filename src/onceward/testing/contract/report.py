"""What came of a verification, in words that name the scenario, the seed and the difference."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import version

import msgspec

from onceward._text import quantity
from onceward.inbox.evidence.code_digest import Code
from onceward.inbox.evidence.evidence import Checked, Evidence


class Result(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It does not apply, was left out, or had no chance after an earlier failure; the note says which."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    text: str
    details: tuple[str, ...] = ()
    """Rows that differ, or a stack."""
    where: str = ""
    """`file:line` of the code that did it, where that is known."""

    def __str__(self) -> str:
        at = f" at {self.where}" if self.where and self.where not in self.text else ""
        return "\n".join([self.text + at, *(f"    {line}" for line in self.details)])


class ScenarioResult(msgspec.Struct, frozen=True):
    name: str
    result: Result
    seconds: float
    findings: tuple[Finding, ...] = ()
    note: str = ""
    """What was tried, or why it was skipped."""

    def __str__(self) -> str:
        return "\n".join(f"{self.name}: {finding}" for finding in self.findings)


class Report(msgspec.Struct, frozen=True, kw_only=True):
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
        return all(each.result is not Result.FAILED for each in self.scenarios)

    @property
    def failed(self) -> list[ScenarioResult]:
        return [each for each in self.scenarios if each.result is Result.FAILED]

    def __getitem__(self, scenario: str) -> ScenarioResult:
        return next(each for each in self.scenarios if each.name == scenario)

    def __str__(self) -> str:
        head = f"{self.subject} (consumer {self.consumer_id!r}, {self.backend}, seed {self.seed})"
        results = [each.result for each in self.scenarios]
        passed, skipped = results.count(Result.PASSED), results.count(Result.SKIPPED)
        failed = self.failed
        if not failed:
            return (
                f"{head}: {quantity(passed, 'scenario')} passed, {skipped} skipped, in {self.seconds:.1f} s"
            )
        return "\n".join(
            [
                f"{head}: {quantity(len(failed), 'scenario')} failed, {passed} passed, {skipped} skipped",
                *map(str, failed),
                f"The same again: seed={self.seed}",
            ]
        )

    def evidence(self) -> Evidence:
        """What is recorded of it."""
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
    """A consumer does not keep its contract. `report` has all there is to know."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report
