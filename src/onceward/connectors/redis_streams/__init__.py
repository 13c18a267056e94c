"""Redis Streams as a wire: one stream, one consumer group, leases by idle time. Needs `onceward[redis]`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceward.connectors.redis_streams.connector import AsyncRedisStreamsConnector, RedisStreamsConnector

__all__ = ["AsyncRedisStreamsConnector", "RedisStreamsConnector"]


def __getattr__(name: str) -> Any:
    """Load the connectors on first use: the scheme beside them needs no driver."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from onceward.connectors.redis_streams import connector

    return getattr(connector, name)
