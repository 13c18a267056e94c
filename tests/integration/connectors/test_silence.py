"""A task whose source does not answer: stop() and Ctrl-C end its wait, although the client would wait forever."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from onceward import AsyncConsumerTask, ConsumerTask, Transaction
from onceward.boundary import AsyncBoundaryClient, BoundaryClient
from onceward.connectors.boundary import AsyncBoundaryConnector, BoundaryConnector
from onceward.connectors.redis_streams import AsyncRedisStreamsConnector, RedisStreamsConnector
from onceward.task.exceptions import SettlementException
from onceward.task.report import StopReason
from onceward.testing.connectors.driver import ConnectorDriver
from tests.support.queue.proxy import proxy
from tests.support.silence import SilentServer, once, silent_server


class Quiet(ConsumerTask):
    after: Callable[[], object] = staticmethod(lambda: None)

    def process_transaction(self, transaction: Transaction) -> None:
        self.after()


class AsyncQuiet(AsyncConsumerTask):
    after: Callable[[], object] = staticmethod(lambda: None)

    async def process_transaction(self, transaction: Transaction) -> None:
        self.after()


@pytest.fixture
def server() -> Iterator[SilentServer]:
    with silent_server() as made:
        yield made


def source(kind: str, mode: str, port: int) -> Any:
    if kind == "redis":
        url = f"redis://:secret@127.0.0.1:{port}/0?health_check_interval=0"
        if mode == "threads":
            return RedisStreamsConnector(redis.Redis.from_url(url, socket_timeout=None), "orders")
        return AsyncRedisStreamsConnector(redis.asyncio.Redis.from_url(url, socket_timeout=None), "orders")
    url = f"http://127.0.0.1:{port}"
    if mode == "threads":
        return BoundaryConnector(BoundaryClient(url, timeout=None), "hq-receiver")
    return AsyncBoundaryConnector(AsyncBoundaryClient(url, timeout=None), "hq-receiver")


def consume(task: Any) -> Any:
    if isinstance(task, ConsumerTask):
        return task.consume_transactions()
    return asyncio.run(task.consume_transactions())


def task_on(connector: Any, mode: str) -> Any:
    return (Quiet if mode == "threads" else AsyncQuiet)(connectors={"source": connector})


@pytest.mark.req("BC-48")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@pytest.mark.parametrize("kind", ["redis", "boundary"])
def test_stop_ends_a_fetch_that_is_not_answered(server: SilentServer, kind: str, mode: str) -> None:
    task = task_on(source(kind, mode, server.port), mode)
    with once(server.heard.is_set, task.stop):
        assert consume(task).stop_reason is StopReason.STOPPED


@pytest.mark.req("BC-48")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
@pytest.mark.parametrize("kind", ["redis", "boundary"])
def test_one_ctrl_c_ends_a_fetch_that_is_not_answered(server: SilentServer, kind: str, mode: str) -> None:
    task = task_on(source(kind, mode, server.port), mode)
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with once(server.heard.is_set, interrupt), pytest.raises(KeyboardInterrupt):
        consume(task)


@pytest.mark.req("BC-46")
@pytest.mark.parametrize("subjects", [1, 3])
def test_ctrl_c_ends_a_dispatch_that_is_not_answered_also_of_several_appends_at_once(
    server: SilentServer, subjects: int
) -> None:
    client = BoundaryClient(f"http://127.0.0.1:{server.port}", timeout=None)
    connector = BoundaryConnector(client, from_zone="plant-a", to_zone="hq")
    facts = [
        Transaction(payload={"subject": f"batch:B{number}", "predicate": "completed", "object": {}})
        for number in range(subjects)
    ]
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    with once(server.heard.is_set, interrupt), pytest.raises(KeyboardInterrupt):
        connector.dispatch_transactions(facts)


@pytest.mark.req("BC-48")
@pytest.mark.parametrize("mode", ["threads", "asyncio"])
def test_stop_ends_a_settlement_that_redis_does_not_answer(redis_url: str, mode: str) -> None:
    stream = f"silence-{mode}"
    with redis.Redis.from_url(redis_url) as admin:
        ConnectorDriver(RedisStreamsConnector(admin, stream)).dispatch(Transaction(payload=1))
    with proxy(redis_url) as through:
        client: Any = redis.Redis if mode == "threads" else redis.asyncio.Redis
        kind: Any = RedisStreamsConnector if mode == "threads" else AsyncRedisStreamsConnector
        task = task_on(kind(client.from_url(through.url, socket_timeout=None), stream), mode)

        def fall_silent() -> None:
            through.seen.clear()
            through.answers = {"EVAL": b""}

        task.after = fall_silent
        asked = lambda: through.answers and through.seen["EVALSHA"]  # noqa: E731
        with once(asked, task.stop), pytest.raises(SettlementException, match=r"of stop\(\)"):
            consume(task)
