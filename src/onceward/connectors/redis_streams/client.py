"""A client of our own, made from the one we are given: raw bytes, RESP2, and never the caller's settings changed."""

from __future__ import annotations

from typing import Any

from onceward.task.exceptions import ConfigurationError


def own_client(given: Any, kind: type[Any]) -> Any:
    """A client to the same server. `given` is a client of that kind, or a URL."""
    if isinstance(given, str):
        return _raw(kind.from_url(given, protocol=2))
    if not isinstance(given, kind):
        raise ConfigurationError(
            f"give a redis URL or a {kind.__module__.partition('.client')[0]}.{kind.__name__}, "
            f"not {type(given).__module__}.{type(given).__name__}"
        )
    pool = given.connection_pool
    settings = {key: value for key, value in pool.connection_kwargs.items() if not key.startswith("maint_")}
    # Bodies are bytes: a client that decodes replies would fail on them. Maintenance notices need RESP3.
    settings |= {"decode_responses": False, "protocol": 2}
    return _raw(kind(connection_pool=type(pool)(connection_class=pool.connection_class, **settings)))


def _raw(client: Any) -> Any:
    # Replies as they come: no guessing between shapes, no dict for every entry.
    for command in ("XPENDING", "XREADGROUP"):
        client.set_response_callback(command, lambda reply, **_: reply)
    return client
