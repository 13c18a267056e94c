"""Lost connections: at most an error, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from onceward.testing.connectors.samples import numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite, needs

PATIENCE = 20.0
"""Seconds until a connector must work again after its connections were cut."""


class Reconnect(ConnectorSuite):
    @needs("cut")
    def test_after_its_connections_were_cut_it_fetches_again_and_nothing_is_lost(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(*numbered(0, 3))
            assert payloads_of(queue.fetch(1)) == [0]
            self._cut(queue)
            assert payloads_of(_until_it_works(lambda: queue.fetch(2))) == [1, 2]

    @needs("cut")
    def test_after_its_connections_were_cut_it_dispatches_again(self) -> None:
        with self.queue() as (queue, _):
            self._cut(queue)
            _until_it_works(lambda: queue.dispatch(*numbered(0, 1)))
            assert 0 in payloads_of(queue.fetch())

    @needs("cut")
    def test_an_outcome_can_still_be_told_after_its_connections_were_cut(self) -> None:
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(*numbered(0, 1))
            [fetched] = queue.fetch()
            self._cut(queue)
            _until_it_works(lambda: queue.done(fetched))
            self.advance(clock, 61.0)
            assert queue.fetch() == []

    def _cut(self, queue: Any) -> None:
        assert self.cut is not None
        self.cut(queue.connector)


def _until_it_works(call: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
