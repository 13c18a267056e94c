"""Several threads and processes on one queue, and closing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from onceward.connectors import ConnectorClosedError
from onceward.testing.connectors.driver import ConnectorDriver
from onceward.testing.connectors.samples import numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite, needs
from onceward.transaction import Transaction


class Concurrency(ConnectorSuite):
    def test_concurrent_fetchers_share_nothing_and_lose_nothing(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(*numbered(0, 200))
            together = Barrier(4)

            def consume() -> list[int]:
                together.wait()
                mine: list[int] = []
                while batch := queue.fetch(7):
                    queue.done(*batch)
                    mine += payloads_of(batch)
                return mine

            with ThreadPoolExecutor(4) as threads:
                consumers = [threads.submit(consume) for _ in range(4)]
                taken = [number for consumer in consumers for number in consumer.result()]
            assert sorted(taken) == list(range(200))

    def test_concurrent_dispatchers_keep_their_batches_whole(self) -> None:
        with self.queue() as (queue, _):
            batches = [numbered(start, start + 10) for start in range(0, 80, 10)]
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(lambda batch: queue.dispatch(*batch), batches))
            received = payloads_of(queue.fetch(80))
            starts = received[::10]
            assert received == [start + i for start in starts for i in range(10)]
            assert sorted(starts) == list(range(0, 80, 10))

    @needs("reopen")
    def test_a_queue_outlives_its_connector(self) -> None:
        assert self.reopen is not None
        with self.queue(lease=60.0) as (queue, clock):
            queue.dispatch(*numbered(0, 3))
            first, _, _ = queue.fetch(3)
            queue.done(first)
            queue.close()
            with ConnectorDriver(self.reopen(queue.connector, clock, lease=60.0)) as second:
                assert second.fetch() == []
                self.advance(clock, 61.0)
                assert payloads_of(second.fetch()) == [1, 2]

    @needs("reopen")
    def test_two_connectors_share_one_queue_and_no_delivery(self) -> None:
        assert self.reopen is not None
        with (
            self.queue(lease=60.0) as (one, clock),
            ConnectorDriver(self.reopen(one.connector, clock, lease=60.0)) as two,
        ):
            one.dispatch(*numbered(0, 4))
            mine, yours = one.fetch(2), two.fetch(2)
            assert payloads_of(mine + yours) == [0, 1, 2, 3]
            with pytest.raises(ValueError, match=yours[0].id):
                one.done(*yours)
            one.done(*mine)
            two.done(*yours)
            self.advance(clock, 61.0)
            assert one.fetch() == two.fetch() == []

    def test_closing_twice_is_harmless_and_every_call_after_it_raises(self) -> None:
        with self.queue() as (queue, _):
            queue.dispatch(Transaction())
            [fetched] = queue.fetch()
            queue.close()
            queue.close()
            calls: Sequence[Callable[[], object]] = (
                queue.fetch,
                lambda: queue.dispatch(Transaction()),
                lambda: queue.done(fetched),
                lambda: queue.extend(fetched),
            )
            for call in calls:
                with pytest.raises(ConnectorClosedError):
                    call()
