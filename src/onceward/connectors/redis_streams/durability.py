"""How durable a stream is, from the settings of its Redis, read by commands that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onceward._secrets import mask
from onceward.connectors.reports import (
    ANSWER_SECONDS,
    CHECK_SERVER,
    Durability,
    Hazard,
    ServerUnreachable,
    SourceFacts,
    Survives,
)
from onceward.connectors.scheme import required_package

OLDEST = (6, 2)
"""The oldest version with the commands that the connector uses."""
KEEPS_STREAMS = (None, "noeviction", "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl")
"""Eviction policies that never drop a stream; None is unknown."""


@contextmanager
def connect(server: str) -> Iterator[Any]:
    """Open a client that returns bytes. Errors inside the block, too, become `ServerUnreachable`."""
    with required_package("redis", "redis"):
        from redis import Redis
        from redis.exceptions import RedisError

    client = Redis.from_url(server, socket_timeout=ANSWER_SECONDS, socket_connect_timeout=ANSWER_SECONDS)
    try:
        yield client
    except (RedisError, OSError) as error:
        place = server.rpartition("@")[2].removeprefix("redis://").removeprefix("rediss://")
        raise ServerUnreachable(
            f"cannot query Redis at {place}: {mask(str(error)).rstrip('.')}; {CHECK_SERVER}"
        ) from None
    finally:
        client.close()


def read_server(server: str, stream: str) -> dict[str, Any]:
    """Return the arguments of `describe_server`. Raises `ServerUnreachable`."""
    with connect(server) as redis:
        from redis.exceptions import ResponseError

        info = redis.info()
        try:
            found = redis.config_get("*appendfsync*")
        except ResponseError:  # hosted servers refuse
            found = {}
        expires_in = redis.ttl(stream)
    return {
        "product": "Valkey" if "valkey_version" in info else "Redis",
        "version": info.get("valkey_version", info["redis_version"]),
        "aof": bool(info.get("aof_enabled")),
        "fsync": found.get("appendfsync"),
        "rests": found.get("no-appendfsync-on-rewrite") == "yes",
        "eviction": info.get("maxmemory_policy"),
        "replicas": info.get("connected_slaves"),
        "is_replica": info.get("role") == "slave",
        "expires_in": expires_in if expires_in >= 0 else None,
    }


def describe_server(
    *,
    product: str = "Redis",
    version: str | None = None,
    aof: bool | None = None,
    fsync: str | None = None,
    rests: bool = False,
    eviction: str | None = None,
    replicas: int | None = None,
    is_replica: bool = False,
    maxlen: int | None = None,
    expires_in: int | None = None,
    unreachable: tuple[str, ...] = (),
) -> SourceFacts:
    """Describe the source; None is unknown.

    `product`: Redis or Valkey. `fsync`: when it writes its append-only file to disk (always, everysec or no). `rests`:
    it does not do so while it rewrites that file. `eviction`: what it does when its memory is full. `maxlen`: to how
    many entries the stream is trimmed. `expires_in`: seconds until Redis removes the stream.
    """
    durability = None if aof is None else _durability(product, version, aof, fsync, rests)
    return SourceFacts(
        durability=REPLICA if is_replica else durability,
        redelivers=True,
        hazards=tuple(_hazards(product, version, eviction, replicas, maxlen, expires_in)),
        unreachable=unreachable,
    )


REPLICA = Durability(
    None,
    "this Redis is a replica: it refuses to write, or loses at its next synchronization what was written to it; no "
    "message can be taken",
    "name the primary server in the URL",
    "cannot be written",
)


def _durability(product: str, version: str | None, aof: bool, fsync: str | None, rests: bool) -> Durability:
    server, file = f"{product} {version}", f"{product.lower()}.conf"
    if not aof:
        return Durability(
            Survives.NOTHING,
            f"{server} keeps no append-only file: acknowledged messages may be lost when it restarts",
            f"set appendonly yes and appendfsync always in {file}",
        )
    if fsync is None:
        return Durability(
            None,
            f"{server} has an append-only file, but does not say how often it is written to disk",
            "check that it runs with appendfsync always",
        )
    if fsync == "always" and rests:
        return Durability(
            Survives.PROCESS_CRASH,
            f"{server} runs with no-appendfsync-on-rewrite yes: while it rewrites its append-only file, it does not "
            "write to disk before it answers, and a crash of its machine may lose messages",
            f"set no-appendfsync-on-rewrite no in {file}",
        )
    if fsync == "always":
        return Durability(
            Survives.MACHINE_CRASH,
            f"{server} writes every command to its append-only file before it answers",
        )
    return Durability(
        Survives.PROCESS_CRASH,
        f"{server} runs with appendfsync {fsync}: a crash of its machine may lose the last messages",
        f"set appendfsync always in {file}",
    )


def _hazards(
    product: str,
    version: str | None,
    eviction: str | None,
    replicas: int | None,
    maxlen: int | None,
    expires_in: int | None,
) -> Iterator[Hazard]:
    if eviction not in KEEPS_STREAMS:
        yield Hazard(
            f"{product} runs with maxmemory-policy {eviction}: it may drop the whole stream when its memory is full",
            "set maxmemory-policy noeviction",
        )
    if expires_in is not None:
        yield Hazard(
            f"the stream expires in {expires_in:,} s: {product} then removes it with all that waits in it",
            "run PERSIST on its key, and find out what sets the expiry",
        )
    if replicas:
        yield Hazard(
            f"{product} updates its replicas after it has answered: a failover may lose the last messages",
            "keep what must not be lost in one server with appendfsync always, or in a boundary on PostgreSQL",
        )
    if maxlen is not None:
        yield Hazard(
            f"the stream is trimmed to about {maxlen} entries: trimmed entries are lost if unread, "
            "and become dead letters without their content if in flight",
            "remove maxlen, and trim entries that are done with XTRIM MINID; or set one that is never reached",
        )
    if version is not None and _is_older(version, OLDEST):
        yield Hazard(
            f"{product} {version} is too old: the connector uses commands of Redis 6.2",
            "upgrade Redis",
            loses=False,
        )


def _is_older(version: str, than: tuple[int, int]) -> bool:
    parts = version.split(".")
    return (int(parts[0]), int(parts[1])) < than
