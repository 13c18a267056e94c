"""The decisions of a leasing queue, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from onceward.connectors import BurialReason
from onceward.connectors.lease_rules import Bury, LeaseRules, Redeliver
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
    assert rules.after_failure(category, deliveries) == decision


@pytest.mark.parametrize(
    ("redelivery_delay", "deliveries", "delay"),
    [
        (1.0, 1, 1.0),
        (1.0, 6, 32.0),
        (1.0, 7, 60.0),
        (0.001, 10_000, 60.0),
        (300.0, 1, 300.0),
        (300.0, 2, 300.0),
    ],
)
def test_delays_double_up_to_a_minute(redelivery_delay: float, deliveries: int, delay: float) -> None:
    rules = LeaseRules(redelivery_delay=redelivery_delay, max_deliveries=100_000)
    assert rules.after_failure(SYSTEM, deliveries) == Redeliver(delay)


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
