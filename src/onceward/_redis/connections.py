"""Connections of our own, to where the caller's client connects. That client itself is never touched.

Why not the client: by default it gives up on a reply after five seconds, the very time a read blocks, so that a
message which arrives on the edge is pending and in nobody's hands; and it sends a failed command again by
itself. Ours try once, and wait as long as Redis was told to block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis.exceptions import RedisError, ResponseError

from onceward.errors import ConfigurationError

GRACE: Final = 5.0
"""Seconds a blocking read may be late at least, whatever the client's `socket_timeout`."""

FAILURES: Final = (RedisError, OSError)
"""What a driver raises when Redis fails. Time-outs are among them."""

_OUR_RULES: Final[dict[str, Any]] = {
    "decode_responses": False,
    "protocol": 2,
    "retry": None,
    "retry_on_error": [],
    "retry_on_timeout": False,
    "health_check_interval": 0,
}
_LEFT_OUT: Final = ("parser_class", "event_dispatcher", "maint", "oss_cluster", "orig_")
"""Beginnings of settings that bind a connection to its pool or to another protocol."""


class Connections:
    """Makes connections with the address, credentials and TLS of a client, and the rules of this package."""

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
        """Seconds a reply may take; the client's `socket_timeout`. None: for ever."""
        self._connect_timeout: float | None = given.get("socket_connect_timeout", self.reply_timeout)

    def make(self, socket_timeout: float | None) -> Any:
        # Read anew each time: a pool may learn a new address or password.
        given = self._pool.connection_kwargs
        kept = {name: value for name, value in given.items() if not name.startswith(_LEFT_OUT)}
        timeouts = {"socket_timeout": socket_timeout, "socket_connect_timeout": self._connect_timeout}
        return self._made(**(kept | _OUR_RULES | timeouts))

    def patience(self, block_ms: int | None) -> float | None:
        """Seconds to wait for a reply, to a command that blocks in Redis or one that does not."""
        if block_ms is None or self.reply_timeout is None:
            return self.reply_timeout
        return block_ms / 1000 + max(self.reply_timeout, GRACE)


def is_worth_waiting(replies: Sequence[Any]) -> bool:
    """Whether to wait for a command that blocks, after these replies: not if that kept an error from the caller."""
    return not any(isinstance(reply, ResponseError) for reply in replies)
