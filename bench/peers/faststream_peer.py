"""FastStream on a Redis stream with a consumer group, one message per call."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress

import redis
from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub

from bench.peers.sink import note

broker = RedisBroker(os.environ.get("PEER_URL", "redis://localhost"))
app = FastStream(broker)


@broker.subscriber(stream=StreamSub("faststream", group="peers", consumer="one", max_records=100))
async def handle(message: dict) -> None:
    note(message["sent_at"])


def _create_group(url):
    """Its worker would create the group at the end of the stream, and skip what is there."""
    with suppress(redis.ResponseError), redis.Redis.from_url(url) as client:
        client.xgroup_create("faststream", "peers", "0", mkstream=True)


def send_one(url, count):
    _create_group(url)

    async def main():
        async with RedisBroker(url) as sender:
            for _ in range(count):
                await sender.publish({"sent_at": time.time()}, stream="faststream")

    asyncio.run(main())


def send_many(url, count):
    _create_group(url)

    async def main():
        async with RedisBroker(url) as sender:
            for _ in range(count // 100):
                await asyncio.gather(
                    *(sender.publish({"sent_at": time.time()}, stream="faststream") for _ in range(100))
                )

    asyncio.run(main())


def worker(url):
    return [sys.executable, "-m", "faststream", "run", "bench.peers.faststream_peer:app"]
