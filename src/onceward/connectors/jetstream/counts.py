"""What a stream and its consumer can count. JetStream does not say which messages are in flight, only how many."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

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
from onceward.connectors.reports import Messages, SourceCounts

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
    """Nobody has consumed under this name."""
    assert there.state is not None
    waiting = there.state.messages
    return SourceCounts(
        appended=there.state.last_seq,
        done=0,
        pending=waiting,
        untouched=waiting,
        dead=0,
        moved=0,
        dropped=_removed(there),
        notes={"pending": f"{consumer} has never fetched: all messages are pending"},
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
            f"{gone:,} messages are no longer in the stream: a limit or an operator removed them, and JetStream does "
            "not say whether they were done by then",
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


def _removed(there: StreamFound) -> dict[str, int]:
    assert there.state is not None
    gone = there.state.last_seq - there.state.messages
    return {"removed from the stream before it was consumed": gone} if gone else {}


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
    seq, last = 0, there.state.last_seq
    while seq < last:
        page = await link.page(stream, seq, PAGE, largest=PAGE_BYTES)
        if not page:
            break
        for message in page:
            headers = message.headers or {}
            seq = int(headers["Nats-Sequence"])
            if seq > last:
                break
            sent = msgspec.convert(headers["Nats-Time-Stamp"], datetime).timestamp()
            if seq > reader.delivered.stream_seq or seq in dead:
                like = found.others
            else:
                like = found.moved if seq in moved else found.done
            like.append(seen_in(message.data, sent))
    return found


def _sequences(subjects: list[str]) -> frozenset[int]:
    return frozenset(int(each.rpartition(".")[2]) for each in subjects)
