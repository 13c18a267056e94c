"""Reading, iterating and acknowledging, on a real Redis, in threads and asyncio with the same code."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward.queue import QueueError, UndecodableEntryError
from tests.support.every_redis import every_redis
from tests.support.queue.world import QueueWorld, later

pytestmark = every_redis


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


@pytest.mark.req("QC-01")
def test_next_returns_one_message_at_a_time_in_order_and_then_none(world: QueueWorld) -> None:
    first, second = world.add('{"n": 1}', '{"n": 2}')
    consumer = world.consumer()
    one, two = consumer.next(), consumer.next()
    assert (one.stream, one.group, one.id, one.payload) == (world.stream, "group", first, {"n": 1})
    assert (two.id, two.payload, two.deliveries) == (second, {"n": 2}, 1)
    assert consumer.next() is None
    assert world.pending() == [first, second]


@pytest.mark.req("QC-01")
def test_next_blocks_in_redis_for_the_time_given_or_else_the_configured_one(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=300)
    consumer.next(1)
    for block_ms, least in ((None, 0.3), (100, 0.1)):
        before, began = world.calls("xreadgroup"), time.monotonic()
        assert consumer.next(block_ms) is None
        assert time.monotonic() - began > least * 0.9  # Redis counts in its own ticks
        assert world.calls("xreadgroup") - before == 1


@pytest.mark.req("QC-01")
def test_a_message_that_arrives_during_the_wait_ends_it(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=60_000)
    with later(0.1, lambda: world.add("1")):
        assert consumer.next().payload == 1


@pytest.mark.req("QC-02")
def test_an_idle_consumer_costs_under_ten_commands_a_second_and_no_cpu(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=5000)
    world.admin.info()
    before = world.admin.info("stats")["total_commands_processed"]
    began = time.monotonic()
    cpu = 0.0

    def after_some_time() -> None:
        nonlocal cpu
        time.sleep(0.3)  # let it connect
        cpu = -time.process_time()
        time.sleep(1.2)
        cpu += time.process_time()
        consumer.thing.stop()

    with later(0, after_some_time):
        assert list(consumer.iter_messages()) == []
    spent = world.admin.info("stats")["total_commands_processed"] - before
    assert spent / (time.monotonic() - began) < 10
    assert cpu < 0.1


@pytest.mark.req("QC-02")
def test_a_reply_on_the_edge_of_the_clients_socket_time_out_is_not_lost(world: QueueWorld) -> None:
    client = world.client(socket_timeout=0.5)
    consumer = world.consumer(client, block_ms=60_000)
    with later(1.5, lambda: world.add("1")):
        assert consumer.next().payload == 1
    assert consumer.next(500) is None


@pytest.mark.req("QC-02")
def test_every_message_is_delivered_while_it_is_read_with_the_shortest_waits(world: QueueWorld) -> None:
    consumer = world.consumer()
    added = threading.Event()

    def add() -> None:
        for number in range(200):
            world.add(str(number))
        added.set()

    found = []
    with later(0, add):
        while True:
            over = added.is_set()
            message = consumer.next(1)
            if message is not None:
                found.append(message.payload)
            elif over:
                break
    assert found == list(range(200))


@pytest.mark.req("QC-03")
def test_iteration_yields_until_stop_is_observed(world: QueueWorld) -> None:
    world.add(*"12345")
    consumer = world.consumer()
    found = []
    for message in consumer.iter_messages():
        found.append(message.payload)
        if message.payload == 3:
            consumer.stop()
    assert found == [1, 2, 3]
    assert len(world.pending()) == 3


@pytest.mark.req("QC-03")
def test_iteration_waits_through_idle_times(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=20)
    messages = consumer.iter_messages()
    with later(0.2, lambda: world.add("1")):
        assert next(messages).payload == 1


@pytest.mark.req("QC-03")
def test_iteration_propagates_what_redis_and_entries_raise(world: QueueWorld) -> None:
    world.add("1", "{")
    messages = world.consumer().iter_messages()
    assert next(messages).payload == 1
    with pytest.raises(UndecodableEntryError):
        next(messages)


@pytest.mark.req("QC-04")
def test_nothing_is_acknowledged_but_by_ack(world: QueueWorld) -> None:
    ids = world.add("1", "2", "3")
    consumer = world.consumer()
    messages = [consumer.next(), next(consumer.iter_messages()), consumer.next()]
    consumer.claim_stale(min_idle_ms=0)
    consumer.backlog_stats()
    consumer.stop()
    consumer.close()
    assert world.pending() == ids
    consumer.ack(messages[1])
    assert world.pending() == [ids[0], ids[2]]
    consumer.ack(messages[1])
    assert world.pending() == [ids[0], ids[2]]


@pytest.mark.req("QC-13")
def test_a_consumer_holds_no_message_in_reserve_and_starts_no_thread(world: QueueWorld) -> None:
    ids = world.add(*"12345")
    consumer = world.consumer()
    threads = threading.active_count()
    consumer.next()
    assert threading.active_count() == threads
    assert world.pending() == ids[:1]

    def look(_: Any) -> None:
        assert len(world.pending()) == 2, "the first one, and the one being handled"
        if len(world.effects()) == 3:
            consumer.thing.stop()

    consumer.run(handler=world.handler(before=look), engine=world.engine)
    assert world.pending() == ids[:1]


@pytest.mark.req("QC-16")
@pytest.mark.parametrize("fields", [{"data": b"\xff\xfe"}, {"data": "{"}, {"data": "NaN"}, {"other": "1"}])
def test_an_entry_that_cannot_be_decoded_is_an_error_and_stays_pending(
    world: QueueWorld, fields: dict[str, Any]
) -> None:
    bad = world.admin.xadd(world.stream, fields).decode()
    [good] = world.add("1")
    consumer = world.consumer()
    with pytest.raises(QueueError) as caught:
        consumer.next()
    assert world.stream in str(caught.value)
    assert bad in str(caught.value)
    assert caught.value.cause is not None
    assert consumer.next().id == good
    assert world.pending() == [bad, good]
    consumer.ack(caught.value.entries[0])
    assert world.pending() == [good]


@pytest.mark.req("QC-16")
def test_undecodable_entries_do_not_fail_the_good_ones_of_the_same_read(world: QueueWorld) -> None:
    _, bad, _, worse = world.add("1", "{", "2", "}")
    queue = world.queue()
    assert [message.payload for message in queue.read(count=10)] == [1, 2]
    with pytest.raises(UndecodableEntryError) as caught:
        queue.read(count=10)
    assert [entry.id for entry in caught.value.entries] == [bad, worse]
    assert queue.read(count=10) == []
    assert len(world.pending()) == 4


@pytest.mark.req("QC-18")
def test_two_consumers_of_a_group_share_and_two_groups_each_get_all(world: QueueWorld) -> None:
    world.add(*map(str, range(40)))
    one, two = world.consumer(), world.consumer(consumer_name="two")
    shared = [consumer.next().payload for _ in range(20) for consumer in (one, two)]
    assert sorted(shared) == list(range(40))
    assert one.next() is None
    assert two.next() is None
    other = world.queue(consumer_group="other")
    assert [message.payload for message in other.read(count=100)] == list(range(40))


@pytest.mark.req("QC-18")
def test_consumers_that_create_the_group_at_once_all_work(world: QueueWorld) -> None:
    world.add(*map(str, range(20)))
    found: list[Any] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(5)

    def consume(number: int) -> None:
        try:
            with QueueWorld(world.mode, world.url, Path(world.engine.url.database).parent) as own:
                consumer = own.consumer(stream_key=world.stream, consumer_name=f"consumer-{number}")
                barrier.wait()
                found.extend(consumer.next(2000).payload for _ in range(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=consume, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(found) == list(range(20))


@pytest.mark.req("QC-20")
def test_backlog_stats_report_length_pending_and_oldest_idle_without_side_effects(world: QueueWorld) -> None:
    consumer = world.consumer()
    assert consumer.backlog_stats() == (0, 0, None)
    assert not world.admin.exists(world.stream), "not even a stream is created"
    world.add("1", "2", "3")
    assert consumer.backlog_stats() == (3, 0, None), "no group yet"
    first = consumer.next()
    time.sleep(0.05)
    second = consumer.next()
    stats = consumer.backlog_stats()
    assert (stats.length, stats.pending) == (3, 2)
    assert 50 <= stats.oldest_idle_ms < 30_000
    consumer.ack(first)
    consumer.ack(second)
    assert consumer.backlog_stats() == (3, 0, None)
    info = world.admin.xinfo_groups(world.stream)
    assert [(group["pending"], group["consumers"]) for group in info] == [(0, 1)]


@pytest.mark.req("QC-20")
def test_backlog_stats_look_at_a_bounded_part_of_a_large_backlog(world: QueueWorld) -> None:
    pipeline = world.admin.pipeline(transaction=False)
    for _ in range(3000):
        pipeline.xadd(world.stream, {"data": "1"})
    pipeline.execute()
    queue = world.queue()
    assert len(queue.read(count=3000)) == 3000
    before = world.calls("xpending"), world.calls("xlen")
    stats = queue.backlog_stats()
    assert (stats.length, stats.pending) == (3000, 3000)
    assert (world.calls("xpending") - before[0], world.calls("xlen") - before[1]) == (2, 1)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("protocol", [2, 3])
def test_any_client_will_do(world: QueueWorld, decode: bool, protocol: int) -> None:
    queue = world.queue(world.client(decode_responses=decode, protocol=protocol))
    id_ = queue.enqueue({"name": "ü"})
    [message] = queue.read()
    assert (message.id, message.payload) == (id_, {"name": "ü"})
    assert [each.id for each in queue.claim_stale(min_idle_ms=0)] == [id_]
    queue.ack(message)
    assert queue.backlog_stats() == (1, 0, None)


def test_the_given_client_is_left_as_it_was(world: QueueWorld) -> None:
    client = world.client(decode_responses=True, socket_timeout=3, health_check_interval=7)
    before = dict(client.connection_pool.connection_kwargs)
    queue = world.queue(client)
    queue.enqueue(1)
    queue.read()
    assert client.connection_pool.connection_kwargs == before


def test_a_payload_of_ten_megabytes_goes_through(world: QueueWorld) -> None:
    payload = {"text": "ü" * 5_000_000}
    queue = world.queue(block_ms=60_000)
    queue.enqueue(payload)
    [message] = queue.read()
    assert message.payload == payload
    world.admin.delete(world.stream)


def test_a_queue_is_shared_by_many_callers_at_once(world: QueueWorld) -> None:
    if world.asynchronous:
        import asyncio

        queue = world.queue()

        async def together() -> list[Any]:
            async with asyncio.timeout(30):
                waiting = asyncio.create_task(queue.thing.read(block_ms=20_000))
                await asyncio.sleep(0.05)
                await asyncio.gather(*(queue.thing.enqueue(number) for number in range(50)))
                return await waiting

        assert len(queue.ended(together())) == 1
    else:
        queue = world.queue()
        with later(0.05, lambda: [queue.enqueue(number) for number in range(50)]):
            assert len(queue.read(block_ms=20_000)) == 1
    assert queue.backlog_stats().length == 50
