"""The honest queue on Redis Streams: it exposes what Redis does, retries nothing and hides nothing.

`RedisStreamsQueue` talks to Redis, `QueueConsumer` is the loop on top of it; both have an asyncio version that runs the
same code. See docs/concepts/queue.md.
"""

from onceward.queue.config import QueueConfig
from onceward.queue.consumer import QueueConsumer
from onceward.queue.consumer_asyncio import AsyncQueueConsumer
from onceward.queue.errors import QueueError, QueuePayloadError, UndecodableEntryError
from onceward.queue.messages import BacklogStats, QueueMessage
from onceward.queue.queue import RedisStreamsQueue
from onceward.queue.queue_asyncio import AsyncRedisStreamsQueue

__all__ = [
    "AsyncQueueConsumer",
    "AsyncRedisStreamsQueue",
    "BacklogStats",
    "QueueConfig",
    "QueueConsumer",
    "QueueError",
    "QueueMessage",
    "QueuePayloadError",
    "RedisStreamsQueue",
    "UndecodableEntryError",
]
