"""Queues outlive forks, event loops, cancellations and careless owners."""

from __future__ import annotations

import asyncio
import gc
import os
import time
import warnings
from typing import Any

import pytest
import redis
import redis.asyncio

from onceward.queue import AsyncQueueConsumer, AsyncRedisStreamsQueue, QueueConfig, QueueConsumer
from onceward.queue.messages import QueueMessage


def config(name: str, **more: Any) -> QueueConfig:
    return QueueConfig(f"lifetimes-{name}-{time.time_ns()}", "group", "one", **{"block_ms": 100, **more})


def test_a_stop_in_a_forked_child_does_not_stop_the_parent_nor_share_its_connection(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, QueueConsumer(client, config("fork")) as consumer:
        assert consumer.next(1) is None
        child = os.fork()
        if child == 0:
            code = 1
            try:
                consumer.stop()
                code = 0 if consumer.next() is None and consumer.backlog_stats().pending == 0 else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        client.xadd(consumer.config.stream_key, {"data": "1"})
        message = consumer.next()
        assert message is not None
        assert message.payload == 1


@pytest.mark.req("RN-09", "QC-03")
def test_a_child_forked_in_a_loop_over_messages_ends_at_its_next_step(
    redis_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with redis.Redis.from_url(redis_url) as client, QueueConsumer(client, config("loop")) as consumer:
        client.xadd(consumer.config.stream_key, {"data": "1"})
        client.xadd(consumer.config.stream_key, {"data": "2"})
        messages = consumer.iter_messages()
        assert next(messages).payload == 1
        child = os.fork()
        if child == 0:
            try:
                next(messages)
            finally:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert "forked in a loop over iter_messages(), ends here" in capfd.readouterr().err
        assert next(messages).payload == 2


@pytest.mark.req("RN-09", "QC-19")
def test_a_child_forked_in_an_asynchronous_loop_over_messages_ends_at_its_next_step(redis_url: str) -> None:
    async def main() -> None:
        client = redis.asyncio.Redis.from_url(redis_url)
        async with client, AsyncQueueConsumer(client, config("aloop")) as consumer:
            await client.xadd(consumer.config.stream_key, {"data": "1"})
            await client.xadd(consumer.config.stream_key, {"data": "2"})
            messages = consumer.iter_messages()
            assert (await anext(messages)).payload == 1
            child = os.fork()
            if child == 0:
                try:
                    await anext(messages)
                finally:
                    os._exit(3)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            assert (await anext(messages)).payload == 2

    asyncio.run(main())


@pytest.mark.req("QC-19")
def test_a_cancelled_read_leaves_a_consumer_that_works(redis_url: str) -> None:
    async def main() -> QueueMessage | None:
        client = redis.asyncio.Redis.from_url(redis_url)
        async with client, AsyncQueueConsumer(client, config("cancel", block_ms=60_000)) as consumer:
            waiting = asyncio.create_task(consumer.next())
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await client.xadd(consumer.config.stream_key, {"data": "1"})
            async with asyncio.timeout(30):
                # The server may have given it to the cancelled read: then it is pending.
                return await consumer.next(500) or (await consumer.claim_stale(0))[0]

    message = asyncio.run(main())
    assert message is not None
    assert message.payload == 1


@pytest.mark.req("QC-19")
def test_an_unclosed_asynchronous_queue_goes_on_in_a_new_event_loop_and_leaves_without_a_warning(
    redis_url: str,
) -> None:
    async def make() -> AsyncRedisStreamsQueue:
        client = redis.asyncio.Redis.from_url(redis_url)
        queue = AsyncRedisStreamsQueue(client, config("loops"))
        await queue.enqueue(1)
        await client.aclose()
        return queue

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        queue = asyncio.run(make())
        assert len(asyncio.run(queue.read())) == 1
        del queue
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
