"""The Redis queue, against hand-written redis-py loops; `run` writes to SQLite on disk."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from sqlalchemy import Engine, create_engine, text

from bench.idle import Stops, idle
from bench.measure import Line, compare, ratio
from onceward.db import DbSession
from onceward.queue import AsyncQueueConsumer, QueueConfig, QueueConsumer, QueueMessage
from onceward.testing.servers import redis_server

COUNT = 5_000
RUN_COUNT = 1_500
BLOCK_MS = 1000
BODY = json.dumps({"order": 7, "total": 19.99})
INSERT = text("INSERT INTO effects (id) VALUES (:id)")

_numbers = itertools.count()


def lines() -> Iterator[Line]:
    with redis_server() as server, tempfile.TemporaryDirectory() as directory:
        client = redis.Redis.from_url(server.url)
        yield ratio(
            "Redis queue, next + ack",
            compare(COUNT, prepare(client, COUNT, plain), prepare(client, COUNT, ours)),
            at_most=1.11,
        )
        yield ratio(
            "Redis queue, next + ack, asyncio",
            compare(
                COUNT,
                prepare(client, COUNT, lambda _, *where: asyncio.run(plain_async(server.url, *where))),
                prepare(client, COUNT, lambda _, *where: asyncio.run(ours_async(server.url, *where))),
            ),
            at_most=1.11,
        )
        engine = create_engine(f"sqlite:///{Path(directory) / 'effects.db'}")
        with engine.begin() as connection:
            connection.execute(text("PRAGMA journal_mode = WAL"))
            connection.execute(text("CREATE TABLE effects (id TEXT PRIMARY KEY)"))
        yield ratio(
            "Redis queue, run with SQLite",
            compare(
                RUN_COUNT,
                prepare(client, RUN_COUNT, lambda *where: plain_run(engine, *where)),
                prepare(client, RUN_COUNT, lambda *where: our_run(engine, *where)),
            ),
            at_most=1.25,
        )
        engine.dispose()
        yield from idle_lines(server.url, client)
        client.close()


def idle_lines(url: str, client: Any) -> Iterator[Line]:
    given = QueueConfig("idle", "group", "one")

    def wait(stops: Stops) -> None:
        with QueueConsumer(client, given) as consumer:
            stops.append(consumer.stop)
            assert list(consumer.iter_messages()) == []

    async def wait_async(stops: Stops) -> None:
        async with redis.asyncio.Redis.from_url(url) as own, AsyncQueueConsumer(own, given) as consumer:
            stops.append(consumer.stop)
            assert [message async for message in consumer.iter_messages()] == []

    yield from idle("Redis queue, idle", client, wait)
    yield from idle("Redis queue, asyncio, idle", client, lambda stops: asyncio.run(wait_async(stops)))


def prepare(client: Any, count: int, consume: Callable[[Any, str, int], object]) -> Callable[[], object]:
    """Fill streams beforehand, so only consuming is measured."""
    streams = [f"bench-{next(_numbers)}" for _ in range(5)]
    for stream in streams:
        client.xgroup_create(stream, "group", id="0", mkstream=True)
        pipeline = client.pipeline(transaction=False)
        for _ in range(count):
            pipeline.xadd(stream, {"data": BODY})
        pipeline.execute()
    left = iter(streams)
    return lambda: consume(client, next(left), count)


def config(stream: str) -> QueueConfig:
    return QueueConfig(stream, "group", "one", block_ms=BLOCK_MS)


def plain(client: Any, stream: str, count: int) -> None:
    for _ in range(count):
        [[_, [[id_, fields]]]] = entries(
            client.xreadgroup("group", "one", {stream: ">"}, count=1, block=BLOCK_MS)
        )
        json.loads(fields[b"data"])
        client.xack(stream, "group", id_)


def entries(reply: Any) -> Any:
    """The reply as a list. redis-py returns a list or, with RESP3, a dict of pages."""
    return [[name, page[0]] for name, page in reply.items()] if isinstance(reply, dict) else reply


def ours(client: Any, stream: str, count: int) -> None:
    with QueueConsumer(client, config(stream)) as consumer:
        for _ in range(count):
            message = consumer.next()
            assert message is not None
            consumer.ack(message)


async def plain_async(url: str, stream: str, count: int) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        for _ in range(count):
            reply = await client.xreadgroup("group", "one", {stream: ">"}, count=1, block=BLOCK_MS)
            [[_, [[id_, fields]]]] = entries(reply)
            json.loads(fields[b"data"])
            await client.xack(stream, "group", id_)


async def ours_async(url: str, stream: str, count: int) -> None:
    async with (
        redis.asyncio.Redis.from_url(url) as client,
        AsyncQueueConsumer(client, config(stream)) as consumer,
    ):
        for _ in range(count):
            message = await consumer.next()
            assert message is not None
            await consumer.ack(message)


def plain_run(engine: Engine, client: Any, stream: str, count: int) -> None:
    for _ in range(count):
        [[_, [[id_, fields]]]] = entries(
            client.xreadgroup("group", "one", {stream: ">"}, count=1, block=BLOCK_MS)
        )
        json.loads(fields[b"data"])
        with engine.begin() as connection:
            connection.execute(INSERT, {"id": f"{stream} {id_.decode()}"})
        client.xack(stream, "group", id_)


def our_run(engine: Engine, client: Any, stream: str, count: int) -> None:
    left = count

    def handle(message: QueueMessage, session: DbSession) -> None:
        nonlocal left
        session.execute(INSERT, {"id": f"{stream} {message.id}"})
        left -= 1
        if not left:
            consumer.stop()

    with QueueConsumer(client, config(stream)) as consumer:
        consumer.run(handler=handle, engine=engine)
    assert not left
