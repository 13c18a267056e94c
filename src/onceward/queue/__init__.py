"""The honest queue on Redis Streams: it exposes what Redis does, retries nothing and hides nothing.

`RedisStreamsQueue` talks to Redis, `QueueConsumer` is the loop above it; both have an asyncio twin that runs the same
code. docs/concepts/queue.md says how to use them.
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
