"""Redis fails; the queue reports it at once, once, and hides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from onceward.queue import QueueError, QueueMessage
from onceward.testing import servers
from tests.support.every_redis import every_redis
from tests.support.queue.proxy import Proxy, proxy
from tests.support.queue.world import QueueWorld, later
from tests.support.wait import until

pytestmark = every_redis


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


@pytest.fixture
def link(redis_url: str) -> Iterator[Proxy]:
    with proxy(redis_url) as made:
        yield made


def connections(world: QueueWorld) -> list[dict[str, str]]:
    """The connections of clients named like the stream."""
    return [each for each in world.admin.client_list() if each["name"] == world.stream]


def cut(world: QueueWorld) -> None:
    for each in connections(world):
        world.admin.client_kill_filter(_id=each["id"])
    until(lambda: not connections(world))


MESSAGE = QueueMessage("s", "group", "1-0", None)
CALLS: dict[str, Callable[[Any], Any]] = {
    "XREADGROUP": lambda queue: queue.read(),
    "XACK": lambda queue: queue.ack(MESSAGE),
    "XAUTOCLAIM": lambda queue: queue.claim_stale(),
    "XADD": lambda queue: queue.enqueue(1),
    "XPENDING": lambda queue: queue.backlog_stats(),
}


@pytest.mark.req("QC-05")
@pytest.mark.parametrize("command", CALLS)
def test_a_connection_lost_during_a_call_is_a_queue_error_and_nothing_is_sent_again(
    world: QueueWorld, link: Proxy, command: str
) -> None:
    client = world.client(link.url)
    queue = world.queue(client)
    queue.read()
    before = link.seen[command]
    link.cut_on = command
    with pytest.raises(QueueError, match="failed") as caught:
        CALLS[command](queue)
    assert isinstance(caught.value.cause, redis.exceptions.ConnectionError)
    sent_in_one_go = 2 if command == "XPENDING" else 1
    assert link.seen[command] - before == sent_in_one_go
    link.cut_on = None
    CALLS[command](queue)


@pytest.mark.req("QC-05")
@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_redis_that_is_not_there_is_a_queue_error_at_once(
    world: QueueWorld, call: Callable[[Any], Any]
) -> None:
    queue = world.queue(world.client("redis://127.0.0.1:1/0"))
    began = time.monotonic()
    with pytest.raises(QueueError) as caught:
        call(queue)
    assert isinstance(caught.value.cause, redis.exceptions.ConnectionError)
    assert time.monotonic() - began < 5, "no backoff, no second attempt"


@pytest.mark.req("QC-05")
def test_a_connection_that_is_cut_while_a_read_blocks_is_seen_at_once(world: QueueWorld) -> None:
    consumer = world.consumer(world.client(client_name=world.stream), block_ms=60_000)

    def cut_when_it_blocks() -> None:
        until(lambda: any(each["cmd"] == "xreadgroup" for each in connections(world)))
        cut(world)

    began = time.monotonic()
    with later(0, cut_when_it_blocks), pytest.raises(QueueError, match="reading"):
        consumer.next()
    assert time.monotonic() - began < 30
    assert consumer.next(1) is None, "the next call gets a new connection"


@pytest.mark.req("QC-05")
def test_a_connection_that_redis_closed_in_a_pause_is_replaced_before_anything_is_sent(
    world: QueueWorld,
) -> None:
    world.add("1")
    consumer = world.consumer(world.client(client_name=world.stream))
    message = consumer.next()
    cut(world)
    if world.asynchronous:
        import asyncio

        consumer.ended(asyncio.sleep(0.05))
    consumer.ack(message)
    assert world.pending() == []


@pytest.mark.req("QC-05")
def test_a_reply_that_does_not_come_is_a_queue_error_after_the_clients_own_time_out(
    world: QueueWorld, link: Proxy
) -> None:
    queue = world.queue(world.client(link.url, socket_timeout=0.7))
    queue.enqueue(1)
    link.answers["XACK"] = b""
    began = time.monotonic()
    with pytest.raises(QueueError, match="acknowledging message 1-0") as caught:
        queue.ack(MESSAGE)
    assert 0.1 < time.monotonic() - began < 30
    assert caught.value.cause is not None
    link.answers.clear()
    queue.ack(MESSAGE)


@pytest.mark.req("QC-05")
def test_error_replies_are_queue_errors_with_the_words_of_redis(world: QueueWorld) -> None:
    world.admin.set(world.stream, "a string")
    queue = world.queue()
    for call in (queue.read, queue.claim_stale, queue.backlog_stats, lambda: queue.enqueue(1)):
        with pytest.raises(QueueError, match="WRONGTYPE") as caught:
            call()
        assert isinstance(caught.value.cause, redis.exceptions.ResponseError)
    world.admin.delete(world.stream)
    queue.enqueue(1)
    [message] = queue.read()
    world.admin.set(world.stream, "a string")
    with pytest.raises(QueueError, match="WRONGTYPE"):
        queue.ack(message)


@pytest.mark.req("QC-05")
def test_a_stream_deleted_while_consuming_is_an_error_and_the_call_after_it_begins_anew(
    world: QueueWorld,
) -> None:
    world.add("1")
    consumer = world.consumer()
    assert consumer.next().payload == 1
    world.admin.delete(world.stream)
    with pytest.raises(QueueError, match="was deleted"):
        consumer.next()
    assert not world.admin.exists(world.stream), "nothing was created implicitly"
    world.add("2")
    assert consumer.next().payload == 2


@pytest.mark.req("QC-05")
def test_a_group_deleted_while_a_read_blocks_is_an_error(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=500)
    consumer.next(1)

    def consume() -> None:
        for _ in range(20):  # Redis before 7 does not wake up a blocked read
            consumer.next()

    destroy = later(0.1, lambda: world.admin.xgroup_destroy(world.stream, "group"))
    with destroy, pytest.raises(QueueError, match="was deleted"):
        consume()


@pytest.mark.req("QC-05", "QC-09")
def test_a_killed_redis_is_an_error_in_every_call_and_after_its_return_all_goes_on(
    world: QueueWorld, tmp_path: Path
) -> None:
    with servers.redis_server(durable=True) as server:
        client = world.client(server.url)
        consumer, queue = world.consumer(client), world.queue(client)
        queue.enqueue(1)
        message = consumer.next()
        server.kill()
        for call in (
            consumer.next,
            consumer.claim_stale,
            consumer.backlog_stats,
            lambda: consumer.ack(message),
            lambda: queue.enqueue(2),
        ):
            with pytest.raises(QueueError):
                call()
        server.start()
        [again] = consumer.claim_stale(min_idle_ms=0)
        assert (again, again.deliveries) == (message, 2)
        consumer.ack(again)
        assert consumer.backlog_stats().pending == 0
        consumer.close()
        queue.close()


@pytest.fixture
def without_xgroup(world: QueueWorld) -> Iterator[Any]:
    """A client of a user who may do everything but create groups."""
    user = f"user-{world.stream}"
    world.admin.execute_command("ACL", "SETUSER", user, "on", ">secret", "~*", "+@all", "-xgroup")
    yield world.client(username=user, password="secret")
    world.admin.acl_deluser(user)


def test_a_user_who_may_not_create_groups_uses_an_existing_one(
    world: QueueWorld, without_xgroup: Any
) -> None:
    world.admin.xgroup_create(world.stream, "group", "0", mkstream=True)
    [id_] = world.add("1")
    consumer = world.consumer(without_xgroup)
    assert consumer.next().id == id_


def test_a_group_that_is_missing_and_may_not_be_created_is_said_with_the_command(
    world: QueueWorld, without_xgroup: Any
) -> None:
    world.add("1")
    consumer = world.consumer(without_xgroup)
    for _ in range(2):
        with pytest.raises(
            QueueError, match=f"Create it: XGROUP CREATE {world.stream} group 0 MKSTREAM"
        ) as caught:
            consumer.next()
        assert "was deleted" not in str(caught.value)


def test_a_failover_is_not_taken_for_a_deleted_stream(world: QueueWorld, link: Proxy) -> None:
    consumer = world.consumer(world.client(link.url))
    link.answers["XREADGROUP"] = (
        b"-UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)\r\n"
    )
    with pytest.raises(QueueError, match="changed its role, as in a failover") as caught:
        consumer.next()
    assert "deleted" not in str(caught.value)
