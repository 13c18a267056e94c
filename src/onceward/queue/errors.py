"""The errors of a queue.

OncewardError
└── QueueError                             Redis failed, or replied with an error
    ├── UndecodableEntryError              entries that cannot be decoded; they stay pending
    └── QueuePayloadError (ValueError)     a payload that JSON cannot carry; nothing was sent
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onceward.errors import OncewardError

if TYPE_CHECKING:
    from onceward.queue.messages import QueueMessage


class QueueError(OncewardError):
    """Redis failed during a read, an acknowledgment, a claim or an enqueue. It was tried once.

    Messages that were delivered but not acknowledged stay pending. The next call starts fresh, with a new
    connection if needed.
    """

    @property
    def cause(self) -> BaseException | None:
        """The driver's error, if this wraps one."""
        return self.__cause__


class UndecodableEntryError(QueueError):
    """Entries whose `data` is missing or not JSON. They stay pending: neither dropped nor acknowledged.

    `entries` are messages whose payload is the raw fields, in bytes. Inspect them, store them elsewhere, then `ack`
    them.
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
