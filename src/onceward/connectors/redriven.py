"""From the bytes of a dead letter back to a transaction, such that an inbox knows it for the event it was."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from onceward.connectors.codec import DecodeError, decode, sanitise_metadata
from onceward.transaction import Transaction

ENVELOPE = ("event_type", "aggregate_id", "sequence", "schema_version", "traceparent", "tracestate")
"""What goes before a payload, and into metadata."""


def transaction_of(
    body: bytes, *, message_id: str, event_at: float | None, first_failed_at: float
) -> Transaction:
    """What was buried: a transaction, or JSON as it came from a queue. Raises `DecodeError` for anything else.

    Id, payload and time are those by which `Event.of` knew the message: redriven, it is a duplicate if it was done.
    """
    try:
        return decode(body)
    except DecodeError as error:
        refusal = error
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise refusal from None
    head, payload = _envelope(content)
    # Where nothing tells the event's own time, one that never changes: by it the inbox finds its record again.
    created_at = datetime.fromtimestamp(first_failed_at if event_at is None else event_at, UTC)
    return Transaction(id=message_id, payload=payload, metadata=head, created_at=created_at)


def _envelope(content: Any) -> tuple[dict[str, Any], Any]:
    if not isinstance(content, Mapping) or content.get("tracking_id") is None or "payload" not in content:
        return {}, content
    head = {name: content[name] for name in ENVELOPE if content.get(name) is not None}
    return sanitise_metadata(head), content["payload"]
