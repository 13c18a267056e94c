"""The day on which a copy of an event comes again."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from onceward.verify.elsewhere import another_day


@pytest.mark.req("CC-086")
def test_it_is_in_another_month_on_another_day_and_on_a_weekend_if_it_is_a_weekday_now() -> None:
    for number in range(366):
        now = datetime(2026, 1, 1, 12) + timedelta(days=number)
        then = now + another_day(now)
        assert (then.month, then.day, then.hour) != (now.month, now.day, now.hour)
        assert then.month != now.month
        assert then.day != now.day
        assert (then.weekday() < 5) is not (now.weekday() < 5)
