"""What a stream can count, and its messages: entries stay in it after they are done, until somebody removes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from onceward.connectors.identities import seen_in
from onceward.connectors.lease_rules import LeaseRules
from onceward.connectors.redis_streams.durability import connect
from onceward.connectors.redis_streams.lines import WAITING
from onceward.connectors.redis_streams.protocol import StreamQueue
from onceward.connectors.redis_streams.scripts import DELAYED
from onceward.connectors.reports import Forgotten, Messages, Seen, SourceBacklog, SourceCounts

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

PAGE = 1000
"""Entries per request."""
MOST_HELD = 10_000_000
_MOVED_BACK = (
    "more entries wait or have ended than were ever added: somebody moved the group back (XGROUP SETID), so some of "
    "those that wait have ended before and are delivered again; or the stream's count was restored"
)


def count_stream(source: Address, server: str, stream: str, group: str) -> SourceCounts:
    """Count by reading the whole stream. Raises `ServerUnreachable`."""
    queue = StreamQueue(server, stream, group, LeaseRules(), None, lambda: 0.0)
    with connect(server) as redis:
        moment = _Moment.read(redis, queue)
        # In this order: an entry that dies or is moved meanwhile is seen twice, never missed.
        buried = {fields[b"entry"] for _, fields in _entries(redis, queue.dead)}
        moved = set(redis.zrange(queue.moved, 0, -1))
        if moment.facts is None and not moment.tally:
            return SourceCounts(
                appended=0,
                done=0,
                pending=0,
                dead=0,
                moved=0,
                notes={"appended": f"nothing has been sent yet: there is no stream {stream}"},
                missing=f"there is no stream {stream!r}; check the source {str(source)!r}",
                messages=Messages([], [], []),
            )
        seen = Messages([], [], [], is_complete=moment.ended is not None)
        waiting, bodiless = len(moment.held), set(moment.held)
        unread = _entries(redis, stream, moment.read_to)  # first, before they are trimmed
        for entry, fields in unread:
            if _number(entry) <= moment.last:
                waiting += 1
                bodiless.discard(entry)
                seen.others.append(_identify(entry, fields))
        for entry, fields in _entries(redis, stream, upto=moment.read_to):
            if entry in moment.held or entry in buried:
                like = seen.others
                bodiless.discard(entry)
            else:
                like = seen.moved if entry in moved else seen.done
            like.append(_identify(entry, fields))
        if bodiless:  # unless they were done and removed since
            bodiless &= _Moment.read(redis, queue).held
    counts = _add_up(source, queue, moment, seen, waiting, buried)
    return msgspec.structs.replace(counts, unknown=(*counts.unknown, *_doubt(len(bodiless))))


def read_backlog(server: str, stream: str, group: str) -> SourceBacklog:
    """Ask for numbers only, and one entry. Raises `ServerUnreachable`."""
    queue = StreamQueue(server, stream, group, LeaseRules(), None, lambda: 0.0)
    with connect(server) as redis:
        with redis.pipeline(transaction=True) as together:
            together.xinfo_groups(stream)
            together.xpending(stream, group)
            together.xlen(stream)
            together.xlen(queue.dead)
            together.time()
            groups, pending, length, dead, (seconds, _) = together.execute(raise_on_error=False)
        absent = [each for each in (groups, pending) if isinstance(each, Exception)]
        if any(not _is_absent(each) for each in absent):
            raise absent[0]
        if isinstance(dead, Exception):
            raise dead
        found = (
            next((each for each in groups if each["name"].decode() == group), None) if not absent else None
        )
        first = b"0-0" if found is None else found["last-delivered-id"]
        unread = redis.xrange(stream, min=b"(" + first, count=1)
    held = 0 if absent else pending["pending"]
    holders = {} if absent else {each["name"].decode(): each["pending"] for each in pending["consumers"]}
    delayed = holders.get(DELAYED, 0) + holders.get(WAITING, 0)
    oldest = [entry for entry, _ in unread] + ([pending["min"]] if held else [])
    age = max(seconds - min(_number(entry)[0] for entry in oldest) / 1000, 0.0) if oldest else 0.0
    # Redis before 7.0 does not count, and later ones cannot after entries were removed from the middle.
    waiting = length if found is None else 0 if not unread else found.get("lag")
    return SourceBacklog(
        waiting=waiting, in_flight=held - delayed, delayed=delayed, dead=dead, oldest_age=age
    )


class _Moment(NamedTuple):
    """What Redis knows at one moment."""

    facts: dict[str, Any] | None
    """None if there is no stream."""
    groups: dict[str, bytes]
    """The last entry that each group has read."""
    held: set[bytes]
    """Entries in flight, some of which may no longer be in the stream."""
    tally: dict[bytes, bytes]
    read_to: bytes
    ended: int | None
    """How many entries the group has ended; None if they were not all counted."""

    @property
    def last(self) -> tuple[int, int]:
        return (0, 0) if self.facts is None else _number(self.facts["last-generated-id"])

    @classmethod
    def read(cls, redis: Any, queue: StreamQueue) -> _Moment:
        with redis.pipeline(transaction=True) as together:
            together.xinfo_stream(queue.stream)
            together.xinfo_groups(queue.stream)
            together.hgetall(queue.tally)
            together.xpending_range(queue.stream, queue.group, min="-", max="+", count=MOST_HELD)
            facts, groups, tally, pending = together.execute(raise_on_error=False)
        if isinstance(tally, Exception):
            raise tally
        absent = (facts, groups, pending)
        if any(isinstance(each, Exception) and not _is_absent(each) for each in absent):
            raise next(each for each in absent if isinstance(each, Exception))
        facts, groups, pending = (None if isinstance(each, Exception) else each for each in absent)
        read = {each["name"].decode(): each["last-delivered-id"] for each in groups or ()}
        return cls(
            facts,
            read,
            {each["message_id"] for each in pending or ()},
            tally,
            read.get(queue.group, b"0-0"),
            _count_ended(queue.group, facts is not None, read, tally),
        )

    def appended(self) -> int | None:
        """How many entries were ever added; None if Redis does not know."""
        counted = int(self.tally.get(b"appended", 0))
        if self.facts is None:
            return counted
        added, last = self.facts.get("entries-added"), self.facts["last-generated-id"]
        if added is not None:
            ours = counted - int(self.tally.get(b"before", 0))
            if added == 0:
                return counted
            return counted + int(added) - ours if added >= ours else None  # others have created it again
        is_ours = last in (b"0-0", self.tally.get(b"last"))
        return counted if is_ours and b"others" not in self.tally else None


def _add_up(
    source: Address, queue: StreamQueue, moment: _Moment, seen: Messages, waiting: int, buried: set[bytes]
) -> SourceCounts:
    appended, notes = moment.appended(), {}
    read_to = _number(moment.read_to)
    dead = sum(_number(entry) <= read_to for entry in buried - moment.held)
    listed = len(seen.done) + len(seen.moved)
    repeats = moment.ended is not None and appended is not None and moment.ended + waiting > appended
    if moment.ended is None or repeats:
        gone = max((appended or 0) - waiting - dead - listed, 0)
        seen = seen._replace(is_complete=False)
    else:
        gone = max(moment.ended - dead - listed, 0)
    if appended is None:
        notes["appended"] = (
            "something other than onceward adds to this stream, or did, and Redis before 7.0 does not count entries; "
            "or the stream was deleted, and created again by something else"
        )
    elif waiting + dead + listed + gone > appended:
        appended = None
        notes["appended"] = "the stream has more entries than were counted: its count was removed or restored"
    return SourceCounts(
        appended=appended,
        done=len(seen.done) + gone,
        pending=waiting,
        dead=dead,
        moved=len(seen.moved),
        notes=notes,
        missing=_describe_missing_group(source, queue.group, list(moment.groups))
        if queue.group not in moment.groups and moment.groups
        else None,
        messages=seen._replace(forgotten=Forgotten(undated=gone)),
        unknown=(_MOVED_BACK,) if repeats and waiting else (),
    )


def _doubt(bodiless: int) -> tuple[str, ...]:
    """Say why entries that were removed after they were read leave it open whether they are lost."""
    if not bodiless:
        return ()
    return (
        f"{bodiless:,} {'entry' if bodiless == 1 else 'entries'} in flight cannot be delivered again, because somebody "
        "removed them from the stream: the worker that has read them may still finish, or they become dead letters "
        "without a body",
    )


def _count_ended(
    group: str, has_stream: bool, groups: dict[str, bytes], tally: dict[bytes, bytes]
) -> int | None:
    begun = tally.get(f"begun:{group}".encode())
    if not groups and not any(name.startswith(b"begun:") for name in tally):
        return 0  # nobody has read anything yet
    if has_stream and group not in groups and begun == tally.get(b"streams", b"0"):
        return None  # the group was deleted, so what it has ended waits again
    ended = tally.get(f"ended:{group}".encode())
    return None if ended is None else int(ended)


def _is_absent(error: Exception) -> bool:
    return "no such key" in str(error) or "NOGROUP" in str(error)


def _describe_missing_group(source: Address, group: str, others: list[str]) -> str:
    return (
        f"the stream of {source.origin} has no group {group!r}, only {', '.join(others)}; check ?group= of the source, "
        "or start its consumer once"
    )


def _entries(
    redis: Any, stream: str, after: bytes = b"", upto: bytes | str = "+"
) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    begin: bytes | str = b"(" + after if after else "-"
    while page := redis.xrange(stream, min=begin, max=upto, count=PAGE):
        yield from page
        begin = b"(" + page[-1][0]


def _number(entry: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition(b"-")
    return int(milliseconds), int(sequence)


def _identify(entry: bytes, fields: dict[bytes, bytes]) -> Seen:
    return seen_in(fields.get(b"body", b""), _number(entry)[0] / 1000)
