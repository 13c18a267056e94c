"""What can go wrong with a queue.

OncewardError
└── QueueError                             Redis failed, or answered what it should not
    ├── UndecodableEntryError              entries that are not ours to read; they stay pending
    └── QueuePayloadError (ValueError)     a payload that JSON cannot carry; nothing was sent
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceward.errors import OncewardError

if TYPE_CHECKING:
    from onceward.queue.messages import QueueMessage


class QueueError(OncewardError):
    """Redis failed during a read, an acknowledgment, a claim or an enqueue. It was tried once.

    What had been delivered and not acknowledged stays pending. The next call starts afresh, with a new
    connection if need be.
    """

    @property
    def cause(self) -> BaseException | None:
        """What the driver raised, if this wraps something."""
        return self.__cause__


class UndecodableEntryError(QueueError):
    """Entries whose `data` is missing or not JSON. They stay pending: neither dropped nor acknowledged.

    `entries` are messages with the fields as Redis gave them, bytes, for payload. Look at them, keep them
    elsewhere, then `ack` them.
    """

    entries: tuple[QueueMessage, ...] = ()

    @classmethod
    def of(cls, entries: tuple[QueueMessage, ...], reasons: tuple[Exception, ...]) -> UndecodableEntryError:
        ids = ", ".join(entry.id for entry in entries)
        error = cls(
            f"stream {entries[0].stream!r} has entries that cannot be decoded: {ids} ({reasons[0]}); they stay "
            f"pending in group {entries[0].group!r} until acknowledged"
        )
        error.entries = entries
        error.__cause__ = reasons[0]
        return error


class QueuePayloadError(QueueError, ValueError):
    """The payload would not come back equal from JSON. Nothing was sent."""
