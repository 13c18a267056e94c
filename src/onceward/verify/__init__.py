"""The proof that a consumer keeps its contract: one line for each consumer.

    def test_billing():
        verify_consumer(Bill, events=[…], setup=create_tables)

It runs the user's own handler on a real database through duplicates, replay, every order, other forms of the events,
exceptions and kill -9 at every boundary, and compares the rows with those of a single, clean delivery. See
docs/concepts/verification.md.
"""

from __future__ import annotations

from typing import Any

from onceward.verify.plan import Verification, plan_of
from onceward.verify.report import NAMES, Finding, Report, Result, ScenarioResult, VerificationError
from onceward.verify.run import Progress, run

__all__ = [
    "NAMES",
    "Finding",
    "Progress",
    "Report",
    "Result",
    "ScenarioResult",
    "Verification",
    "VerificationError",
    "examine_consumer",
    "verify_consumer",
]


def verify_consumer(consumer: Any, events: Any = None, **given: Any) -> Report:
    """Verify a consumer's class; raises `VerificationError`, an AssertionError, if it fails.

    What may be given are the fields of `Verification`, which go before those of `verification` on the class.
    """
    report = examine_consumer(consumer, events, **given)
    if not report.passed:
        raise VerificationError(report)
    return report


def examine_consumer(
    consumer: Any, events: Any = None, *, progress: Progress | None = None, **given: Any
) -> Report:
    """As `verify_consumer`, but it says what it found instead of raising it."""
    plan = plan_of(consumer, {"events": events, **given})
    return run(plan) if progress is None else run(plan, progress)
