"""Facts as bytes: protobuf, in the log as on the wire, so a page is assembled without decoding a fact.

A record in the log is a `StoredFact` without its two numbers, which are added in front and behind when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import msgspec

from onceward.boundary.errors import BoundaryError, InvalidArgument
from onceward.boundary.model import Envelope, Fact, Gap, Page, StoredFact
from onceward.boundary.v1 import boundary_pb as pb

E = TypeVar("E")
Record = tuple[int, bytes, int]
"""Offset, record, time of appending in milliseconds."""

AROUND_RECORD = 32
"""Bytes that a fact in a page has at most in addition to its record: two numbers, a length, and what marks them."""
AROUND_PAGE = 48
"""Bytes of a gap, of where the log begins, and of the cursor."""

UNENCODABLE = (UnicodeEncodeError, OverflowError, TypeError)
"""What the library raises for a lone surrogate, a number beyond 64 bits, and a value of another type."""

_OFFSET, _ENVELOPE, _FACT, _APPENDED_AT = b"\x08", b"\x12", b"\x1a", b"\x20"
_FACTS, _GAP, _LOG_BEGINS_AT, _CURSOR = b"\x0a", b"\x12", b"\x18", b"\x20"
_IN_ORDER = b"\x10\x01"
_SMALL = [bytes((number,)) for number in range(0x80)]


def record_of(envelope: bytes, fact: bytes) -> bytes:
    """Build a record from the two encoded messages."""
    return b"".join((_ENVELOPE, varint(len(envelope)), envelope, _FACT, varint(len(fact)), fact))


def record(envelope: Envelope, fact: Fact) -> bytes:
    """Encode a record. Raise `InvalidArgument` if there is no such encoding."""
    try:
        return record_of(as_pb_envelope(envelope).to_binary(), as_pb_fact(fact).to_binary())
    except UNENCODABLE:
        _refuse_fields(envelope, fact)
        raise


def stored(record: Record) -> StoredFact:
    return from_pb(pb.StoredFact.from_binary(stored_bytes(record)))


def stored_bytes(record: Record) -> bytes:
    offset, body, appended_at = record
    return b"".join((_OFFSET, varint(offset), body, _APPENDED_AT, varint(appended_at)))


class Encoded:
    """A message that is encoded already."""

    __slots__ = ("_encoded",)

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded

    def to_binary(self) -> bytes:
        return self._encoded


def encode(kind: Callable[..., Any], within: str = "", **fields: Any) -> Encoded:
    """Encode a message of this kind. Raise `InvalidArgument` with the name of a field whose value has no encoding:
    the libraries would do so in the middle of a call, which looks like a boundary that cannot be reached."""
    try:
        return Encoded(bytes(kind(**fields).to_binary()))
    except UNENCODABLE as error:
        if len(fields) == 1:
            raise InvalidArgument(within + next(iter(fields)), f"cannot be sent: {error}") from None
        for name, value in fields.items():
            encode(kind, within, **{name: value})
        raise


def append_request(envelope: Envelope, fact: Fact) -> bytes:
    """Encode an `AppendFactRequest`. Raise `InvalidArgument` if there is no such encoding."""
    try:
        return bytes(
            pb.AppendFactRequest(envelope=as_pb_envelope(envelope), fact=as_pb_fact(fact)).to_binary()
        )
    except UNENCODABLE:
        _refuse_fields(envelope, fact)
        raise


def _refuse_fields(envelope: Envelope, fact: Fact) -> None:
    """Raise `InvalidArgument` with the name of a field whose value has no encoding."""
    _convert(partial(encode, pb.Envelope, "envelope."), envelope)
    encode(pb.Fact, "fact.", **msgspec.structs.asdict(fact))


def append_requests(requests: Iterable[bytes], in_order: bool = False) -> bytes:
    """Encode an `AppendFactsRequest` of encoded `AppendFactRequest`s."""
    parts: list[bytes] = []
    for each in requests:
        parts += (_FACTS, varint(len(each)), each)
    return b"".join((*parts, _IN_ORDER) if in_order else parts)


def page_bytes(
    records: Iterable[Record], gap: Gap | None, log_begins_at: int = 0, cursor_advanced_to: int = 0
) -> bytes:
    """Encode a `FetchFactsResponse`."""
    parts: list[bytes] = []
    time, encoded_time = -1, b""
    for offset, body, appended_at in records:
        if appended_at != time:  # facts of one commit have the same
            time, encoded_time = appended_at, _APPENDED_AT + varint(appended_at)
        number = varint(offset)
        size = len(_OFFSET) + len(number) + len(body) + len(encoded_time)
        parts += (_FACTS, varint(size), _OFFSET, number, body, encoded_time)
    if gap is not None:
        encoded = pb.Gap(first_missing=gap.first_missing, last_missing=gap.last_missing).to_binary()
        parts += (_GAP, varint(len(encoded)), encoded)
    if log_begins_at > 1:
        parts += (_LOG_BEGINS_AT, varint(log_begins_at))
    if cursor_advanced_to:
        parts += (_CURSOR, varint(cursor_advanced_to))
    return b"".join(parts)


def page(response: pb.FetchFactsResponse) -> Page:
    gap, begins_at = response.gap, response.log_begins_at or None
    return Page(
        tuple([from_pb(fact, begins_at) for fact in response.facts]),
        None if gap is None else Gap(gap.first_missing, gap.last_missing),
    )


def from_pb(fact: pb.StoredFact, log_begins_at: int | None = None) -> StoredFact:
    if fact.envelope is None or fact.fact is None:
        raise BoundaryError(
            f"the fact at offset {fact.offset} is damaged: it has no envelope, or no fact in it"
        )
    return StoredFact(
        offset=fact.offset,
        envelope=envelope_of(fact.envelope),
        fact=fact_of(fact.fact),
        appended_at_unix_ms=fact.appended_at_unix_ms,
        log_begins_at=log_begins_at,
    )


def fact_of(fact: pb.Fact) -> Fact:
    return Fact(subject=fact.subject, predicate=fact.predicate, object_json=fact.object_json)


def envelope_of(envelope: pb.Envelope) -> Envelope:
    return _convert(Envelope, envelope)


def as_pb_envelope(envelope: Envelope) -> pb.Envelope:
    return _convert(pb.Envelope, envelope)


def _convert(kind: Callable[..., E], envelope: Envelope | pb.Envelope) -> E:
    """Both kinds have the same fields."""
    return kind(
        message_id=envelope.message_id,
        from_zone=envelope.from_zone,
        to_zone=envelope.to_zone,
        produced_at_unix_ms=envelope.produced_at_unix_ms,
        correlation_id=envelope.correlation_id,
        causation_id=envelope.causation_id,
        labels=dict(envelope.labels),
        object_media_type=envelope.object_media_type,
        object_schema=envelope.object_schema,
    )


def as_pb_fact(fact: Fact) -> pb.Fact:
    return pb.Fact(subject=fact.subject, predicate=fact.predicate, object_json=fact.object_json)


def varint(number: int) -> bytes:
    """Encode a nonnegative number as protobuf does."""
    if number < 0x80:
        return _SMALL[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if number < 0x200000:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)
