"""How long a copy waits for an event that is in flight elsewhere."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.inbox.attempts import in_flight
from onceward.inbox.stores.types import Attempts
from onceward.storage.database import AsyncStoragePorts
from onceward.task.cancellation import CancelToken, current_token
from onceward.telemetry.context import current_attempt

LEASE = 60.0


def wait(locked_for: float) -> float:
    return in_flight(Attempts(1, 0, locked_for), LEASE).delay


def test_a_copy_asks_soon_while_whoever_has_the_event_keeps_its_lease() -> None:
    assert 0.05 <= wait(LEASE) <= 0.25


@pytest.mark.parametrize(("silent", "seconds"), [(4.0, 1.0), (12.0, 3.0), (20.0, 5.0), (50.0, 5.0)])
def test_it_asks_less_often_the_longer_nobody_has_kept_the_lease(silent: float, seconds: float) -> None:
    assert wait(LEASE - silent) == seconds


def test_it_does_not_wait_for_longer_than_the_lease_runs() -> None:
    assert wait(0.5) == 0.5


def test_it_says_for_how_long_the_lease_runs() -> None:
    assert "its lease expires in 42 s" in str(in_flight(Attempts(1, 0, 42.0), LEASE))


def test_what_renews_leases_is_no_part_of_the_attempt_that_needs_it_first() -> None:
    seen: list[CancelToken | None] = []

    async def renew() -> None:
        seen.append(current_token())

    async def main() -> None:
        ports = AsyncStoragePorts(create_async_engine("sqlite+aiosqlite://"))
        token = CancelToken()
        token.cancel()
        current_attempt.set(token)
        ports.spawn(renew())
        while not seen:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == [None]
