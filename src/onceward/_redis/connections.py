"""Our own connections, to where the caller's client connects. They never touch that client.

Why not use the client: by default it gives up on a reply after five seconds, exactly as long as a read blocks, so a
message that arrives at the edge would be pending without a consumer that knows of it. It also retries a failed command:
an entry could be appended twice, and a lost connection would go unnoticed. Ours try once, and wait as long as Redis
was asked to block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import redis
from hiredis import pack_command
from redis.exceptions import RedisError, ResponseError

from onceward.errors import ConfigurationError

T = TypeVar("T")

RedisCommand = tuple[Any, ...]

GRACE: Final = 5.0
"""Seconds by which a blocking read may be late, even if the client's `socket_timeout` is shorter."""

FAILURES: Final = (RedisError, OSError)
"""What a driver raises when Redis fails. Includes timeouts."""

_OUR_RULES: Final[dict[str, Any]] = {
    "decode_responses": False,
    "protocol": 2,
    "retry": None,
    "retry_on_error": [],
    "retry_on_timeout": False,
    "health_check_interval": 0,
}
_LEFT_OUT: Final = ("parser_class", "event_dispatcher", "maint", "oss_cluster", "orig_")
"""Prefixes of settings that bind a connection to its pool or to another protocol."""


class Connections:
    """Creates connections with the address, credentials and TLS of a client, and the rules of this package."""

    def __init__(self, client: Any, kind: type[Any], wanted: str) -> None:
        pool: Any = getattr(client, "connection_pool", None)
        made = getattr(pool, "connection_class", None)
        if not (isinstance(made, type) and issubclass(made, kind)):
            raise ConfigurationError(f"this needs a {wanted} client, not {type(client).__qualname__}")
        self._made = made
        self._pool = pool
        self._client = client  # a Sentinel's connections need its pool, which dies with the client
        given = pool.connection_kwargs
        self.reply_timeout: float | None = given.get("socket_timeout", GRACE)
        """Seconds a reply may take: the client's `socket_timeout`. None means forever."""
        self._connect_timeout: float | None = given.get("socket_connect_timeout", self.reply_timeout)

    @property
    def server(self) -> str:
        """Identifies the server and database, for threads and asyncio alike. Contains no password."""
        given = self._pool.connection_kwargs
        place = given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
        service = getattr(self._pool, "service_name", "")  # a Sentinel's
        return f"{service} {place} {given.get('db') or 0}"

    def make(self, socket_timeout: float | None) -> Any:
        # Read again each time: a pool may learn a new address or password.
        given = self._pool.connection_kwargs
        kept = {name: value for name, value in given.items() if not name.startswith(_LEFT_OUT)}
        timeouts = {"socket_timeout": socket_timeout, "socket_connect_timeout": self._connect_timeout}
        return self._made(**(kept | _OUR_RULES | timeouts))

    def blocking_client(self) -> redis.Redis:
        """Return a client for threads with the same settings; it is never connected itself."""
        kind = getattr(redis.connection, self._made.__name__, None)
        if kind is None:
            raise ConfigurationError(f"{self._made.__qualname__} has no counterpart for threads")
        given = self._pool.connection_kwargs
        kept = {name: value for name, value in given.items() if not name.startswith(_LEFT_OUT)}
        pool = redis.ConnectionPool(connection_class=kind, **(kept | _OUR_RULES))
        return redis.Redis(connection_pool=pool)

    def patience(self, block_ms: int | None) -> float | None:
        """Seconds to wait for a reply, to a command that blocks in Redis for `block_ms` or one that does not."""
        if block_ms is None or self.reply_timeout is None:
            return self.reply_timeout
        return block_ms / 1000 + max(self.reply_timeout, GRACE)


def pack(commands: Sequence[RedisCommand]) -> bytes:
    """Pack the commands into one piece."""
    return pack_command(commands[0]) if len(commands) == 1 else b"".join(map(pack_command, commands))


def is_worth_waiting(replies: Sequence[Any]) -> bool:
    """Whether to wait for a blocking command after these replies. An error among them must not be delayed."""
    return not any(isinstance(reply, ResponseError) for reply in replies)


def drain(free: deque[T]) -> Iterator[T]:
    """Take one after another until none is left. Other threads may do the same."""
    with suppress(IndexError):
        while True:
            yield free.pop()
