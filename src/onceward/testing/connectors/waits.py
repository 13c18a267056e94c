"""Waiting for work: it ends when a message is there or due, takes nothing, and a stop ends it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onceward.task import source as engine_source
from onceward.task.mixins.consumer import AsyncConsumerTask, ConsumerTask
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.testing.connectors.driver import ConnectorDriver
from onceward.testing.connectors.samples import numbered, payloads_of
from onceward.testing.connectors.suite import ConnectorSuite, needs
from onceward.transaction import Settlement, Transaction, Verdict

LONG = 60.0
"""Seconds that no wait may take."""
SOON = LONG / 2


class Waits(ConnectorSuite):
    @contextmanager
    def _queue(self, **settings: Any) -> Iterator[ConnectorDriver]:
        assert self.make_waiting is not None
        with ConnectorDriver(self.make_waiting(**settings)) as queue:
            assert queue.fetch() == []
            yield queue

    @needs("make_waiting")
    def test_a_wait_for_a_queue_that_stays_empty_ends_with_its_time(self) -> None:
        with self._queue() as queue:
            # The first ones may end in vain, while it begins to listen.
            assert not all(queue.call("await_transactions", 0.05) for _ in range(20))
            assert queue.fetch() == []

    @needs("make_waiting")
    def test_a_message_ends_a_wait_and_is_still_there(self) -> None:
        with self._queue() as queue:
            queue.call("await_transactions", 0.01)
            sender = threading.Timer(0.1, queue.dispatch, numbered(0, 1))
            sender.start()
            began = time.monotonic()
            while not (fetched := queue.fetch()):
                queue.call("await_transactions", LONG)
                assert time.monotonic() - began < SOON
            assert payloads_of(fetched) == [0]
            sender.join()

    @needs("make_waiting")
    def test_one_that_arrived_before_the_wait_ends_it_at_once(self) -> None:
        with self._queue() as queue:
            queue.dispatch(*numbered(0, 1))
            assert queue.call("await_transactions", LONG)
            assert payloads_of(queue.fetch()) == [0]

    @needs("make_waiting")
    def test_the_end_of_a_delay_and_of_a_lease_end_a_wait(self) -> None:
        with self._queue(lease=2.0) as queue:
            queue.dispatch(*numbered(0, 2))
            delayed, _lost = queue.fetch()
            queue.settle([Settlement(delayed, Verdict.RETURNED, delay=0.2)])
            began = time.monotonic()
            for number in (0, 1):
                while not (again := queue.fetch()):
                    queue.call("await_transactions", LONG)
                    assert time.monotonic() - began < SOON
                assert payloads_of(again) == [number]
                queue.done(*again)
            assert time.monotonic() - began < SOON

    @needs("make_waiting")
    @pytest.mark.req("CN-12")
    def test_a_wait_for_the_end_of_a_delay_may_be_longer_than_a_lease(self) -> None:
        lease = 0.3
        with self._queue(lease=lease) as queue:
            queue.dispatch(*numbered(0, 1))
            while True:
                began = time.monotonic()
                fetched = queue.fetch()
                queue.settle([Settlement(each, Verdict.RETURNED, delay=1.5) for each in fetched])
                if fetched and time.monotonic() - began < lease:
                    break
                queue.call("await_transactions", lease)
            while not (again := queue.fetch()):
                queue.call("await_transactions", LONG)
                assert time.monotonic() - began < SOON
            assert time.monotonic() - began >= 1.5
            queue.done(*again)

    @needs("make_waiting")
    def test_what_was_given_back_for_later_can_be_hastened(self) -> None:
        with self._queue(lease=120.0) as queue:
            if not any(name.startswith("hasten_transactions") for name in dir(queue.connector)):
                return  # not every source can
            queue.dispatch(*numbered(0, 2))
            later, held = queue.fetch()
            queue.settle([Settlement(later, Verdict.RETURNED, delay=LONG)])
            assert queue.fetch() == []
            queue.call("hasten_transactions", [later, held])
            began = time.monotonic()
            while not (again := queue.fetch()):
                queue.call("await_transactions", LONG)
                assert time.monotonic() - began < SOON
            assert payloads_of(again) == [0]
            assert queue.fetch() == []  # the other one is held
            queue.done(*again, held)

    @needs("make_waiting")
    def test_a_stop_ends_a_wait(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_source, "LONGEST_WAIT", LONG)
        assert self.make_waiting is not None
        connector = self.make_waiting()
        task = _Idle(connector)
        consuming = threading.Thread(target=task.consume)
        consuming.start()
        assert task.waits.wait(LONG)
        time.sleep(0.2)  # it may stop in the middle of a wait, or just before it
        began = time.monotonic()
        task.stop()
        consuming.join(LONG)
        assert time.monotonic() - began < SOON


class _Idle:
    """A consumer that waits for work in a thread of its own."""

    def __init__(self, connector: Any) -> None:
        self.asynchronous = not hasattr(connector, "fetch_transactions")
        self.waits = threading.Event()
        self._policy = ConsumerPolicy.model_validate({"loop": {"streaming": True}})
        kind: Any = _AsyncNothing if self.asynchronous else _Nothing
        self._connector = connector
        self._task = kind({"source": _Observed(connector, self.waits.set)})
        self.stop: Callable[[], None] = self._task.stop

    def consume(self) -> None:
        if self.asynchronous:
            asyncio.run(self._consume_async())
        else:
            self._task.consume_transactions(self._policy)
            self._connector.close()

    async def _consume_async(self) -> None:
        await self._task.consume_transactions(self._policy)
        await self._connector.close_async()


class _Nothing(ConsumerTask):
    def process_transaction(self, transaction: Transaction) -> None: ...


class _AsyncNothing(AsyncConsumerTask):
    async def process_transaction(self, transaction: Transaction) -> None: ...


class _Observed:
    """A connector, with a word when it begins to wait."""

    def __init__(self, connector: Any, on_wait: Callable[[], None]) -> None:
        self._connector = connector
        self._on_wait = on_wait

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._connector, name)
        if not name.startswith("await_transactions"):
            return found

        def wait(seconds: float) -> Any:
            self._on_wait()
            return found(seconds)

        return wait
