"""Dedup records outlive everything that could deliver a copy; otherwise the contract is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceward.errors import ConfigurationError
from onceward.inbox.purge.retention import effective_days, required_days
from tests.support.inbox.contracts import contract, refusal

pytestmark = pytest.mark.req("CC-011")


@pytest.mark.parametrize(
    ("settings", "days"),
    [
        ({}, 90),
        ({"retention": "financial"}, 90),
        ({"dead_letter_days": 120}, 120),
        ({"source_days": 365}, 365),
        ({"replay_days": 400.5}, 400.5),
        ({"source_days": 100, "dead_letter_days": 200, "replay_days": 150}, 200),
    ],
)
def test_the_longest_window_is_required(settings: dict[str, Any], days: float) -> None:
    assert required_days(contract(**settings)) == days


@pytest.mark.parametrize(("retention", "floor"), [("standard", 7), ("financial", 30)])
def test_no_record_is_kept_for_less_than_the_floor_of_its_class(retention: str, floor: float) -> None:
    required = required_days(contract(retention=retention))
    assert required is not None
    assert required >= floor


def test_a_legal_hold_lasts_until_released() -> None:
    assert required_days(contract(retention="legal-hold")) is None


def test_a_legal_hold_is_in_effect_until_released() -> None:
    assert effective_days(contract(retention="legal-hold", replay_days=4000)) is None


def test_the_smallest_allowed_is_in_effect_if_none_is_set() -> None:
    assert effective_days(contract(source_days=100)) == 100


def test_a_longer_one_is_in_effect_as_set() -> None:
    assert effective_days(contract(dedup_days=3650)) == 3650


def test_exactly_the_required_days_will_do() -> None:
    assert effective_days(contract(dedup_days=90)) == 90


@pytest.mark.parametrize(
    ("settings", "danger"),
    [
        (
            {"dedup_days": 7},
            "between day 7 and day 90 a redriven dead letter would run a second time (dead_letter_days=90)",
        ),
        (
            {"dedup_days": 90, "source_days": 365},
            "between day 90 and day 365 a message that the source delivers again would run a second time "
            "(source_days=365)",
        ),
        (
            {"dedup_days": 90, "replay_days": 90.5},
            "between day 90 and day 90.5 a replayed event would run a second time (replay_days=90.5)",
        ),
        (
            {"dedup_days": 7, "retention": "financial"},
            "between day 7 and day 30 a late copy would run a second time (retention='financial')",
        ),
        (
            {"dedup_days": 6.5},
            "between day 6.5 and day 7 a late copy would run a second time (retention='standard')",
        ),
        (
            {"dedup_days": 4000, "retention": "legal-hold"},
            "after day 4000 a copy of an event under hold would run a second time",
        ),
        (
            {"dedup_days": 89.99999999},
            "between day 89.99999999 and day 90 a redriven dead letter",
        ),
    ],
)
def test_a_lower_setting_is_refused_with_the_window_in_which_a_second_effect_could_happen(
    settings: dict[str, Any], danger: str
) -> None:
    assert danger in refusal(**settings)


def test_a_refusal_names_the_consumer() -> None:
    assert "consumer 'billing'" in refusal(dedup_days=7)


def test_a_refusal_says_what_would_do() -> None:
    assert "set dedup_days to 180 or more, or leave it out" in refusal(dedup_days=7, replay_days=180)


def test_under_legal_hold_a_refusal_says_to_leave_it_out() -> None:
    assert "leave out dedup_days" in refusal(dedup_days=7, retention="legal-hold")


def test_a_refusal_names_every_window_that_is_longer_and_the_longest_first() -> None:
    text = refusal(dedup_days=80, source_days=100, replay_days=200)
    assert text.index("replay_days=200") < text.index("source_days=100") < text.index("dead_letter_days=90")


def test_a_refusal_does_not_name_a_window_that_is_no_danger() -> None:
    assert "replay" not in refusal(dedup_days=50)


days = st.floats(0, 5000)


@given(dedup=st.floats(0.001, 5000), source=days, dead=st.floats(90, 5000), replay=days)
def test_a_contract_that_is_accepted_outlives_every_window(
    dedup: float, source: float, dead: float, replay: float
) -> None:
    windows = {"source_days": source, "dead_letter_days": dead, "replay_days": replay}
    try:
        kept = effective_days(contract(dedup_days=dedup, **windows))
    except ConfigurationError:
        assert dedup < max(7, *windows.values())
    else:
        assert kept is not None
        assert kept >= max(7, *windows.values())
