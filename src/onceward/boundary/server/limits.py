"""What one server gives to its callers at most, so a few of them cannot use it up. `[limits]` in its configuration."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Times are in seconds, sizes in bytes."""

    connections: int = 1000
    """Open at once; more are closed when they are accepted."""
    calls: int = 1000
    """Running at once, over all connections; more are refused as `unavailable`."""
    headers: float = 10.0
    """For a TLS handshake, and then for the headers of a request."""
    body: float = 60.0
    """For each message of a call to arrive. A call in one message has one; smaller pieces than 16 KiB share it."""
    idle: float = 300.0
    """Until a connection without a call is closed, and a call on which no byte moves in either direction."""
    body_memory: int = 64 * 1024 * 1024
    """For messages that have not arrived completely, over all calls; more are refused as `resource_exhausted`."""
    resets: int = 250
    """Calls on an HTTP/2 connection that its peer may reset within a second of their start; it is closed after that, if
    they are more than half of its calls."""
    shutdown: float = 5.0
    """For running calls when the server stops."""
