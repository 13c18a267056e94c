"""What a queue hands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """One entry of a stream, as delivered to one group."""

    stream: str
    group: str
    id: str
    payload: Any = field(hash=False)
    """Whatever JSON was enqueued: an object, a list, a string, a number, true, false or null."""
    deliveries: int | None = field(default=None, compare=False)
    """How often Redis has delivered it, this time included. None where Redis did not say."""
    raw: bytes | None = field(default=None, compare=False, repr=False)
    """The JSON as it came, byte for byte: what a dead letter keeps. None where the entry has no such field."""


class BacklogStats(NamedTuple):
    """A look at a queue, which is out of date when you read it."""

    length: int
    """Entries in the stream, acknowledged ones included: Redis keeps those until they are trimmed."""
    pending: int
    """Delivered to the group and not acknowledged."""
    oldest_idle_ms: int | None
    """The longest any of the first 1000 pending entries has lain still. None when nothing is pending."""
