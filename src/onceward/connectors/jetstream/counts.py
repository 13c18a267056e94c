"""What a stream and its consumer can count. JetStream does not say which messages are in flight, only how many."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from onceward._text import quantity
from onceward.connectors.identities import seen_in
from onceward.connectors.jetstream.inspection import inspect
from onceward.connectors.jetstream.line import QueueLine
from onceward.connectors.jetstream.places import (
    ConsumerFound,
    StreamFound,
    find_consumer,
    find_stream,
)
from onceward.connectors.jetstream.records import JetStreamRecords, begin_of
from onceward.connectors.jetstream.scheme import consumer_of, stream_of
from onceward.connectors.reports import Forgotten, Messages, Seen, SourceBacklog, SourceCounts

if TYPE_CHECKING:
    from onceward.connectors.urls import Address

PAGE, PAGE_BYTES = 1000, 4_000_000


def count_stream(address: Address) -> SourceCounts:
    """Count. Raises `ServerUnreachable`."""
    stream, consumer = stream_of(address), consumer_of(address)

    async def look(link: QueueLine) -> SourceCounts:
        # In this order: a message that dies or is moved meanwhile is seen twice, never missed.
        there = await find_stream(link, stream)
        if there is None or there.state is None:
            return _nothing(address, stream)
        reader = await find_consumer(link, stream, consumer)
        if reader is None:
            return _unread(address, consumer, there)
        records = JetStreamRecords(stream, consumer)
        records.begun = begin_of(reader.created)
        dead = moved = frozenset[int]()
        if await find_stream(link, records.stream) is not None:
            dead = _sequences(await link.subjects(records.stream, records.letter(f"{records.begun}.>")))
            moved = _sequences(await link.subjects(records.stream, records.moved(f"{records.begun}.>")))
        counted = _add_up(there, reader, dead - moved, moved)
        if _can_list(there, reader):
            listed = await _list(link, stream, there, reader, dead - moved, moved)
            counted = msgspec.structs.replace(counted, messages=listed)
        return counted

    return inspect(address, look)


def count_arrivals(address: Address) -> SourceCounts:
    """List what the stream still has, done or not; the rest is only counted. Raises `ServerUnreachable`."""
    stream = stream_of(address)

    async def look(link: QueueLine) -> SourceCounts:
        there = await find_stream(link, stream)
        if there is None or there.state is None:
            return _nothing(address, stream)
        last = there.state.last_seq
        if not there.config.allow_direct:
            return SourceCounts(appended=last)
        listed = [each async for _, each in _read(link, stream, last)]
        gone = Forgotten(undated=max(last - len(listed), 0))
        is_kept = there.config.retention == "limits"  # then nothing leaves it because it is done
        return SourceCounts(
            appended=last, messages=Messages([], [], listed, gone, is_complete=not (is_kept and gone.total))
        )

    return inspect(address, look)


def read_backlog(address: Address) -> SourceBacklog:
    """Ask for numbers, and one message. Raises `ServerUnreachable`."""
    stream, consumer = stream_of(address), consumer_of(address)

    async def look(link: QueueLine) -> SourceBacklog:
        there = await find_stream(link, stream)
        if there is None or there.state is None:
            return SourceBacklog(waiting=0, in_flight=0, dead=0, oldest_age=0.0)
        reader = await find_consumer(link, stream, consumer)
        waiting = there.state.messages if reader is None else reader.num_pending
        in_flight = 0 if reader is None else reader.num_ack_pending
        records = JetStreamRecords(stream, consumer)
        dead = 0
        if reader is not None and await find_stream(link, records.stream) is not None:
            dead = len(await link.subjects(records.stream, records.letter(">")))
        age: float | None = 0.0
        if waiting or in_flight:
            page = []
            if there.config.allow_direct:
                done = 0 if reader is None else reader.ack_floor.stream_seq
                page = await link.page(stream, done, 1, largest=PAGE_BYTES)
            sent = [msgspec.convert((each.headers or {})["Nats-Time-Stamp"], datetime) for each in page]
            age = max(time.time() - sent[0].timestamp(), 0.0) if sent else None
        return SourceBacklog(waiting=waiting, in_flight=in_flight, dead=dead, oldest_age=age)

    return inspect(address, look)


def _nothing(address: Address, stream: str) -> SourceCounts:
    return SourceCounts(
        appended=0,
        done=0,
        pending=0,
        dead=0,
        moved=0,
        notes={"appended": f"nothing has been sent yet: there is no stream {stream}"},
        missing=f"there is no stream {stream!r}; check the source {str(address)!r}",
        messages=Messages([], [], []),
    )


def _unread(address: Address, consumer: str, there: StreamFound) -> SourceCounts:
    """Nobody has consumed under this name, or its consumer was deleted."""
    assert there.state is not None
    waiting = there.state.messages
    gone = there.state.last_seq - waiting
    why_gone = (
        f"{quantity(gone, 'message is', 'messages are')} no longer in the stream, removed by a limit or an operator, "
        f"and {consumer} has never fetched: it has missed them, unless it had another name then or was deleted"
    )
    return SourceCounts(
        appended=there.state.last_seq,
        done=0,
        pending=waiting,
        untouched=waiting,
        dead=0,
        moved=0,
        dropped={"removed from the stream before it was consumed": gone} if gone else {},
        notes={"pending": f"{consumer} has never fetched: all messages are pending"},
        unknown=(why_gone,) if gone else (),
        missing=f"the stream of {address.origin} has no consumer {consumer!r}; check ?consumer= of the source, or "
        "start its consumer once"
        if there.state.consumer_count
        else None,
    )


def _add_up(
    there: StreamFound, reader: ConsumerFound, dead: frozenset[int], moved: frozenset[int]
) -> SourceCounts:
    assert there.state is not None
    pending = reader.num_pending + reader.num_ack_pending
    config, notes = reader.config, {}
    unknown: tuple[str, ...] = ()
    appended: int | None = there.state.last_seq
    done: int | None = max(there.state.last_seq - pending - len(dead) - len(moved), 0)
    if config.filter_subject or config.filter_subjects:
        appended = done = None
        notes["appended"] = (
            "the consumer gets only some subjects of the stream, and JetStream does not count those"
        )
    elif config.deliver_policy != "all":
        appended = done = None
        notes["appended"] = "the consumer did not start with the first message of the stream"
    elif there.config.retention == "limits" and there.state.messages < there.state.last_seq:
        gone = there.state.last_seq - there.state.messages
        unknown = (
            f"{quantity(gone, 'message is', 'messages are')} no longer in the stream, removed by a limit or an "
            "operator; JetStream does not say whether this consumer had done them by then",
        )
    return SourceCounts(
        appended=appended,
        done=done,
        pending=pending,
        untouched=reader.num_pending,
        dead=len(dead),
        moved=len(moved),
        notes=notes,
        unknown=unknown,
    )


def _can_list(there: StreamFound, reader: ConsumerFound) -> bool:
    """Whether every message is there, and it is known which of them ended: nothing is in flight."""
    assert there.state is not None
    return (
        there.config.allow_direct
        and there.state.messages == there.state.last_seq
        and reader.num_ack_pending == 0
        and reader.config.deliver_policy == "all"
        and not reader.config.filter_subject
        and not reader.config.filter_subjects
    )


async def _list(
    link: QueueLine,
    stream: str,
    there: StreamFound,
    reader: ConsumerFound,
    dead: frozenset[int],
    moved: frozenset[int],
) -> Messages:
    assert there.state is not None
    found = Messages([], [], [])
    async for seq, each in _read(link, stream, there.state.last_seq):
        if seq > reader.delivered.stream_seq or seq in dead:
            like = found.others
        else:
            like = found.moved if seq in moved else found.done
        like.append(each)
    return found


async def _read(link: QueueLine, stream: str, last: int) -> AsyncIterator[tuple[int, Seen]]:
    """The messages that the stream has, up to a sequence."""
    seq = 0
    while seq < last:
        page = await link.page(stream, seq, PAGE, largest=PAGE_BYTES)
        if not page:
            return
        for message in page:
            headers = message.headers or {}
            seq = int(headers["Nats-Sequence"])
            if seq > last:
                return
            sent = msgspec.convert(headers["Nats-Time-Stamp"], datetime).timestamp()
            yield seq, seen_in(message.data, sent)


def _sequences(subjects: list[str]) -> frozenset[int]:
    return frozenset(int(each.rpartition(".")[2]) for each in subjects)
