"""Prove that a consumer keeps its contract, in one line per consumer.

    def test_billing():
        verify_consumer(Bill, events=[…], setup=create_tables)

Runs your own handler on a real database through duplicates, replays, every order, other forms of the events, exceptions
and kill -9 at every boundary, and compares the rows with those of one clean delivery. See
docs/concepts/verification.md.
"""

from __future__ import annotations

from typing import Any

from onceward.inbox.evidence.scenarios import NAMES
from onceward.verify.fleet import Examination, examine_app
from onceward.verify.plan import Verification, plan_of
from onceward.verify.report import (
    Finding,
    ScenarioResult,
    ScenarioStatus,
    VerificationError,
    VerificationReport,
)
from onceward.verify.run import Progress, run

__all__ = [
    "NAMES",
    "Examination",
    "Finding",
    "Progress",
    "ScenarioResult",
    "ScenarioStatus",
    "Verification",
    "VerificationError",
    "VerificationReport",
    "examine_app",
    "examine_consumer",
    "verify_consumer",
]


def verify_consumer(consumer: Any, events: Any = None, **given: Any) -> VerificationReport:
    """Verify a consumer; raise `VerificationError`, an AssertionError, if a scenario fails.

    Accepts the fields of `Verification` as keyword arguments; they override `verification` on the class.
    """
    report = examine_consumer(consumer, events, **given)
    if not report.passed:
        raise VerificationError(report)
    return report


def examine_consumer(
    consumer: Any, events: Any = None, *, progress: Progress | None = None, **given: Any
) -> VerificationReport:
    """Like `verify_consumer`, but return the report of a failure instead of raising it."""
    plan = plan_of(consumer, {"events": events, **given})
    return run(plan) if progress is None else run(plan, progress)
