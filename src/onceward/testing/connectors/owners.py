"""Deliveries of an owner that is known to be dead come back at once, and those of all others stay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onceward.connectors import BurialReason
from onceward.testing.clock import FakeClock
from onceward.testing.connectors.driver import ConnectorDriver
from onceward.testing.connectors.samples import numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite, needs

SETTINGS: dict[str, Any] = {"lease": 60.0, "max_deliveries": 3}


class Owners(ConnectorSuite):
    @contextmanager
    def _another(self, queue: ConnectorDriver, clock: FakeClock, owner: str) -> Iterator[ConnectorDriver]:
        assert self.reopen is not None
        connector: Any = self.reopen(queue.connector, clock, **SETTINGS)
        connector.owner = owner
        with ConnectorDriver(connector) as another:
            yield another

    @needs("releases")
    def test_what_a_dead_owner_held_comes_back_at_once_and_what_a_living_one_holds_does_not(self) -> None:
        with self.queue(**SETTINGS) as (queue, clock):
            queue.connector.owner = "a"
            queue.dispatch(*numbered(0, 4))
            with self._another(queue, clock, "a-1") as living:
                assert payloads_of(living.fetch(2)) == [0, 1]
                assert payloads_of(queue.fetch(2)) == [2, 3]
                assert queue.call("release_owner", "nobody") == 0
                assert living.fetch() == []
                assert living.call("release_owner", "a") == 2
                assert payloads_of(living.fetch()) == [2, 3]
                assert living.call("release_owner", "a") == 0

    @needs("releases")
    def test_what_a_dead_owner_held_counts_as_lost_so_poison_is_buried(self) -> None:
        with self.queue(**SETTINGS) as (queue, clock):
            queue.dispatch(*numbered(0, 1))
            for number in range(SETTINGS["max_deliveries"]):
                with self._another(queue, clock, f"worker-{number}") as worker:
                    assert payloads_of(worker.fetch()) == [0]
                assert queue.call("release_owner", f"worker-{number}") == 1
            assert queue.fetch() == []
            [letter] = self.dead_letters(queue)
            assert (letter.reason, letter.deliveries) == (BurialReason.MAX_DELIVERIES, 3)

    @needs("releases")
    def test_what_was_failed_or_given_back_before_its_owner_died_keeps_its_delay(self) -> None:
        with self.queue(**SETTINGS) as (queue, clock):
            queue.connector.owner = "dead"
            queue.dispatch(*numbered(0, 1))
            queue.fail(*queue.fetch())
            assert queue.call("release_owner", "dead") == 0
            assert queue.fetch() == []
            self.advance(clock, 2.0)
            assert payloads_of(queue.fetch()) == [0]

    @needs("releases")
    def test_an_outcome_that_a_dead_owner_had_sent_changes_nothing_once_the_message_is_with_another(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.queue(**SETTINGS) as (queue, clock), self._another(queue, clock, "dead") as dead:
            queue.dispatch(*numbered(0, 1))
            late = dead.fetch()
            queue.call("release_owner", "dead")
            again = queue.fetch()
            with caplog.at_level(logging.WARNING):
                dead.fail(*late)
                dead.extend(*late)
            assert all(late[0].id in record.getMessage() for record in caplog.records)
            self.advance(clock, 59.0)
            assert queue.fetch() == []
            queue.done(*again)
            self.advance(clock, 2.0)
            assert queue.fetch() == []
