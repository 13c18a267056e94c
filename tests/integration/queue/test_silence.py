"""stop() ends every wait for a Redis that does not answer, although the client waits forever."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward.queue import QueueError
from tests.support.queue.proxy import Proxy, proxy
from tests.support.queue.world import QueueWorld
from tests.support.silence import once, silent_server


@pytest.fixture(params=["threads", "asyncio"])
def world(request: pytest.FixtureRequest, redis_url: str, tmp_path: Path) -> Iterator[QueueWorld]:
    with QueueWorld(request.param, redis_url, tmp_path) as made:
        yield made


@pytest.fixture
def through(redis_url: str) -> Iterator[Proxy]:
    with proxy(redis_url) as made:
        yield made


@pytest.mark.req("QC-21")
@pytest.mark.parametrize("said", [b"", b"*1\r\n$"], ids=["silent", "half a reply"])
@pytest.mark.parametrize("command", ["XGROUP", "XREADGROUP"])
def test_stop_ends_a_read_that_redis_does_not_answer(
    world: QueueWorld, through: Proxy, command: str, said: bytes
) -> None:
    consumer = world.consumer(world.client(through.url, socket_timeout=None), block_ms=60_000)
    through.answers = {command: said}
    with once(lambda: through.seen[command], consumer.thing.stop):
        consumer.run(handler=world.handler(), engine=world.engine)
    assert world.effects() == []


@pytest.mark.req("QC-21")
@pytest.mark.parametrize("said", [b"", b"*2\r\n$3\r\n0-"], ids=["silent", "half a reply"])
def test_stop_ends_a_claim_that_redis_does_not_answer(world: QueueWorld, through: Proxy, said: bytes) -> None:
    consumer = world.consumer(world.client(through.url, socket_timeout=None))
    through.answers = {"XAUTOCLAIM": said}
    with once(lambda: through.seen["XAUTOCLAIM"], consumer.thing.stop):
        consumer.run_claim_stale(handler=world.handler(), engine=world.engine)
    other = world.consumer(world.client(through.url, socket_timeout=None))
    through.seen.clear()
    with once(lambda: through.seen["XAUTOCLAIM"], other.thing.stop):
        assert other.claim_stale() == []


@pytest.mark.req("QC-22")
@pytest.mark.parametrize("when", ["in flight", "before"])
def test_stop_ends_the_wait_for_an_ack_with_an_error_that_says_so(
    world: QueueWorld, through: Proxy, when: str
) -> None:
    [entry] = world.add("1")
    consumer = world.consumer(world.client(through.url, socket_timeout=None))
    through.answers = {"XACK": b""}
    handler = world.handler(after=lambda _: consumer.thing.stop() if when == "before" else None)
    with (
        once(lambda: through.seen["XACK"], consumer.thing.stop),
        pytest.raises(QueueError, match=r"acknowledging message .* failed: no reply within .* of stop\(\)"),
    ):
        consumer.run(handler=handler, engine=world.engine)
    assert world.effects() == ["1"]
    assert world.pending() == [entry]


@pytest.mark.req("QC-21")
@pytest.mark.parametrize("scheme", ["redis", "rediss"])
@pytest.mark.parametrize("how", ["signal", "thread"])
def test_stop_ends_the_wait_for_a_connection(world: QueueWorld, scheme: str, how: str) -> None:
    with silent_server() as server:
        url = f"{scheme}://:secret@127.0.0.1:{server.port}/0"
        consumer = world.consumer(world.client(url, socket_timeout=None))
        before = signal.signal(signal.SIGUSR1, lambda *_: consumer.thing.stop())
        stop = consumer.thing.stop if how == "thread" else lambda: os.kill(os.getpid(), signal.SIGUSR1)
        try:
            with once(server.heard.is_set, stop):
                consumer.run(handler=world.handler(), engine=world.engine)
        finally:
            signal.signal(signal.SIGUSR1, before)


@pytest.mark.req("QC-23")
@pytest.mark.parametrize("command", ["XADD", "connect"])
def test_ctrl_c_ends_a_call_of_a_queue_that_redis_does_not_answer(
    redis_url: str, tmp_path: Path, through: Proxy, command: str
) -> None:
    through.answers = {"XADD": b""}
    with silent_server() as server, QueueWorld("threads", redis_url, tmp_path) as world:
        url = through.url if command == "XADD" else f"redis://:secret@127.0.0.1:{server.port}/0"
        queue = world.queue(world.client(url, socket_timeout=None))
        heard = server.heard.is_set if command == "connect" else lambda: through.seen["XADD"]
        with once(heard, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
            queue.enqueue({"id": 1})
