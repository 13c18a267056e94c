"""Recovery: explicit, complete, and not blocked by anything in the pending list."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from onceward.queue import QueueMessage, UndecodableEntryError
from onceward.testing import servers
from tests.support.every_redis import every_redis
from tests.support.queue.world import QueueWorld, later
from tests.support.wait import until

pytestmark = every_redis


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["XAUTOCLAIM", "XPENDING-XCLAIM"])
def skipping(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Both ways of claiming must keep the same promises."""
    return {"claim_skip_own_messages": request.param}


def deliver(world: QueueWorld, count: int, name: str = "dead", idle_ms: int = 120_000) -> list[str]:
    """Deliver this many entries to a consumer, as if `idle_ms` ago."""
    with suppress(redis.exceptions.ResponseError):  # it exists already
        world.admin.xgroup_create(world.stream, "group", id="0")
    [[_, entries]] = listed(world.admin.xreadgroup("group", name, {world.stream: ">"}, count=count))
    ids = [id_.decode() for id_, _ in entries]
    world.admin.xclaim(world.stream, "group", name, 0, ids, idle=idle_ms, justid=True)
    return ids


def listed(reply: Any) -> Any:
    return [[name, page[0]] for name, page in reply.items()] if isinstance(reply, dict) else reply


def claimed(consumer: Any, **how: Any) -> list[str]:
    return [message.id for message in consumer.claim_stale(**how)]


@pytest.mark.req("QC-10", "QC-11")
def test_stale_messages_of_a_dead_consumer_are_claimed_with_their_delivery_count(
    world: QueueWorld, skipping: dict[str, Any]
) -> None:
    world.add('{"n": 1}', '{"n": 2}')
    ids = deliver(world, 2)
    consumer = world.consumer(**skipping)
    messages = consumer.claim_stale()
    assert [(message.id, message.payload, message.deliveries) for message in messages] == [
        (ids[0], {"n": 1}, 2),
        (ids[1], {"n": 2}, 2),
    ]
    assert consumer.claim_stale() == [], "they are fresh now"
    owners = {entry["consumer"] for entry in world.admin.xpending_range(world.stream, "group", "-", "+", 10)}
    assert owners == {b"one"}
    for message in messages:
        consumer.ack(message)
    assert world.pending() == []


@pytest.mark.req("QC-10")
def test_min_idle_and_count_are_kept_to(world: QueueWorld, skipping: dict[str, Any]) -> None:
    world.add(*"12345")
    ids = deliver(world, 5, idle_ms=500)
    consumer = world.consumer(claim_idle_ms=100_000, **skipping)
    assert consumer.claim_stale() == []
    assert claimed(consumer, min_idle_ms=400, count=2) == ids[:2]
    assert claimed(consumer, min_idle_ms=400, count=10) == ids[2:]


@pytest.mark.req("QC-11")
@pytest.mark.parametrize("fresh", [10, 500])
def test_a_stale_entry_behind_fresh_ones_is_found(
    world: QueueWorld, skipping: dict[str, Any], fresh: int
) -> None:
    world.add(*["0"] * fresh, "1")
    deliver(world, fresh, idle_ms=0)
    [stale] = deliver(world, 1)
    assert claimed(world.consumer(**skipping), count=1) == [stale]


@pytest.mark.req("QC-11")
@pytest.mark.parametrize("trim", ["delete", "maxlen"])
def test_entries_trimmed_from_the_stream_are_skipped(
    world: QueueWorld, skipping: dict[str, Any], trim: str
) -> None:
    world.add(*map(str, range(40)))
    ids = deliver(world, 40)
    if trim == "delete":
        world.admin.xdel(world.stream, *ids[:15], *ids[20:30])
        left = ids[15:20] + ids[30:]
    else:
        world.admin.xtrim(world.stream, maxlen=15, approximate=False)
        left = ids[25:]
    consumer = world.consumer(**skipping)
    assert claimed(consumer, count=3) == left[:3]
    assert claimed(consumer, count=100) == left[3:]


