"""What the database fills in, by the default of a column."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onceward.verify.rows.defaults import NOW, Filled, filled_by, without_clock

pytestmark = pytest.mark.req("CC-165")


@pytest.mark.parametrize(
    ("default", "how"),
    [
        (None, None),
        ("'new'::text", None),
        ("0", None),
        ("nextval('orders_id_seq'::regclass)", Filled.NUMBER),
        ("CURRENT_TIMESTAMP", Filled.DOUBTFUL),
        ("now()", Filled.DOUBTFUL),
        ("(datetime('now', '+1 day'))", Filled.DOUBTFUL),
        ("unixepoch()", Filled.DOUBTFUL),
        ("date('now')", Filled.DOUBTFUL),
        ("gen_random_uuid()", Filled.DOUBTFUL),
        ("hex(randomblob(16))", Filled.RANDOM),
        ("abs(random()) % 10", Filled.RANDOM),
    ],
)
def test_a_default_says_how(default: str | None, how: Filled | None) -> None:
    assert filled_by(default, counts=False) is how


def test_a_key_that_the_database_counts_needs_no_default() -> None:
    assert filled_by(None, counts=True) is Filled.NUMBER


def times() -> list[Any]:
    now, seconds = datetime.now(UTC), time.time()
    texts = [now.isoformat(), f"{now:%Y-%m-%d %H:%M:%S}", f"{now:%Y-%m-%d}", str(int(seconds))]
    numbers = [seconds, int(seconds), int(seconds * 1e3), int(seconds * 1e6), seconds / 86_400 + 2440587.5]
    return [now, now.replace(tzinfo=None), now.date(), now + timedelta(hours=14), *texts, *numbers]


def test_times_of_about_now_count_as_one() -> None:
    assert [without_clock(each) for each in times()] == [NOW] * len(times())


@pytest.mark.parametrize(
    "value", [None, "", "order-1", "2026-02-01", 0, 7, 1e300, float("nan"), b"x", datetime(2026, 2, 1), True]
)
def test_other_values_stay(value: Any) -> None:
    assert without_clock(value) is value
