"""What a queue delivers, and how it encodes a payload: one field of a stream entry, `data`, with JSON in UTF-8.

Any JSON value may be a payload. NaN and infinities are not JSON: they are refused when enqueued and cannot be decoded
when read. Other fields of an entry are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from onceward.queue.errors import QueuePayloadError, UndecodableEntryError

FIELD: Final = b"data"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """One entry of a stream, as delivered to one group."""

    stream: str
    group: str
    id: str
    payload: Any = field(hash=False)
    """Whatever JSON was enqueued: an object, a list, a string, a number, true, false or null."""
    deliveries: int | None = field(default=None, compare=False)
    """How often Redis has delivered it, including this time. None if Redis did not say."""
    raw: bytes | None = field(default=None, compare=False, repr=False)
    """The JSON as it arrived, byte for byte: what a dead letter stores. None if the entry has no such field."""


class BacklogStats(NamedTuple):
    """A snapshot of a queue, out of date by the time you read it."""

    length: int
    """Entries in the stream, including acknowledged ones: Redis keeps those until they are trimmed."""
    pending: int
    """Delivered to the group but not acknowledged."""
    oldest_idle_ms: int | None
    """The longest idle time among the first 1000 pending entries. None if nothing is pending."""


def encode(payload: Any) -> bytes:
    """Encode a payload as JSON. Raises `QueuePayloadError` if it would not come back equal."""
    try:
        body = _encode(payload).encode()
        if _decode(body) == payload:
            return body
        reason = "it would come back changed, as tuples, non-string keys and objects do"
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise QueuePayloadError(f"the payload cannot be sent as JSON: {reason}")


class Entries:
    """Sorts the entries that Redis delivers into messages and undecodable ones."""

    def __init__(self, stream: str, group: str) -> None:
        self._stream = stream
        self._group = group
        self.messages: list[QueueMessage] = []
        self._bad: list[QueueMessage] = []
        self._reasons: list[Exception] = []

    def add(self, id_: bytes, fields: Sequence[bytes], deliveries: int | None) -> None:
        name = id_.decode()
        try:
            # Ours have one field; entries of other producers may have more.
            data = fields[1] if fields[0] == FIELD else fields[fields[::2].index(FIELD) * 2 + 1]
            payload = _decode(data)
        except (ValueError, RecursionError) as error:
            reason = error if FIELD in fields[::2] else ValueError("there is no field 'data'")
            given = dict(zip(fields[::2], fields[1::2], strict=True))
            self._bad.append(
                QueueMessage(self._stream, self._group, name, given, deliveries, given.get(FIELD))
            )
            self._reasons.append(reason)
        else:
            self.messages.append(QueueMessage(self._stream, self._group, name, payload, deliveries, data))

    @property
    def flaws(self) -> int:
        return len(self._bad)

    def error(self) -> UndecodableEntryError:
        """Build one error that names all undecodable entries; there must be some."""
        return UndecodableEntryError.of(tuple(self._bad), tuple(self._reasons))

    def result(self) -> tuple[list[QueueMessage], UndecodableEntryError | None]:
        """Return the messages, and an error to raise later. Raise it now if there are no messages."""
        if not self._bad:
            return self.messages, None
        if not self.messages:
            raise self.error()
        return self.messages, self.error()