@pytest.mark.req("QC-11")
def test_a_pending_list_of_nothing_but_trimmed_entries_is_an_empty_claim_and_a_line_of_the_log(
    world: QueueWorld, skipping: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    world.add(*"123")
    ids = deliver(world, 3)
    world.admin.xtrim(world.stream, maxlen=0, approximate=False)
    assert world.consumer(**skipping).claim_stale() == []
    if world.pending():  # as on Redis 6.2: `backlog_stats` counts them
        assert len(world.pending()) == 3
        return
    until(lambda: caplog.messages)
    logged = " ".join(caplog.messages)
    assert all(each in logged for each in ids)
    assert "trimmed" in logged


@pytest.mark.req("QC-11")
def test_own_messages_are_claimed_or_skipped_as_configured(world: QueueWorld) -> None:
    world.add("1", "2")
    [own] = deliver(world, 1, name="one")
    [other] = deliver(world, 1, name="dead")
    skips = world.consumer(claim_skip_own_messages=True)
    assert claimed(skips) == [other]
    assert claimed(world.consumer(claim_skip_own_messages=False)) == [own]


@pytest.mark.req("QC-10")
def test_claiming_before_anything_exists_finds_nothing(world: QueueWorld, skipping: dict[str, Any]) -> None:
    assert world.consumer(**skipping).claim_stale() == []


@pytest.mark.req("QC-16")
def test_undecodable_entries_neither_fail_a_claim_nor_hide_what_lies_behind_them(
    world: QueueWorld, skipping: dict[str, Any]
) -> None:
    world.add(*["{"] * 30, "1", "}", "2")
    ids = deliver(world, 33)
    consumer = world.consumer(**skipping)
    assert claimed(consumer, count=2) == [ids[30], ids[32]]
    with pytest.raises(UndecodableEntryError) as caught:
        consumer.claim_stale()
    assert [entry.id for entry in caught.value.entries] == [*ids[:30], ids[31]]
    assert world.stream in str(caught.value)
    assert {entry.deliveries for entry in caught.value.entries} == {2}
    assert consumer.claim_stale() == []
    assert world.pending() == ids


@pytest.mark.req("QC-16")
def test_undecodable_entries_alone_are_raised_at_once(world: QueueWorld, skipping: dict[str, Any]) -> None:
    world.add("{", "}")
    ids = deliver(world, 2)
    consumer = world.consumer(**skipping)
    with pytest.raises(UndecodableEntryError) as caught:
        consumer.claim_stale()
    assert [entry.id for entry in caught.value.entries] == ids
    assert consumer.claim_stale() == []
    assert consumer.next() is None, "an error of a claim is not raised by a read"


@pytest.mark.req("QC-12")
def test_a_claim_takes_no_new_message(world: QueueWorld) -> None:
    world.add("1", "2")
    [stale] = deliver(world, 1)
    consumer = world.consumer()
    assert claimed(consumer) == [stale]
    assert consumer.next().payload == 2


def test_a_redis_without_xautoclaim_is_claimed_from_too(world: QueueWorld) -> None:
    """Redis before 6.2: the same server, without that command."""
    with servers.redis_server() as server:
        consumer = world.consumer(world.client(server.url), claim_idle_ms=0)
        queue = world.queue(world.client(server.url), consumer_name="dead")
        ids = [queue.enqueue(number) for number in range(3)]
        queue.read(count=3)
        claims = consumer.thing._claims
        real = claims._commands.autoclaim

        def unknown(*arguments: Any) -> Any:
            command = real(*arguments)
            return command._replace(arguments=("XNOTTHERE", *command.arguments[1:]))

        claims._commands.autoclaim = unknown
        assert claimed(consumer, count=2) == ids[:2]
        assert claimed(consumer) == ids
        consumer.close()
        queue.close()


@pytest.mark.req("QC-10")
def test_run_claim_stale_works_off_a_backlog_without_a_pause_and_waits_only_when_nothing_is_stale(
    world: QueueWorld, skipping: dict[str, Any]
) -> None:
    world.add(*map(str, range(60)))
    deliver(world, 60)
    consumer = world.consumer(**skipping)

    def stop_at_the_end(message: QueueMessage) -> None:
        assert message.deliveries == 2
        if message.payload == "late":
            consumer.thing.stop()

    def add_late() -> None:
        world.add('"late"')
        deliver(world, 1)

    began = time.monotonic()
    with later(0.5, add_late):
        consumer.run_claim_stale(
            handler=world.handler(after=stop_at_the_end), engine=world.engine, wait_ms=1000
        )
    assert time.monotonic() - began < 30, "sixty pauses would have been a minute"
    assert sorted(world.effects()) == sorted([*map(str, range(60)), "late"])
    assert world.pending() == []


@pytest.mark.req("QC-02")
def test_an_idle_run_claim_stale_asks_redis_once_a_wait_and_stops_at_once(world: QueueWorld) -> None:
    consumer = world.consumer()
    before, began = world.calls("xautoclaim"), time.monotonic()

    def stop_when_it_waits() -> None:
        until(lambda: world.calls("xautoclaim") > before)
        time.sleep(0.3)
        consumer.thing.stop()

    with later(0, stop_when_it_waits):
        consumer.run_claim_stale(handler=world.handler(), engine=world.engine, wait_ms=60_000)
    assert world.calls("xautoclaim") - before == 1
    assert time.monotonic() - began < 30


def test_run_claim_stale_leaves_with_what_its_handler_raises_and_the_message_named(world: QueueWorld) -> None:
    world.add("1", "2")
    ids = deliver(world, 2)

    def fail(message: QueueMessage) -> None:
        if message.payload == 2:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no") as caught:
        world.consumer().run_claim_stale(handler=world.handler(after=fail), engine=world.engine)
    assert ids[1] in caught.value.__notes__[0]
    assert "delivery 2" in caught.value.__notes__[0]
    assert world.effects() == ["1"]
    assert world.pending() == [ids[1]]


@pytest.mark.req("QC-16")
def test_run_claim_stale_surfaces_an_undecodable_entry_and_goes_on_behind_it_when_called_again(
    world: QueueWorld,
) -> None:
    world.add("1", "{", "2")
    ids = deliver(world, 3)
    consumer = world.consumer()
    with pytest.raises(UndecodableEntryError, match=ids[1]):
        consumer.run_claim_stale(handler=world.handler(), engine=world.engine, wait_ms=1)
    assert world.effects() == ["1", "2"]
    assert world.pending() == [ids[1]]
    world.add("3")
    deliver(world, 1)
    consumer.run_claim_stale(
        handler=world.handler(after=lambda _: consumer.thing.stop()), engine=world.engine
    )
    assert world.effects() == ["1", "2", "3"]
