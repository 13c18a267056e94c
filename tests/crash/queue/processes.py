"""Real consumer processes for the queue crash tests, which are really killed.

Run as `python processes.py <mode> <where it dies> <redis url> <stream> <database>`. It consumes with `run`, and kills
itself with SIGKILL at its third message, at the named point; `nowhere` consumes until SIGTERM.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any, NoReturn

import redis
import redis.asyncio
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.queue import AsyncQueueConsumer, QueueConfig, QueueConsumer, QueueMessage
from onceward.queue.protocol import QueueCore

FATAL = 3
INSERT = text("INSERT INTO effects (id) VALUES (:id) ON CONFLICT DO NOTHING")


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def arm(place: str) -> None:
    """Kill the process between commit and ack, or after the ack."""
    real = QueueCore.ack

    async def ack(self: QueueCore, message: QueueMessage) -> None:
        if message.payload == FATAL and place == "after-commit":
            die()
        await real(self, message)
        if message.payload == FATAL and place == "after-ack":
            die()

    QueueCore.ack = ack  # type: ignore[method-assign]


def consume(place: str, url: str, config: QueueConfig, database: str) -> None:
    consumer = QueueConsumer(redis.Redis.from_url(url), config)
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if place == "after-fetch":
        while (message := consumer.next()) is None or message.payload != FATAL:
            pass
        die()

    def handle(message: QueueMessage, session: Any) -> None:
        session.execute(INSERT, {"id": message.payload})
        if message.payload == FATAL and place == "in-handler":
            die()

    consumer.run(handler=handle, engine=create_engine(f"sqlite:///{database}"))


async def consume_async(place: str, url: str, config: QueueConfig, database: str) -> None:
    consumer = AsyncQueueConsumer(redis.asyncio.Redis.from_url(url), config)
    signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if place == "after-fetch":
        while (message := await consumer.next()) is None or message.payload != FATAL:
            pass
        die()

    async def handle(message: QueueMessage, session: Any) -> None:
        await session.execute(INSERT, {"id": message.payload})
        if message.payload == FATAL and place == "in-handler":
            die()

    engine = create_async_engine(f"sqlite+aiosqlite:///{database}")
    await consumer.run(handler=handle, engine=engine)
    await engine.dispose()
    await consumer.close()


if __name__ == "__main__":
    mode, place, url, stream, database = sys.argv[1:]
    arm(place)
    config = QueueConfig(stream, "group", f"process-{os.getpid()}", block_ms=5000)
    if mode == "asyncio":
        asyncio.run(consume_async(place, url, config, database))
    else:
        consume(place, url, config, database)
