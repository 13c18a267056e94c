"""taskiq with its acknowledging Redis broker, one worker process."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from taskiq_redis import RedisStreamBroker

from bench.peers.sink import note

broker = RedisStreamBroker(url=os.environ.get("PEER_URL", "redis://localhost"))


@broker.task
async def handle(sent_at: float) -> None:
    note(sent_at)


def send_one(url, count):
    async def main():
        await broker.startup()
        for _ in range(count):
            await handle.kiq(time.time())
        await broker.shutdown()

    asyncio.run(main())


def send_many(url, count):
    async def main():
        await broker.startup()
        for _ in range(count // 100):
            await asyncio.gather(*(handle.kiq(time.time()) for _ in range(100)))
        await broker.shutdown()

    asyncio.run(main())


def worker(url):
    return [sys.executable, "-m", "taskiq", "worker", "bench.peers.taskiq_peer:broker", "--workers", "1"]
