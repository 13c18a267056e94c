"""What is only near a kill -9 is not buried, and what a kill left in doubt is not called again once its key expired."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from onceward import hours
from onceward.inbox import Breach
from tests.crash.inbox.worker import TARGET
from tests.support.inbox.site import SHORT_LEASE, InboxSite, stop
from tests.support.site import exit_code
from tests.support.wait import until

LIVING = 1.5
"""Seconds: the lease of workers that live. A busy machine may keep one of them from renewing it for a while, and each
lease that ends counts as a delivery."""


@pytest.fixture(params=["sqlite", "postgresql"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InboxSite]:
    with InboxSite.on(request, tmp_path) as made:
        yield made


@pytest.mark.req("CC-059")
def test_an_innocent_event_that_is_in_flight_at_every_kill_is_not_buried(site: InboxSite) -> None:
    """The source delivered it as often as it may, each time beside the killer."""
    settings = {"lease": LIVING, "max_deliveries": 3, "slots": 4, "continuous": True}
    site.send(TARGET, "innocent")
    for number in range(4):
        killed = site.start(f"doomed-{number}", point="writing", waits=True, poison_after=9, **settings)
        until(lambda: site.queue("queue.db").counts()["leased"] == 2)
        until(lambda name=f"doomed-{number}": site.said("reached", by=name))  # type: ignore[misc]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        assert exit_code(killed) == -signal.SIGKILL
        until(lambda: site.queue("queue.db").counts()["leased"] == 0)
    site.drain(poison_after=9, **settings)
    assert site.effects() == Counter([TARGET, "innocent"])
    assert site.dead_letters() == []


@pytest.mark.req("CC-059")
def test_only_the_killer_is_buried(site: InboxSite) -> None:
    innocents = [f"innocent-{number}" for number in range(4)]
    site.send(*innocents[:2], TARGET, *innocents[2:])
    settings = {"lease": LIVING, "max_deliveries": 3, "slots": 4, "continuous": True}
    for _ in range(3):
        site.dies(point="writing", **settings)
    worker = site.start("restarted", **settings)
    until(lambda: len(site.dead_letters()) == 1 and site.is_drained())
    stop(worker)
    [letter] = site.dead_letters()
    assert (letter.transaction_id, letter.kind) == (TARGET, Breach.POISON)
    assert site.effects() == Counter(innocents)


@pytest.mark.req("CC-057")
def test_a_call_that_a_kill_left_in_doubt_is_not_repeated_once_its_key_expired(site: InboxSite) -> None:
    site.send(TARGET)
    site.dies(point="called", mode="effectful", key_valid_for=timedelta(seconds=SHORT_LEASE))
    worker = site.start("restarted", mode="effectful", lease=SHORT_LEASE, key_valid_for=hours(24))
    until(lambda: len(site.dead_letters()) == 1)
    stop(worker)
    [letter] = site.dead_letters()
    assert letter.kind == Breach.IN_DOUBT
    assert site.charges() == Counter([TARGET])
    assert (site.effects(), [row["state"] for row in site.inbox.effects()]) == (Counter(), ["intended"])
