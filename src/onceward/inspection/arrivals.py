"""What the sink of an outbox has had: by id where it lists its messages, otherwise by number."""

from __future__ import annotations

from collections import Counter

import msgspec

from onceward.connectors.reports import SourceCounts
from onceward.connectors.urls import Address
from onceward.inspection.balance import shortfall


class SinkArrivals(msgspec.Struct, frozen=True, kw_only=True):
    total: int | None
    """How many messages it has ever had, copies included; None if it does not count."""
    listed: Counter[str] | None = None
    """How often it has each id; None if it does not list its messages."""
    forgotten: int = 0
    """How many of them ended and are no longer listed."""
    missing: int = 0
    """How many it has counted, but neither has nor has seen end."""
    unknown: tuple[str, ...] = ()
    """Why it is unknown what it has had."""


def arrivals_at(sink: Address) -> SinkArrivals:
    """Ask the sink. Raises `ServerUnreachable`."""
    if sink.in_process:
        return SinkArrivals(
            total=None, unknown=("its messages are visible only inside the process of its relay",)
        )
    counted = sink.arrivals()
    messages = counted.messages
    if messages is None:
        return SinkArrivals(total=counted.appended, unknown=_why_unknown(counted))
    listed = Counter(each.tracking_id for some in messages[:3] for each in some)
    unknown = _why_unknown(counted)
    if not messages.is_complete and messages.forgotten.total:
        unknown += ("it did not count whether messages that it no longer has were consumed",)
    return SinkArrivals(
        total=counted.appended,
        listed=listed,
        forgotten=messages.forgotten.total,
        missing=max(shortfall(counted) or 0, 0),
        unknown=unknown,
    )


def _why_unknown(counted: SourceCounts) -> tuple[str, ...]:
    if counted.appended is not None:
        return counted.unknown
    return (counted.notes.get("appended", "it does not count"), *counted.unknown)
