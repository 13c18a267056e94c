"""The messages that a consumer has sent, as the outbox of a run has them. They are compared like rows of a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection

from onceward.connectors.codec import DecodeError, decode
from onceward.outbox.targets import shown
from onceward.verify.plan import UNKNOWN

MESSAGES = "messages (onceward_outbox)"
TABLE = "messages"
"""What `exclude` calls them, as in `messages.payload`."""
_TRACE = ("traceparent", "tracestate", "baggage")


class SentMessage(NamedTuple):
    id: str
    target: str
    key: str | None
    payload: str
    headers: str
    delayed: bool
    """Until when may depend on the clock."""


def compared(exclude: Sequence[str] | None) -> tuple[str, ...]:
    """The fields that are compared."""
    return tuple(each for each in SentMessage._fields if f"{TABLE}.{each}" not in (exclude or ()))


def ids_of(rows: Mapping[str, Counter[tuple[Any, ...]]], exclude: Sequence[str] | None) -> Counter[str]:
    """The ids of the messages among these rows, unless they are not compared."""
    fields = compared(exclude)
    found: Counter[str] = Counter()
    if "id" in fields:
        at = fields.index("id")
        found.update(row[at] for row in rows[MESSAGES].elements())
    return found


def read(connection: Connection) -> list[SentMessage]:
    """In the order in which they were written."""
    rows = connection.exec_driver_sql(
        "SELECT message_id, target, key, body, state FROM onceward_outbox ORDER BY seq"
    )
    return [
        SentMessage(id, shown(target), key, *_content(bytes(body)), state == "delayed")
        for id, target, key, body, state in rows
    ]


def _content(body: bytes) -> tuple[str, str]:
    try:
        message = decode(body)
    except DecodeError as error:
        return f"unreadable: {error}", ""
    headers = {name: value for name, value in message.metadata.items() if name not in _TRACE}
    return _text(without_unknown(message.payload)), _text(headers)


def without_unknown(value: Any) -> Any:
    """The kit adds a field to events; to pass it on, or to keep it, is right."""
    if isinstance(value, dict):
        return {name: without_unknown(each) for name, each in value.items() if name != UNKNOWN}
    return [without_unknown(each) for each in value] if isinstance(value, list) else value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)
