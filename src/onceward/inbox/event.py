"""One event, in one form for every source.

Only its id decides whether an event is a duplicate: `created_at`, the source and the delivery of a copy may differ. A
UUID has many spellings, and they are one id: it is spelled in one way from here on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from onceward._ids import SHORTEST_UUID, day_in, same_id, uuid7_ms
from onceward.inbox.errors import Breach, ContractError
from onceward.transaction import Transaction

LONGEST_ID = 400
"""Characters of an id. Together with a consumer's id it fits into a PostgreSQL index entry in any script."""

LONGEST_TYPE = 200
"""Characters of an event type."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LARGEST = 2**63 - 1  # a database's largest integer
_NOTHING: Mapping[str, Any] = {}
_FIELDS = ("event_type", "aggregate_id", "sequence", "lock_token", "schema_version")
"""Fields around a payload, which the payload may have instead."""

_NO_FIELDS: tuple[Any, ...] = (None,) * len(_FIELDS)

_ENTRY_ID = re.compile(r"([0-9]{1,20})-[0-9]{1,20}", re.ASCII)
UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""What some stores and logs cannot handle: control characters and surrogates."""

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Digest(NamedTuple):
    """Stands for the content of an event. If a stored digest is one of these, it is of the same event."""

    content: bytes
    """SHA-256 of event type and payload: what is stored."""
    payload: bytes
    """SHA-256 of the payload alone: what older versions have stored."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. Every copy of it is the same, except for `lock_token` and `deliveries`."""

    tracking_id: str
    """Identifies the event; the same for every copy. A UUID is in lower case with dashes, however it was sent, and any
    other id is the exact text."""
    event_type: str
    """Empty if the source names none; the contract decides whether to accept that."""
    created_at: datetime
    """In UTC."""
    payload: Any
    aggregate_id: str | None = None
    sequence: int | None = None
    """The position among the events of the aggregate."""
    schema_version: int = 1
    lock_token: str | None = None
    """Of the claim under which this copy was delivered."""
    deliveries: int | None = None
    """How often the source has delivered it, including this time. None if the source does not count."""

    def __post_init__(self) -> None:
        name = self.tracking_id
        # What is too short for a UUID has one spelling.
        if type(name) is not str or not 0 < len(name) < SHORTEST_UUID or not name.isprintable():
            _settle_text(self, "tracking_id", LONGEST_ID)
        if type(self.event_type) is not str or self.event_type:
            _settle_text(self, "event_type", LONGEST_TYPE)
        if self.aggregate_id is not None:
            _settle_text(self, "aggregate_id", LONGEST_ID)
        if self.lock_token is not None:
            _settle_text(self, "lock_token", LONGEST_ID)
        if self.created_at.__class__ is not datetime or self.created_at.tzinfo is not UTC:
            msgspec.structs.force_setattr(self, "created_at", _in_utc(self))
        version = self.schema_version
        if type(version) is not int or not 1 <= version <= _LARGEST:  # excludes bool
            raise _integer_flaw(self, "schema_version", 1)
        if self.sequence is not None:
            _check_integer(self, "sequence")
        if self.deliveries is not None:
            _check_integer(self, "deliveries")

    @classmethod
    def of(cls, thing: object) -> Event:
        """Return `thing` as an event: an event, a transaction, a queue's message, or a mapping.

        A mapping, or a message with one, is either an envelope with the keys `tracking_id` and `payload`, or
        the payload itself with the event's fields among its own.
        """
        if isinstance(thing, Event):
            return thing
        if isinstance(thing, Transaction):
            head = thing.metadata
            tracking_id, created_at = head.get("tracking_id"), head.get("created_at")
            if tracking_id is None:
                tracking_id = thing.id
            at = thing.created_at if created_at is None else _as_datetime(created_at, tracking_id)
            return _view(tracking_id, at, head, thing.payload)
        if isinstance(thing, Mapping):
            return _of_mapping(thing)
        if all(hasattr(thing, name) for name in ("stream", "id", "payload", "deliveries")):
            return _of_message(thing)
        raise TypeError(
            f"an event must be an Event, a Transaction, a queue's message or a mapping, not {type(thing).__name__}"
        )

    @property
    def day(self) -> int:
        """Days since 1970-01-01 UTC, by the event's own time. An event of a day before the dedup horizon is not run.

        A UUID of version 7 contains a time, which takes precedence over `created_at`: a copy that was produced again
        may have a different `created_at`.
        """
        day = day_in(self.tracking_id)
        return (self.created_at - _EPOCH).days if day is None else day

    @property
    def digest(self) -> Digest:
        """Of the event type and the payload, regardless of the order of its keys.

        Computed on each access: read it before the payload is upcast or passed to a handler. A `lock_token` in the
        payload does not count, because it changes with every claim.
        """
        try:
            content = _without_token(self.payload)
            try:
                encoded = _encode(content)
            except TypeError:
                encoded = _encode(_with_keys_in_order(content))
        except Exception as error:  # noqa: BLE001 - objects in a payload run their own code
            problem = type(error).__name__
        else:
            payload = hashlib.sha256(encoded).digest()
            return Digest(hashlib.sha256(payload + self.event_type.encode()).digest(), payload)
        # Outside the handler: the first error may quote the payload.
        raise ContractError(
            f"event {self.tracking_id!r}: its payload cannot be encoded ({problem}), so copies of it cannot be "
            "compared; use str/int/float/bool/None/bytes/list/dict/datetime",
            Breach.PAYLOAD,
            self.tracking_id,
        )

    def __repr__(self) -> str:
        # No payload: a repr ends up in logs and tracebacks.
        return (
            f"Event(tracking_id={self.tracking_id!r}, event_type={self.event_type!r}, "
            f"aggregate_id={self.aggregate_id!r}, sequence={self.sequence!r}, "
            f"schema_version={self.schema_version!r}, created_at={self.created_at.isoformat()})"
        )


