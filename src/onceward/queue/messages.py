"""What a queue hands out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from onceward.queue.errors import QueuePayloadError, UndecodableEntryError


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


# Payloads as stream entries: one field, `data`, with JSON in UTF-8.
#
# Any JSON value may be a payload. NaN and infinities are not JSON; they are refused on the way in and cannot be
# decoded on the way out. Fields beside `data` are left unread.


FIELD: Final = b"data"

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_decode = msgspec.json.Decoder().decode


def encode(payload: Any) -> bytes:
    """The JSON of a payload. Raises `QueuePayloadError` for what would not come back equal."""
    try:
        body = _encode(payload).encode()
        if _decode(body) == payload:
            return body
        reason = "it would come back changed, as tuples, non-string keys and objects do"
    except (TypeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise QueuePayloadError(f"the payload cannot be sent as JSON: {reason}")


class Entries:
    """Sorts what Redis delivers into messages and what cannot be decoded."""

    def __init__(self, stream: str, group: str) -> None:
        self._stream = stream
        self._group = group
        self.messages: list[QueueMessage] = []
        self._bad: list[QueueMessage] = []
        self._reasons: list[Exception] = []

    def add(self, id_: bytes, fields: Sequence[bytes], deliveries: int | None) -> None:
        name = id_.decode()
        try:
            # Ours has one field; a stranger's may have more.
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
        """One error that names all that could not be decoded; there must be some."""
        return UndecodableEntryError.of(tuple(self._bad), tuple(self._reasons))
