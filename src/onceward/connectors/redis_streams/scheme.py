"""`redis://localhost:6379/0/orders?group=billing`: a stream and its consumer group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.connectors.redis_streams.durability import describe_server, read_server
from onceward.connectors.reports import ServerUnreachable, SourceBacklog, SourceCounts, SourceFacts
from onceward.connectors.scheme import LEASE_SETTINGS, Scheme, Setting, required_package

if TYPE_CHECKING:
    from onceward.connectors.urls import Address


def stream_of(address: Address) -> tuple[str, str]:
    """Return the URL of the server, with its database, and the name of the stream."""
    database, _, stream = address.path.strip("/").rpartition("/")
    return f"{address.scheme}://{address.netloc}/{database or 0}", stream


def check(address: Address) -> None:
    database, _, stream = address.path.strip("/").rpartition("/")
    if not stream or (not database and stream.isdecimal()) or (database and not database.isdecimal()):
        address.refuse(
            "it names no stream; write redis://localhost:6379/orders?group=billing, or with a database number "
            "redis://localhost:6379/0/orders?group=billing"
        )
    if not address.hostname:
        address.refuse("it names no host; write redis://localhost:6379/orders")
    if address.settings.get("maxlen", 1) < 1:
        address.refuse("maxlen must be 1 or more")


def open_stream(address: Address, *, asynchronous: bool) -> Any:
    with required_package("redis", "redis"):
        from onceward.connectors.redis_streams import (
            AsyncRedisStreamsConnector,
            RedisStreamsConnector,
        )

    server, stream = stream_of(address)
    kind: Any = AsyncRedisStreamsConnector if asynchronous else RedisStreamsConnector
    return kind(server, stream, **address.settings)


def facts(address: Address) -> SourceFacts:
    server, stream = stream_of(address)
    maxlen = address.settings.get("maxlen")
    try:
        return describe_server(**read_server(server, stream), maxlen=maxlen)
    except ServerUnreachable as error:
        return describe_server(maxlen=maxlen, unreachable=(str(error),))


def counts(address: Address) -> SourceCounts:
    from onceward.connectors.redis_streams.counts import count_stream

    server, stream = stream_of(address)
    return count_stream(address, server, stream, address.settings.get("group", "onceward"))


def backlog(address: Address) -> SourceBacklog:
    from onceward.connectors.redis_streams.counts import read_backlog

    server, stream = stream_of(address)
    return read_backlog(server, stream, address.settings.get("group", "onceward"))


SCHEME = Scheme(
    names=("redis", "rediss"),
    settings={
        **LEASE_SETTINGS,
        "group": Setting(divides=True),
        "maxlen": Setting(int, "a whole number"),
    },
    check=check,
    open=open_stream,
    facts=facts,
    counts=counts,
    backlog=backlog,
    keeps_order=True,
)
