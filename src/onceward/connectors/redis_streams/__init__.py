"""Redis Streams as a wire: one stream, one consumer group, leases by idle time. Needs `onceward[redis]`."""

from onceward.connectors.redis_streams.connector import RedisStreamsConnector
from onceward.connectors.redis_streams.connector_asyncio import AsyncRedisStreamsConnector

__all__ = ["AsyncRedisStreamsConnector", "RedisStreamsConnector"]
