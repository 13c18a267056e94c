"""What one server gives to its callers at most, so a few of them cannot use it up. `[limits]` in its configuration."""

from __future__ import annotations

from contextvars import ContextVar

import msgspec

SMALL = 64 * 1024
"""Bytes that an answer may have in any case, however little others read of theirs."""


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
    """For messages that have not arrived completely, over all calls; more are refused as `resource_exhausted`. As much
    again for answers that have not been read."""
    resets: int = 250
    """Calls on an HTTP/2 connection that its peer may reset within a second of their start; it is closed after that, if
    they are more than half of its calls."""
    shutdown: float = 5.0
    """For running calls when the server stops."""


class AnswerMemory:
    """For answers, from when they are made until their callers have read them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0


class AnswerRoom:
    """What the answer to one call takes of it."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._held = 0

    def reserve(self, size: int) -> int:
        """Set room aside for this many bytes, or for what is left. Return how many the answer may have."""
        room = min(size, max(self._memory.most - self._memory.held, SMALL))
        self.hold(room)
        return room

    def hold(self, size: int) -> None:
        """Say how many bytes the answer has."""
        self._memory.held += size - self._held
        self._held = size


ANSWER_ROOM: ContextVar[AnswerRoom] = ContextVar("answer_room")
"""That of the current call."""
