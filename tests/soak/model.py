"""What must hold of every delivery, whatever the handlers did and whatever interfered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from onceward import Report
from tests.soak.diary import Delivery, Diary, Visit

SLACK = 1.5
"""Seconds a busy machine may add to anything."""


@dataclass
class Rules:
    """The policy of a round, as far as the model needs it."""

    attempts: int
    handler_attempts: int
    limit: float | None
    grace: float
    bounded: bool
    """A transaction or loop timeout may end a lifecycle early."""
    disturbed: bool
    """Calls were hurried or cancelled, so work may be abandoned."""


def check(
    diary: Diary, rules: Rules, reports: list[Report], ended: dict[str, str], ids: Iterable[str]
) -> list[str]:
    """Return what is wrong; empty if nothing is."""
    problems = [f"{id} has no end" for id in ids if id not in ended]
    for delivery in diary.deliveries.values():
        problems += [
            f"{delivery.id}, delivery {delivery.number}: {each}; {delivery}"
            for each in _check(delivery, rules)
        ]
    problems += _check_overlaps(diary, rules)
    problems += _check_reports(diary, rules, reports)
    return problems


def _check(delivery: Delivery, rules: Rules) -> Iterator[str]:
    main, success, exception = (delivery.of(step) for step in ("process", "success", "exception"))
    verdict = delivery.verdicts[0] if delivery.verdicts else None
    if len(delivery.verdicts) > 1:
        yield f"settled {len(delivery.verdicts)} times"
    if (
        verdict is None
        and not rules.disturbed
        and not any(_is_stuck(visit, rules) for visit in delivery.visits)
    ):
        yield "never settled"
    if len(main) > rules.attempts:
        yield f"{len(main)} attempts of {rules.attempts}"
    if len(success) > rules.handler_attempts or len(exception) > rules.handler_attempts:
        yield "too many attempts of a handler"
    for earlier, later in pairwise(main):
        if _in_time(earlier, rules) and earlier.how in ("returned", "BUSINESS", "postponed"):
            yield f"attempted again after {earlier.how}"
        if later.began < earlier.began:
            yield "attempts out of order"
    if verdict == "done":
        if exception:
            yield "done, but the exception handler was entered"
        if not main or _too_late(main[-1], rules) or main[-1].how != "returned":
            yield "done, but the last attempt did not return in time"
        if not success or success[-1].how != "returned":
            yield "done, but the success handler did not return"
    elif verdict == "failed":
        if not exception and not any(_is_stuck(visit, rules) for visit in delivery.visits) and main:
            yield "failed, but the exception handler was never entered"
        certain = main and _in_time(main[-1], rules) and main[-1].how == "returned" and success
        if certain and not rules.bounded and all(v.how == "returned" and _in_time(v, rules) for v in success):
            yield "failed, though everything returned in time"
    elif verdict == "returned" and main and main[-1].how != "postponed":
        yield "returned to the source, but it was started and not postponed"
    if not rules.bounded and not rules.disturbed and verdict == "failed" and main:
        last = main[-1]
        if last.how == "SYSTEM" and _in_time(last, rules) and len(main) < rules.attempts:
            yield "gave up before the last attempt"


def _check_overlaps(diary: Diary, rules: Rules) -> Iterator[str]:
    by_id: dict[str, list[Visit]] = {}
    for delivery in diary.deliveries.values():
        by_id.setdefault(delivery.id, []).extend(delivery.visits)
    for id, visits in by_id.items():
        for earlier, later in pairwise(sorted(visits, key=lambda visit: visit.began)):
            if (earlier.ended is None or earlier.ended > later.began) and not _is_stuck(earlier, rules):
                yield f"{id}: {earlier} overlaps {later}"


def _check_reports(diary: Diary, rules: Rules, reports: list[Report]) -> Iterator[str]:
    verdicts = [each for delivery in diary.deliveries.values() for each in delivery.verdicts]
    totals = {
        "done": sum(report.succeeded for report in reports),
        "failed": sum(report.failed for report in reports),
        "returned": sum(report.postponed + report.unstarted for report in reports),
    }
    late = sum(report.stuck for report in reports) if rules.limit is not None else 0
    for verdict, total in totals.items():
        settled = verdicts.count(verdict)
        if not settled <= total <= settled + (late if verdict == "failed" else 0):
            yield f"the reports count {total} {verdict}, the source {settled}"
    fetched = len(diary.deliveries)
    known = sum(totals.values()) + sum(report.abandoned for report in reports)
    if known != fetched:
        yield f"{fetched} were fetched, and the reports account for {known}"


def _in_time(visit: Visit, rules: Rules) -> bool:
    """Certainly in time: the engine may not see it otherwise."""
    return visit.ended is not None and (rules.limit is None or visit.seconds < rules.limit * 0.5)


def _too_late(visit: Visit, rules: Rules) -> bool:
    """Certainly too late."""
    return rules.limit is not None and visit.seconds > rules.limit + SLACK


def _is_stuck(visit: Visit, rules: Rules) -> bool:
    """Possibly given up on: its slot went on without it."""
    return rules.limit is not None and visit.seconds > rules.limit + rules.grace * 0.9
