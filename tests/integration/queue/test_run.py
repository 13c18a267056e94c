"""`run`: fetch, session, handler, commit, ack. In that order, once, with nothing swallowed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from onceward.errors import ConfigurationError
from onceward.queue import QueueError, QueueMessage, UndecodableEntryError
from tests.support.every_redis import every_redis
from tests.support.queue.proxy import proxy
from tests.support.queue.world import QueueWorld, later
from tests.support.wait import until

pytestmark = every_redis


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


def stop_after(consumer: Any, last: object) -> Any:
    def after(message: QueueMessage) -> None:
        if message.payload == last:
            consumer.thing.stop()

    return after


@pytest.mark.req("QC-07")
def test_run_fetches_hands_over_commits_and_acknowledges_in_that_order(world: QueueWorld) -> None:
    ids = world.add("1", "2", "3")
    consumer = world.consumer()
    states = []

    def look(message: QueueMessage) -> None:
        states.append((message.payload, world.effects(), world.pending()))
        if message.payload == 3:
            consumer.thing.stop()

    commits = []
    engine = getattr(world.engine, "sync_engine", world.engine)
    event.listen(engine, "commit", lambda _: commits.append((world.pending(), len(world.effects()))))
    consumer.run(handler=world.handler(before=look), engine=world.engine)
    assert states == [(1, [], ids[:1]), (2, ["1"], ids[1:2]), (3, ["1", "2"], ids[2:])]
    assert commits == [([ids[0]], 0), ([ids[1]], 1), ([ids[2]], 2)], "pending until after the commit"
    assert world.effects() == ["1", "2", "3"]
    assert world.pending() == []


@pytest.mark.req("QC-07")
def test_run_opens_one_session_for_each_message(world: QueueWorld) -> None:
    world.add("1", "2")
    consumer = world.consumer()
    sessions: list[Any] = []

    def note(message: QueueMessage, session: Any) -> None:
        sessions.append(session)
        if message.payload == 2:
            consumer.thing.stop()

    async def note_async(message: QueueMessage, session: Any) -> None:
        note(message, session)

    consumer.run(handler=note_async if world.asynchronous else note, engine=world.engine)
    assert len({id(session) for session in sessions}) == 2


@pytest.mark.req("QC-07")
def test_run_sends_the_ack_along_with_the_next_read_and_waits_when_idle(world: QueueWorld) -> None:
    world.add("1")
    consumer = world.consumer(block_ms=60_000)
    handler = world.handler(after=stop_after(consumer, 2))

    def add_when_idle() -> None:
        try:
            until(lambda: world.effects() == ["1"] and world.pending() == [])
        finally:
            world.add("2")

    with later(0, add_when_idle):
        consumer.run(handler=handler, engine=world.engine)
    assert world.effects() == ["1", "2"]
    assert world.pending() == []


async def unawaited(*_: Any) -> None: ...


def yielding(*_: Any) -> Iterator[None]:
    yield


async def yielding_async(*_: Any) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize("handler", [yielding, yielding_async, partial(yielding, 1)])
def test_a_handler_that_yields_is_refused_before_anything_is_read(world: QueueWorld, handler: Any) -> None:
    world.add("1")
    for run in (world.consumer().run, world.consumer().run_claim_stale):
        with pytest.raises(ConfigurationError, match=r"the handler yielding.* has a `yield`"):
            run(handler=handler, engine=world.engine)
    assert world.consumer().next().payload == 1, "as a new message"


@pytest.mark.parametrize("make", [unawaited, yielding, yielding_async])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_message_stays_pending_if_its_handler_returns_before_it_has_run(
    world: QueueWorld, make: Any
) -> None:
    ids = world.add("1")

    async def handle_async(*_: Any) -> Any:
        return make()

    handler = handle_async if world.asynchronous else lambda *_: make()
    with pytest.raises(TypeError, match="so its code has not run"):
        world.consumer().run(handler=handler, engine=world.engine)
    assert world.pending() == ids


class Odd(Exception):
    pass


@pytest.mark.req("QC-08")
@pytest.mark.parametrize("kind", [Odd, KeyError, StopIteration, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_a_handler_raises_leaves_run_unchanged_with_a_note_and_the_message_stays_pending(
    world: QueueWorld, kind: type[BaseException]
) -> None:
    if world.asynchronous and kind is not Odd and kind is not KeyError:
        kind = Odd  # Python itself converts StopIteration in a coroutine, and the others end the loop
    first, second = world.add("1", "2")
    consumer = world.consumer()
    raised = kind("no")
    handled = []

    def fail(message: QueueMessage) -> None:
        handled.append(message.payload)
        if message.payload == 2:
            raise raised

    with pytest.raises(kind) as caught:
        consumer.run(handler=world.handler(after=fail), engine=world.engine)
    assert caught.value is raised
    assert caught.value.__cause__ is None
    [note] = raised.__notes__
    assert second in note
    assert world.stream in note
    assert world.effects() == ["1"], "rolled back"
    assert world.pending() == [second]
    assert handled == [1, 2], "nothing was retried"
    assert first not in world.pending()


@pytest.mark.req("QC-08")
def test_run_after_a_failure_goes_on_with_the_next_new_message(world: QueueWorld) -> None:
    failed, _ = world.add("1", "2")
    consumer = world.consumer()

    def fail(message: QueueMessage) -> None:
        if message.payload == 1:
            raise Odd
        consumer.thing.stop()

    handler = world.handler(after=fail)
    with pytest.raises(Odd):
        consumer.run(handler=handler, engine=world.engine)
    consumer.run(handler=handler, engine=world.engine)
    assert world.effects() == ["2"]
    assert world.pending() == [failed]


@pytest.mark.req("QC-09")
def test_a_commit_that_fails_leaves_run_and_nothing_is_acknowledged(world: QueueWorld) -> None:
    [id_] = world.add("1")
    consumer = world.consumer()
    engine = getattr(world.engine, "sync_engine", world.engine)
    broken = Odd("disk full")

    def refuse(_: Any) -> None:
        raise broken

    event.listen(engine, "commit", refuse)
    try:
        with pytest.raises(Odd) as caught:
            consumer.run(handler=world.handler(), engine=world.engine)
    finally:
        event.remove(engine, "commit", refuse)
    assert caught.value is broken
    assert id_ in broken.__notes__[-1]
    assert world.pending() == [id_]
    assert world.effects() == []


@pytest.mark.req("QC-09")
@pytest.mark.parametrize("how", ["lost", "refused"])
@pytest.mark.parametrize("stopping", [False, True])
def test_an_ack_that_fails_after_the_commit_is_a_queue_error_and_the_message_comes_again(
    world: QueueWorld, how: str, stopping: bool
) -> None:
    id_, following = world.add("1", "2")
    with proxy(world.url) as link:
        consumer = world.consumer(world.client(link.url))
        if how == "lost":
            link.cut_on = "XACK"
        else:
            link.answers["XACK"] = b"-NOPERM not you\r\n"
        after = stop_after(consumer, 1) if stopping else lambda _: None
        with pytest.raises(QueueError, match=f"acknowledging message {id_}"):
            consumer.run(handler=world.handler(after=after), engine=world.engine)
        assert link.seen["XACK"] == 1
        consumer.close()
    assert world.effects() == ["1"]
    assert world.pending() == [id_], "nothing more was read"
    other = world.consumer(consumer_name="two")
    [again] = other.claim_stale(min_idle_ms=0)
    assert (again.id, again.deliveries) == (id_, 2)
    assert other.next().id == following


@pytest.mark.req("QC-06")
def test_stop_from_a_signal_ends_an_idle_run(world: QueueWorld) -> None:
    consumer = world.consumer(block_ms=60_000)
    before = signal.signal(signal.SIGTERM, lambda *_: consumer.thing.stop())
    began = time.monotonic()
    try:
        with later(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)):
            consumer.run(handler=world.handler(), engine=world.engine)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - began < 30


@pytest.mark.req("QC-06")
def test_stop_during_a_handler_lets_it_commit_and_acknowledge_and_reads_nothing_more(
    world: QueueWorld,
) -> None:
    world.add("1", "2")
    consumer = world.consumer()
    consumer.run(handler=world.handler(before=stop_after(consumer, 1)), engine=world.engine)
    assert world.effects() == ["1"]
    assert world.pending() == []
    assert world.consumer(consumer_name="two").next().payload == 2


@pytest.mark.req("QC-16")
def test_run_leaves_with_an_undecodable_entry_and_has_acknowledged_what_came_before(
    world: QueueWorld,
) -> None:
    _, bad = world.add("1", "{")
    with pytest.raises(UndecodableEntryError, match=bad):
        world.consumer().run(handler=world.handler(), engine=world.engine)
    assert world.effects() == ["1"]
    assert world.pending() == [bad]


def test_a_handler_of_the_wrong_kind_is_an_error_and_loses_nothing(world: QueueWorld) -> None:
    [id_] = world.add("1")

    async def handle_async(_: QueueMessage, session: Any) -> None: ...

    def handle(_: QueueMessage, session: Any) -> None: ...

    wrong, error = (handle, TypeError) if world.asynchronous else (handle_async, ConfigurationError)
    with pytest.raises(error, match="`async def`"):
        world.consumer().run(handler=wrong, engine=world.engine)
    if world.asynchronous:
        assert world.pending() == [id_]
    else:
        assert world.consumer().next().id == id_, "it was refused before anything was read"


@pytest.mark.req("QC-10", "QC-12")
def test_run_next_and_iteration_never_claim_and_take_new_messages_before_stale_ones(
    world: QueueWorld,
) -> None:
    [stale] = world.add("1")
    assert world.consumer(consumer_name="dead").next().id == stale
    time.sleep(0.02)
    world.add("2", "3", "4")
    before = world.calls("xautoclaim"), world.calls("xclaim"), world.calls("xpending")
    consumer = world.consumer(claim_idle_ms=1)
    assert consumer.next().payload == 2
    assert next(consumer.iter_messages()).payload == 3
    handler = world.handler(after=stop_after(consumer, 4))
    consumer.run(handler=handler, engine=world.engine)
    assert (world.calls("xautoclaim"), world.calls("xclaim"), world.calls("xpending")) == before
    assert world.effects() == ["4"]
    assert stale in world.pending()


def test_the_unique_key_of_an_effect_makes_a_redelivery_harmless(world: QueueWorld) -> None:
    world.add("1")
    dead = world.consumer(consumer_name="dead")
    dead.next()
    consumer = world.consumer()

    def handle(message: QueueMessage, session: Any) -> None:
        session.execute(text("INSERT OR IGNORE INTO effects (id) VALUES (:id)"), {"id": message.id})
        consumer.thing.stop()

    async def handle_async(message: QueueMessage, session: Any) -> None:
        await session.execute(text("INSERT OR IGNORE INTO effects (id) VALUES (:id)"), {"id": message.id})
        consumer.thing.stop()

    handler = handle_async if world.asynchronous else handle
    consumer.run_claim_stale(handler=handler, engine=world.engine, min_idle_ms=0)
    assert len(world.effects()) == 1
    assert world.pending() == []
