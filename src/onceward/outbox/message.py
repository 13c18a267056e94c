"""A message before it is written: checked, encoded, with its id and its time."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from onceward._ids import id_at, new_id, same_id
from onceward._text import storable
from onceward.connectors.codec import DecodeError, PayloadError, decode, encode
from onceward.models import as_plain_data
from onceward.outbox.delay import Delayed, check_due
from onceward.outbox.errors import OutboxError
from onceward.transaction import ReadOnlyDict, Transaction

LONGEST = 400
"""Characters of an id or a key, which are indexed."""
NAMESPACE = uuid.UUID("6f0f3a52-6c52-5c0c-9b63-0d1f4f6a7a10")
"""Of ids that are derived from an event. It never changes: a repeated handler must publish the same id."""


NO_HEADERS = ReadOnlyDict()


class Message(msgspec.Struct, frozen=True):
    """A row of the outbox before it is written."""

    id: str
    target: str
    key: str | None
    body: bytes
    digest: bytes
    """Of target, key and payload: a second message with the same id must have the same."""
    delay: float | None
    """Seconds to wait, by the clock of the database."""
    at: float | None
    """When it is due, in seconds since 1970; None if `delay` says it, or if it is due now."""

    def is_same(self, target: str, key: str | None, digest: bytes, body: bytes) -> bool:
        """Whether the row of these is this message. The digest depends on the order of keys in a payload, which makes
        no other message of it."""
        if bytes(digest) == self.digest:
            return True
        if (target, key) != (self.target, self.key):
            return False
        try:
            there = decode(bytes(body))
        except DecodeError:
            return False
        return bool(_in_one_order(there.payload) == _in_one_order(decode(self.body).payload))


class Lineage(msgspec.Struct, frozen=True):
    """The event that a message is sent because of."""

    parent_id: str | None = None
    correlation_id: str | None = None


NO_LINEAGE = Lineage()


def message(
    target: str,
    payload: Any,
    *,
    id: str | None,
    key: str | None,
    delay: timedelta | float | None,
    at: datetime | None,
    headers: Mapping[str, Any] | None,
    lineage: Lineage = NO_LINEAGE,
    complete: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Message:
    """Check and encode it. `complete` takes the payload and the headers, and returns all headers.

    Raises `OutboxError`, or `PayloadError` if the payload cannot be encoded.
    """
    seconds, due = (None, None) if delay is None and at is None else check_due(delay, at)
    own_time = now = datetime.now(UTC)
    # An inbox goes by the event's own time: one that is due in a year is not a year old then, and one that was due a
    # year ago is sent now.
    if seconds is not None:
        own_time = now + timedelta(seconds=seconds)
    elif due is not None and at is not None and at > now:
        own_time = at
    chosen = checked_id(id) if id is not None else _new_id(own_time, is_now=own_time is now)
    if key is not None:
        key = checked_text(key, "nothing was sent: key")
    if isinstance(payload, Delayed):
        raise OutboxError(
            "nothing was sent: a Delayed is what a producer returns or yields; pass its payload, and delay=… or at=…"
        )
    if isinstance(payload, Transaction):
        raise OutboxError(
            "nothing was sent: a payload cannot be a Transaction; pass its payload, and id=transaction.id to "
            "keep its id"
        )
    try:
        plain = as_plain_data(payload)
        encoded = msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PayloadError(
            f"message {chosen!r} cannot be sent: its payload cannot be encoded ({_why_not(error)})"
        ) from None
    metadata = NO_HEADERS if headers is None else headers
    if not isinstance(metadata, Mapping):
        raise OutboxError(f"nothing was sent: headers must be a mapping, not {type(metadata).__name__}")
    if complete is not None:
        metadata = complete(plain, metadata)
    transaction = Transaction(
        id=chosen,
        payload=plain,
        metadata=metadata,
        created_at=own_time,
        parent_id=lineage.parent_id,
        correlation_id=lineage.correlation_id,
    )
    digest = hashlib.blake2b(
        b"\0".join((target.encode(), (key or "").encode(), encoded)), digest_size=16
    ).digest()
    return Message(chosen, target, key, encode(transaction), digest, seconds, due)


def _in_one_order(value: Any) -> Any:
    """Plain data with sorted keys, to compare: each value is encoded, because in Python 1 is True."""
    if isinstance(value, dict):
        return (*sorted((msgspec.msgpack.encode(key), _in_one_order(each)) for key, each in value.items()),)
    return [*map(_in_one_order, value)] if isinstance(value, list) else msgspec.msgpack.encode(value)


def _why_not(error: Exception) -> str:
    """Say it without the error's own text, which may quote the payload."""
    if isinstance(error, TypeError):
        return str(error)
    if isinstance(error, OverflowError):
        return "an integer has more than 64 bits"
    if isinstance(error, RecursionError):
        return "it is nested too deep, or contains itself"
    return "a text has half of a character" if isinstance(error, UnicodeError) else type(error).__name__


def _new_id(own_time: datetime, *, is_now: bool) -> str:
    return new_id() if is_now else id_at(own_time.timestamp())


def derived_id(tracking_id: str, consumer_id: str, part: str) -> str:
    """Return the id of a message that a handler sends: the same in every attempt at its event."""
    return str(uuid.uuid5(NAMESPACE, f"{tracking_id}\0{consumer_id}\0{part}"))


def checked_id(value: Any, what: str = "nothing was sent: id") -> str:
    """Return the id as the outbox spells it."""
    return same_id(checked_text(value, what))


def checked_text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST or storable(value) != value:
        found = type(value).__name__
        if isinstance(value, str):
            fits = 0 < len(value) <= LONGEST
            found = "a text with NUL or half of a character" if fits else f"{len(value)} characters"
        raise OutboxError(f"{what} must be a string of 1 to {LONGEST} characters of plain text, not {found}")
    return str.__str__(value)  # of a subclass, too, such as a member of a StrEnum
