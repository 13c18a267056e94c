"""Payloads as stream entries: one field, `data`, with JSON in UTF-8.

Any JSON value may be a payload. NaN and infinities are not JSON; they are refused on the way in and cannot be
decoded on the way out. Fields beside `data` are left unread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from onceward.queue.exceptions import QueuePayloadError, UndecodableEntryError
from onceward.queue.message import QueueMessage

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