# ───────────────────────────── where the fields come from ─────────────────────────────


def _of_mapping(mapping: Mapping[str, Any]) -> Event:
    head, payload = _envelope(mapping)
    tracking_id = _lookup("tracking_id", head, payload)
    if tracking_id is None:
        raise ContractError(
            "a mapping must have a tracking_id to be an event, and this one has none; send the id that all "
            "copies of the event share",
            Breach.ENVELOPE,
        )
    created_at = _own_time(tracking_id, head, payload)
    if created_at is None:
        raise ContractError(
            f"event {_describe(tracking_id)} has no created_at, and its tracking_id is not a UUID of version 7, which "
            "contains a time: without its own time, a late copy of it could not be recognized; send created_at",
            Breach.ENVELOPE,
            _safe_id(tracking_id),
        )
    return _view(tracking_id, created_at, head, payload)


def _of_message(message: Any) -> Event:
    head, payload = _envelope(message.payload)
    # The stream assigns an entry's id once, so it serves as the id if the producer sent none.
    tracking_id = _lookup("tracking_id", head, payload)
    if tracking_id is None:
        tracking_id = f"{message.stream}:{message.id}"
    created_at = _own_time(tracking_id, head, payload)
    if created_at is None:
        created_at = _entry_time(message.id, tracking_id)
    return _view(tracking_id, created_at, head, payload, message.deliveries)


def _envelope(content: Any) -> tuple[Mapping[str, Any], Any]:
    """Return the fields around the payload, and the payload."""
    if isinstance(content, Mapping) and content.get("tracking_id") is not None and "payload" in content:
        return content, content["payload"]
    return _NOTHING, content


def _view(
    tracking_id: Any,
    created_at: datetime,
    head: Mapping[str, Any],
    payload: Any,
    deliveries: int | None = None,
) -> Event:
    event_type, aggregate_id, sequence, lock_token, version = map(head.get, _FIELDS) if head else _NO_FIELDS
    if type(payload) is dict or isinstance(payload, Mapping):  # asking an abstract class takes long
        # An empty string or a zero counts: it may be wrong, but it was sent.
        event_type = payload.get("event_type") if event_type is None else event_type
        aggregate_id = payload.get("aggregate_id") if aggregate_id is None else aggregate_id
        sequence = payload.get("sequence") if sequence is None else sequence
        lock_token = payload.get("lock_token") if lock_token is None else lock_token
        # The version describes the payload, so the payload's own version takes precedence over the envelope's.
        own = payload.get("schema_version")
        version = version if own is None else own
    return Event(
        tracking_id=tracking_id,
        event_type="" if event_type is None else event_type,
        created_at=created_at,
        payload=payload,
        aggregate_id=aggregate_id,
        sequence=sequence,
        schema_version=1 if version is None else version,
        lock_token=lock_token,
        deliveries=deliveries,
    )


def _lookup(name: str, head: Mapping[str, Any], payload: Any) -> Any:
    found = head.get(name)
    return payload.get(name) if found is None and isinstance(payload, Mapping) else found


# ───────────────────────────── times ─────────────────────────────


def _own_time(tracking_id: Any, head: Mapping[str, Any], payload: Any) -> datetime | None:
    given = _lookup("created_at", head, payload)
    if given is not None:
        return _as_datetime(given, tracking_id)
    ms = uuid7_ms(same_id(str(tracking_id)))
    return None if ms is None else _from_ms(ms, "tracking_id", tracking_id)


def _as_datetime(value: Any, tracking_id: Any) -> datetime:
    if isinstance(value, datetime):
        return value
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            pass
        # Not the value itself: it may be anything, and messages are logged.
        raise _flaw(
            "created_at",
            "a str that is not an ISO 8601 time",
            "a time like 2026-01-31T12:00:00Z",
            tracking_id,
        )
    raise _flaw("created_at", type(value).__name__, "a datetime or an ISO 8601 string", tracking_id)


