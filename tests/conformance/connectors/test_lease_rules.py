"""The decisions of a leasing queue, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.connectors import BurialReason
from onceward.connectors.lease_rules import JITTER, Bury, LeaseRules, Redeliver
from onceward.errors import ConfigurationError
from onceward.task.exceptions import ExceptionCategory

BUSINESS, SYSTEM, TIMEOUT = ExceptionCategory
FAILED, EXHAUSTED = Bury(BurialReason.FAILED), Bury(BurialReason.MAX_DELIVERIES)


@pytest.mark.parametrize(
    ("on_failure", "category", "deliveries", "decision"),
    [
        ("auto", BUSINESS, 1, FAILED),
        ("auto", SYSTEM, 1, Redeliver(1.0)),
        ("auto", TIMEOUT, 2, Redeliver(2.0)),
        ("auto", None, 2, Redeliver(2.0)),
        ("auto", SYSTEM, 3, EXHAUSTED),
        ("auto", BUSINESS, 3, FAILED),
        ("dead_letter", SYSTEM, 1, FAILED),
        ("dead_letter", None, 1, FAILED),
        ("redeliver", BUSINESS, 1, Redeliver(1.0)),
        ("redeliver", BUSINESS, 3, EXHAUSTED),
        ("auto", SYSTEM, 9, EXHAUSTED),
    ],
)
def test_what_becomes_of_a_failure(on_failure: Any, category: Any, deliveries: int, decision: Any) -> None:
    rules = LeaseRules(on_failure=on_failure, max_deliveries=3)
    found = rules.after_failure(category, deliveries)
    if isinstance(decision, Bury):
        assert found == decision
    else:
        assert isinstance(found, Redeliver)
        assert (1 - JITTER) * decision.delay <= found.delay <= decision.delay


@pytest.mark.parametrize(
    ("redelivery_delay", "deliveries", "delay"),
    [
        (1.0, 1, 1.0),
        (1.0, 6, 32.0),
        (1.0, 10, 512.0),
        (1.0, 11, 600.0),
        (0.001, 10_000, 600.0),
        (3000.0, 1, 3000.0),
        (3000.0, 2, 3000.0),
    ],
)
@pytest.mark.req("OU-06")
def test_delays_double_up_to_ten_minutes_and_have_jitter(
    redelivery_delay: float, deliveries: int, delay: float
) -> None:
    rules = LeaseRules(redelivery_delay=redelivery_delay, max_deliveries=100_000)
    found = [rules.after_failure(SYSTEM, deliveries) for _ in range(50)]
    delays = [each.delay for each in found if isinstance(each, Redeliver)]
    assert len(set(delays)) == 50
    assert (1 - JITTER) * delay <= min(delays) <= max(delays) <= delay


@pytest.mark.req("OU-06")
def test_by_default_a_message_has_an_hour_whatever_chance_makes_of_its_delays() -> None:
    rules = LeaseRules()
    assert sum(rules.shortest_delays()) >= 3600
    assert all(isinstance(rules.after_failure(SYSTEM, n), Redeliver) for n in range(1, rules.max_deliveries))
    assert rules.after_failure(SYSTEM, rules.max_deliveries) == EXHAUSTED


@pytest.mark.parametrize(
    ("deliveries", "lost", "exhausted"), [(4, 4, False), (5, 5, True), (16, 4, False), (17, 0, True)]
)
def test_a_message_may_fail_more_often_than_it_may_kill(deliveries: int, lost: int, exhausted: bool) -> None:
    assert LeaseRules().is_exhausted(deliveries, lost) is exhausted


@pytest.mark.req("OU-06")
def test_the_arithmetic_of_a_policy_that_buries_too_soon_is_printed() -> None:
    rules = LeaseRules(max_deliveries=5)
    with pytest.raises(ConfigurationError) as refused:
        rules.check_patience("billing", 600.0, "its source", "raise max_deliveries")
    assert str(refused.value) == (
        "consumer 'billing' tolerates failures for 10m, but its source buries a failing message after 0.8 + 1.6 + "
        "3.2 + 6.4 s = 12s, in 5 deliveries; raise max_deliveries, or tolerate less"
    )
    LeaseRules().check_patience("billing", 3600.0, "its source", "")


@pytest.mark.parametrize(("max_deliveries", "suspect_after"), [(1, 0), (2, 1), (3, 2), (5, 2), (100, 2)])
def test_a_message_is_a_suspect_while_it_still_has_a_delivery_to_be_alone_in(
    max_deliveries: int, suspect_after: int
) -> None:
    assert LeaseRules(max_deliveries=max_deliveries).suspect_after == suspect_after


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lease", 0),
        ("lease", -1.0),
        ("lease", float("nan")),
        ("lease", float("inf")),
        ("max_deliveries", 0),
        ("max_deliveries", 2.5),
        ("redelivery_delay", 0.0),
        ("redelivery_delay", float("inf")),
        ("on_failure", "ignore"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{setting} must be .* not {value!r}"):
        LeaseRules(**{setting: value})
