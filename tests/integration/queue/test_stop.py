"""stop(): at once, permanently, from anywhere, and without losing anything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.every_redis import every_redis
from tests.support.queue.world import QueueWorld, later

pytestmark = every_redis


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


@pytest.mark.req("QC-06")
def test_after_stop_nothing_is_read_or_claimed_and_what_is_in_hand_can_be_acknowledged(
    world: QueueWorld,
) -> None:
    first, second = world.add("1", "2")
    consumer = world.consumer()
    message = consumer.next()
    consumer.stop()
    consumer.stop()
    before = world.calls("xreadgroup"), world.calls("xautoclaim")
    assert consumer.next() is None
    assert list(consumer.iter_messages()) == []
    assert consumer.claim_stale(min_idle_ms=0) == []
    assert (world.calls("xreadgroup"), world.calls("xautoclaim")) == before
    assert world.pending() == [first]
    consumer.ack(message)
    assert world.pending() == []
    assert [message.id for message in world.queue().read(count=10)] == [second]


@pytest.mark.req("QC-06")
def test_stop_before_the_start_is_harmless(world: QueueWorld) -> None:
    world.add("1")
    consumer = world.consumer(block_ms=60_000)
    consumer.stop()
    assert consumer.next() is None
    consumer.run(handler=world.handler(), engine=world.engine)
    consumer.run_claim_stale(handler=world.handler(), engine=world.engine)
    assert world.effects() == []


@pytest.mark.req("QC-06")
@pytest.mark.parametrize("how", ["signal", "thread"])
def test_stop_ends_a_blocked_read_at_once(world: QueueWorld, how: str) -> None:
    delays = []
    for _ in range(5):
        consumer = world.consumer(block_ms=60_000)
        stopped = []

        def stop(*_: Any, consumer: Any = consumer, stopped: list[float] = stopped) -> None:
            stopped.append(time.monotonic())
            consumer.thing.stop()

        before = signal.signal(signal.SIGUSR1, stop)
        try:
            with later(0.1, stop if how == "thread" else lambda: os.kill(os.getpid(), signal.SIGUSR1)):
                assert consumer.next() is None
        finally:
            signal.signal(signal.SIGUSR1, before)
        delays.append(time.monotonic() - stopped[0])
    assert min(delays) < 0.2
    assert max(delays) < 30


@pytest.mark.req("QC-06")
def test_a_storm_of_signals_that_stop_does_not_deadlock(world: QueueWorld) -> None:
    for _ in range(20):
        consumer = world.consumer(block_ms=60_000)
        before = signal.signal(signal.SIGALRM, lambda *_, consumer=consumer: consumer.thing.stop())
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)
        try:
            assert consumer.next() is None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@pytest.mark.req("QC-06")
def test_a_message_that_arrives_after_stop_is_not_handed_over_and_not_lost(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=60_000)

    def stop_then_add() -> None:
        consumer.thing.stop()
        world.add("1")

    with later(0.1, stop_then_add):
        assert list(consumer.iter_messages()) == []
    other = world.consumer(consumer_name="two")
    found = [other.next(), *other.claim_stale(min_idle_ms=0)]
    assert 1 in [message.payload for message in found if message is not None]
