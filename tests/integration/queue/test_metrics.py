"""Queue metrics are counted at the Redis calls, and only if someone listens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.queue import QueueError, UndecodableEntryError
from onceward.testing import record
from tests.support.queue.proxy import proxy
from tests.support.queue.world import QueueWorld


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


@pytest.mark.req("QC-17")
def test_reads_acks_claims_and_their_latencies_are_counted(world: QueueWorld) -> None:
    queue = world.queue()
    where = {"stream": world.stream, "group": "group"}
    with record() as recording:
        for number in range(4):
            queue.enqueue(number)
        messages = queue.read(count=3)
        queue.ack(messages[0])
        queue.ack(messages[0])
        queue.claim_stale(min_idle_ms=0)
        assert recording.metric("onceward.queue.enqueued", **where) == 4
        assert recording.metric("onceward.queue.read", **where) == 3
        assert recording.metric("onceward.queue.acked", **where) == 1, "the second ack found nothing to do"
        assert recording.metric("onceward.queue.claimed", **where) == 2
        for operation, calls in {"enqueue": 4, "read": 1, "ack": 2, "claim": 1}.items():
            assert recording.metric("onceward.queue.duration", operation=operation, **where) == calls


@pytest.mark.req("QC-17")
def test_the_acks_and_reads_of_run_are_counted_each_by_itself(world: QueueWorld) -> None:
    world.add("1", "2", "3")
    consumer = world.consumer()
    handler = world.handler(after=lambda message: message.payload == 3 and consumer.thing.stop())
    with record() as recording:
        consumer.run(handler=handler, engine=world.engine)
        assert recording.metric("onceward.queue.read") == 3
        assert recording.metric("onceward.queue.acked") == 3
        assert recording.metric("onceward.queue.duration", operation="read") == 3
        assert recording.metric("onceward.queue.duration", operation="ack") == 3


@pytest.mark.req("QC-17")
def test_failures_and_undecodable_entries_are_counted(world: QueueWorld) -> None:
    world.add("{")
    with proxy(world.url) as link, record() as recording:
        queue = world.queue(world.client(link.url))
        with pytest.raises(UndecodableEntryError):
            queue.read()
        link.cut_on = "XREADGROUP"
        with pytest.raises(QueueError):
            queue.read()
        assert recording.metric("onceward.queue.undecodable") == 1
        assert recording.metric("onceward.queue.failures", operation="read") == 1
        queue.close()


@pytest.mark.req("QC-17")
def test_the_consumer_asks_redis_for_nothing_but_messages_and_has_no_gauges(world: QueueWorld) -> None:
    world.add("1")
    consumer = world.consumer()
    with record() as recording:
        asked = ("xlen", "xpending", "xinfo", "ping", "xautoclaim")
        before = [world.calls(command) for command in asked]
        consumer.ack(consumer.next())
        consumer.next()
        assert [world.calls(command) for command in asked] == before
        for gauge in ("backlog", "pending", "length", "lag", "health", "connected"):
            assert recording.metric(f"onceward.queue.{gauge}") == 0


@pytest.mark.req("QC-17")
def test_when_nobody_listens_nothing_is_counted(world: QueueWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(*_: object) -> None:
        raise AssertionError("an instrument was made")

    monkeypatch.setattr("onceward.queue.metrics.QueueInstruments.__init__", counted)
    monkeypatch.setattr("onceward.queue.metrics.Count.__init__", counted)
    queue = world.queue()
    queue.enqueue(1)
    [message] = queue.read()
    queue.ack(message)
    queue.claim_stale()
