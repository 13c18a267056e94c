"""What a stream can count. Entries stay in it after they are done, so it can also list the messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from onceward.connectors.redis_streams.durability import connect
from onceward.connectors.reports import Messages, Seen, SourceCounts

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

PAGE = 1000
"""Entries per request."""


def count_stream(source: Address, server: str, stream: str, group: str) -> SourceCounts:
    """Count by reading the whole stream. Raises `ServerUnreachable`."""
    from onceward.connectors.lease_rules import LeaseRules
    from onceward.connectors.redis_streams.protocol import StreamQueue

    queue = StreamQueue(server, stream, group, LeaseRules(), None, lambda: 0.0)
    with connect(server) as redis:
        if not redis.exists(stream):
            return SourceCounts(
                appended=0,
                done=0,
                pending=0,
                dead=0,
                notes={"appended": f"nothing has been sent yet: there is no stream {stream}"},
                missing=f"there is no stream {stream!r}; check the source {str(source)!r}",
                messages=Messages([], []),
            )
        groups = {each["name"].decode(): each["last-delivered-id"] for each in redis.xinfo_groups(stream)}
        is_new = queue.group not in groups
        held = set() if is_new else set(_pending_ids(redis, stream, queue.group))
        read_to = (-1, 0) if is_new else _number(groups[queue.group])
        # In this order: an entry that is buried meanwhile is seen twice, never missed.
        buried = {fields[b"entry"] for _, fields in _entries(redis, queue.dead)}
        added = redis.xinfo_stream(stream).get("entries-added")
        seen = Messages([], [])
        unread = 0
        here: set[bytes] = set()
        for entry, fields in _entries(redis, stream):
            like = seen.others
            if _number(entry) > read_to:
                unread += 1
            elif entry in held or entry in buried:
                here.add(entry)
            else:
                like = seen.done
            like.append(_identify(entry, fields))
    known = unread + len(seen.done) + len(held | buried)  # some are no longer in the stream
    notes = {}
    if added is None:
        notes["appended"] = (
            "counts only entries that the stream still has: Redis before 7.0 does not count removed ones"
        )
    elif added > known:
        notes["gone"] = (
            "they are no longer in the stream; Redis does not know whether they were done before that"
        )
    if held - here:
        notes["pending"] = (
            f"{len(held - here):,} of them were trimmed from the stream, and will become dead letters"
        )
    return SourceCounts(
        appended=known if added is None else added,
        done=len(seen.done),
        pending=unread + len(held - buried),
        dead=len(buried),
        gone=max((added or 0) - known, 0),
        notes=notes,
        missing=_describe_missing_group(source, queue.group, list(groups)) if is_new and groups else None,
        messages=seen,
    )


def _describe_missing_group(source: Address, group: str, others: list[str]) -> str:
    return (
        f"the stream of {source.origin} has no group {group!r}, only {', '.join(others)}; check ?group= of the source, "
        "or start its consumer once"
    )


def _pending_ids(redis: Any, stream: str, group: str) -> Iterator[bytes]:
    begin: bytes | str = "-"
    while page := redis.xpending_range(stream, group, min=begin, max="+", count=PAGE):
        for each in page:
            yield each["message_id"]
        begin = b"(" + page[-1]["message_id"]


def _entries(redis: Any, stream: str) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    begin: bytes | str = "-"
    while page := redis.xrange(stream, min=begin, count=PAGE):
        yield from page
        begin = b"(" + page[-1][0]


def _number(entry: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition(b"-")
    return int(milliseconds), int(sequence)


def _identify(entry: bytes, fields: dict[bytes, bytes]) -> Seen:
    from onceward.connectors.codec import DecodeError, decode
    from onceward.inbox.errors import ContractError
    from onceward.inbox.event import Event

    body = fields.get(b"body", b"")
    digest = hashlib.sha256(body).digest()
    try:
        event = Event.of(decode(body))
    except (DecodeError, ContractError):  # it cannot have been applied, but may be a dead letter
        return Seen(digest, f"entry {entry.decode()}", 0)
    return Seen(digest, event.tracking_id, event.day)
