"""What identifies a message after it has left its source, for `onceward balance`: the id and time of its event."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from onceward.connectors.codec import DecodeError, decode
from onceward.connectors.reports import Seen
from onceward.transaction import Transaction

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Identity = tuple[str, datetime]
"""The id of an event, as it was sent, and its own time."""


def identity_of(transaction: Transaction) -> Identity:
    head = transaction.metadata
    if head and ("tracking_id" in head or "created_at" in head):
        from onceward.inbox.errors import (
            ContractError,
        )  # here, because an app without an inbox needs no database
        from onceward.inbox.event import Event

        try:
            event = Event.of(transaction)
        except ContractError:
            pass  # it cannot have been applied
        else:
            return event.tracking_id, event.created_at
    return transaction.id, transaction.created_at


def seen(tracking_id: str, created_at: datetime, at: float = 0.0, digest: bytes = b"") -> Seen:
    """Return it as the inbox knows it."""
    from onceward.inbox.errors import ContractError
    from onceward.inbox.event import Event

    try:
        event = Event(tracking_id=tracking_id, event_type="", created_at=created_at, payload=None)
    except ContractError:
        return Seen(tracking_id, 0, at, digest)
    return Seen(event.tracking_id, event.day, at, digest)


def identity_in(body: bytes) -> Identity:
    """Bytes that cannot be decoded have no event, but may be a dead letter."""
    try:
        return identity_of(decode(body))
    except DecodeError:
        return f"sha256:{hashlib.sha256(body).hexdigest()}", EPOCH


def seen_in(body: bytes, at: float) -> Seen:
    """Identify a message by its bytes."""
    return seen(*identity_in(body), at, hashlib.sha256(body).digest())


# ── for a source that deletes its messages ──────────────────────────────────────────────────────────────

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Identity])


def pack(identities: Iterable[Identity]) -> bytes:
    """Encode what a source keeps of messages that ended together."""
    return _encoder.encode(list(identities))


def unpack(packed: bytes) -> list[Identity]:
    return _decoder.decode(packed)


def summarize(packed: bytes) -> tuple[int, int, int, int]:
    """Return what is left of them when their ids are forgotten: the first and last of their days, how many ids there
    were, and how many copies."""
    identities = unpack(packed)
    times = [created_at for _, created_at in identities]
    ids = len({tracking_id for tracking_id, _ in identities})
    return (min(times) - EPOCH).days, (max(times) - EPOCH).days, ids, len(identities) - ids