def _entry_time(entry_id: Any, tracking_id: Any) -> datetime:
    match = _ENTRY_ID.fullmatch(entry_id) if isinstance(entry_id, str) else None
    if match is None:
        raise _flaw("created_at", "missing", "sent, because the entry's id contains no time", tracking_id)
    return _from_ms(int(match[1]), "the entry's id", tracking_id)


def _from_ms(ms: int, field: str, tracking_id: Any) -> datetime:
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        pass
    raise _flaw(field, "a time after the year 9999", "earlier", tracking_id)


# ───────────────────────────── the digest ─────────────────────────────


def _without_token(payload: Any) -> Any:
    if (type(payload) is dict or isinstance(payload, Mapping)) and "lock_token" in payload:
        return {key: value for key, value in payload.items() if key != "lock_token"}
    return payload


def _with_keys_in_order(value: Any) -> Any:
    """Sort dicts whose keys are not all strings, which our wire format allows and the encoder cannot sort.

    Such a dict becomes an extension value, which differs from anything else in a payload.
    """
    if isinstance(value, Mapping):
        pairs = [(key, _with_keys_in_order(item)) for key, item in value.items()]
        if all(type(key) is str for key, _ in pairs):
            return dict(pairs)
        return msgspec.msgpack.Ext(1, b"".join(sorted(_encode(pair) for pair in pairs)))
    if isinstance(value, list | tuple):
        return [_with_keys_in_order(item) for item in value]
    return value


# ───────────────────────────── checks ─────────────────────────────


def _settle_text(event: Event, field: str, longest: int) -> None:
    """Check a field, and convert a UUID or a number to a string."""
    value: Any = getattr(event, field)
    if type(value) is not str:
        value = _as_text(value, field, event.tracking_id)
        msgspec.structs.force_setattr(event, field, value)
    if field == "tracking_id":
        value = same_id(value)
        msgspec.structs.force_setattr(event, field, value)
    if not value:
        raise _flaw(field, "an empty str", "a non-empty string", event.tracking_id)
    if len(value) > longest:
        raise _flaw(field, f"a str of {len(value)} characters", f"at most {longest} long", event.tracking_id)
    if not value.isprintable() and UNFIT.search(value):
        raise _flaw(field, "a str with control characters", "plain text", event.tracking_id)


def _as_text(value: Any, field: str, tracking_id: Any) -> str:
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, UUID) or (_is_number(value) and field != "event_type"):
        return str(value)
    raise _flaw(field, type(value).__name__, "a string", tracking_id)


def _in_utc(event: Event) -> datetime:
    value: Any = event.created_at
    if not isinstance(value, datetime):
        raise _flaw("created_at", type(value).__name__, "a datetime", event.tracking_id)
    if value.utcoffset() is None:
        raise _flaw(
            "created_at",
            "a datetime without a time zone",
            "one with a time zone, like …+00:00 or …Z",
            event.tracking_id,
        )
    try:
        return value.astimezone(UTC)
    except OverflowError:
        pass
    raise _flaw("created_at", "outside the range of UTC", "within years 1 to 9999", event.tracking_id)


def _check_integer(event: Event, field: str) -> None:
    value = getattr(event, field)
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise _integer_flaw(event, field, 0)


def _integer_flaw(event: Event, field: str, least: int) -> ContractError:
    value = getattr(event, field)
    if type(value) is not int:
        return _flaw(field, type(value).__name__, f"an int of {least} or more", event.tracking_id)
    if value < least:
        return _flaw(field, f"an int below {least}", f"{least} or more", event.tracking_id)
    return _flaw(field, "an int beyond 64 bits", "smaller", event.tracking_id)


def _flaw(field: str, found: str, wanted: str, tracking_id: Any) -> ContractError:
    return ContractError(
        f"event {_describe(tracking_id)}: {field} is {found}; it must be {wanted}",
        Breach.ENVELOPE,
        _safe_id(tracking_id),
    )


def _describe(tracking_id: Any) -> str:
    safe = _safe_id(tracking_id)
    return f"with a tracking_id of type {type(tracking_id).__name__}" if safe is None else repr(safe)


def _safe_id(tracking_id: Any) -> str | None:
    """Return an id that is safe to log, cut to `LONGEST_ID`, or None if it is not an id."""
    if isinstance(tracking_id, str | UUID) or _is_number(tracking_id):
        return f"{tracking_id!s:.{LONGEST_ID}}"
    return None


def _is_number(value: Any) -> bool:
    """Whether this is an int that could be a row's id. Python refuses to print much larger ones."""
    return type(value) is int and -_LARGEST <= value <= _LARGEST
