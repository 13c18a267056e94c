"""The store on NATS JetStream: many servers, on many machines, on one stream.

A fact's subject is derived from its message_id, and the fact is published on the condition that its subject has no
message. That is JetStream's own put-if-absent: the leader decides, it holds as long as the fact exists, and a refused
message takes no sequence. So the sequence is the offset. The duplicate window, which forgets ids after two minutes,
plays no part: no `Nats-Msg-Id` is sent.

Durable means that JetStream has acknowledged: the fact is in the server's file or, with replicas, in the files of most
of them. A server process that dies (kill -9) loses nothing. A machine that crashes or loses power can lose what was
acknowledged: a NATS server calls fsync every two minutes, unless its configuration says
`jetstream { sync_interval: always }`. Set this, though it costs speed. Three replicas keep working when one server is
gone; without that setting they do not protect against crashing machines (nats-server issue 7564).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count

from onceward._nats.answers import KeptMessage
from onceward._nats.connection import Message, token
from onceward._nats.durability import MONITORING
from onceward._time import Moment
from onceward.boundary.errors import Backpressure, ConflictingDuplicate, InvalidArgument, Unavailable
from onceward.boundary.holes import Hole, holes_of
from onceward.boundary.model import PAGE_BYTES, Appended, Gap
from onceward.boundary.store import Bounds, Cursor, NewFact, Outcome, StoreDurability
from onceward.boundary.stores.jetstream.connection import JetStreamConnection
from onceward.boundary.stores.jetstream.cursors import JetStreamClock, JetStreamCursors
from onceward.boundary.stores.jetstream.durability import durability_of
from onceward.boundary.stores.jetstream.expiry import APPENDED_AT, CLASS, LARGEST_PAGE_BYTES, Expiry
from onceward.boundary.stores.jetstream.objects import JetStreamObjects
from onceward.boundary.wire import AROUND_RECORD, Record
from onceward.errors import ConfigurationError

HEADERS_ROOM = 1024
"""Bytes of a message reserved for headers."""
MOST_AT_ONCE = 1000
"""Messages in one batch: JetStream's limit."""
MOST_DELETED = 50_000
"""Offsets of removed facts that JetStream is asked for: they come in one message."""
MOST_HOLES = 500
"""Holes that are kept beside a cursor, and written with each confirm. Later ones are reported as gaps."""
DIGEST = "Onceward-Digest"
ASK_AGAIN_AFTER = 60.0
"""Seconds for which an answer about durability holds."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class JetStreamBoundaryStore:
    """A `BoundaryStore`. Its streams and subjects begin with `name`: each boundary on one NATS needs its own."""

    def __init__(self, link: JetStreamConnection, name: str, monitoring: int = MONITORING) -> None:
        self._link = link
        self._stream = f"{name}-facts"
        self._subject = f"{name}.facts."
        self._replicas = 1
        self._within: int | None = None
        self._limiting = asyncio.Lock()
        self._monitoring = monitoring
        self._durability: StoreDurability | None = None
        self._durable_until = 0.0
        self._cursors = JetStreamCursors(link, f"{name}-cursors", self._holes_now)
        self._clock = JetStreamClock(link, f"{name}-clock")
        self.objects = JetStreamObjects(link, f"{name}-objects")
        self._expiry = Expiry(link, self._stream)
        self._tidying: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, url: str, *, name: str = "onceward", replicas: int = 1, monitoring: int = MONITORING
    ) -> JetStreamBoundaryStore:
        """`url` is nats://host:port, or several separated by commas. Create missing streams, with this many replicas;
        existing ones stay as they are. `monitoring` is the port of the servers' monitoring. Raise `Unavailable` if NATS
        does not answer."""
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"name must be 1 to 64 characters of A-Z, a-z, 0-9, dash and underscore, not {name!r}"
            )
        if replicas not in (1, 3, 5):
            raise ConfigurationError(f"replicas must be 1, 3 or 5, not {replicas}")
        link = await JetStreamConnection.connect(url)
        try:
            store = cls(link, name, monitoring)
            await store._prepare(replicas)
        except BaseException:
            await link.close()
            raise
        store._tidying = asyncio.create_task(store._tidy())
        return store

    async def _prepare(self, replicas: int) -> None:
        facts = {
            "subjects": [f"{self._subject}*"],
            "storage": "file",
            "num_replicas": replicas,
            "discard": "new",  # if an operator sets a limit, a full stream refuses new facts instead of losing old ones
            "allow_direct": True,
            "allow_atomic": True,
        }
        self._replicas = await self._link.stream(self._stream, facts)
        await self._cursors.prepare(replicas)
        await self._clock.prepare(replicas)
        await self.objects.prepare(replicas)

    async def _tidy(self) -> None:
        with suppress(Unavailable):  # the next `open` will do it
            await self.objects.remove_left_overs()

    # ── facts ───────────────────────────────────────────────────────────────────────────────────────────

    async def append(self, fact: NewFact) -> Appended:
        await self._limit(fact.within)
        there = await self._link.put_if_absent(self._stream, *self._message(fact))
        if isinstance(there, int):
            return Appended(there)
        known = _duplicate(fact, there)
        if isinstance(known, ConflictingDuplicate):
            raise known
        return known

    async def append_all(self, facts: Sequence[NewFact]) -> list[Outcome]:
        """Append in batches, each of which is atomic."""
        for fact in facts:
            self._check_size(fact)
        outcomes: list[Outcome] = []
        for batch in _batches(facts):
            refused = next((each for each in outcomes if isinstance(each, Backpressure)), None)
            outcomes += await (self._append_batch(batch) if refused is None else self._find(batch, refused))
        return outcomes

    async def _append_batch(self, facts: Sequence[NewFact]) -> list[Outcome]:
        if len(facts) == 1:  # JetStream takes only a few batches at a time
            return await self._append_in_turn(facts)
        await self._limit(facts[0].within)
        messages = [self._message(fact) for fact in facts]
        try:
            first = await self._link.put_all_if_absent(messages)
        except Backpressure:  # some may fit, and some may be there
            return await self._append_in_turn(facts)
        if first is not None:
            return [Appended(offset) for offset in range(first, first + len(facts))]
        there = await asyncio.gather(*(self._link.last(self._stream, message[0]) for message in messages))
        new = [message for message, known in zip(messages, there, strict=True) if known is None]
        try:
            first = await self._link.put_all_if_absent(new) if new else 0
        except Backpressure:
            first = None
        if first is None:  # another server is appending the same facts, or not all fit
            return await self._append_in_turn(facts)
        offsets = count(first)
        return [
            Appended(next(offsets)) if known is None else _duplicate(fact, known)
            for fact, known in zip(facts, there, strict=True)
        ]

    async def _append_in_turn(self, facts: Sequence[NewFact]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for at, fact in enumerate(facts):
            try:
                outcomes.append(await self.append(fact))
            except ConflictingDuplicate as conflict:
                outcomes.append(conflict)
            except Backpressure as refused:
                return [*outcomes, *await self._find(facts[at:], refused)]
        return outcomes

    async def _find(self, facts: Sequence[NewFact], refused: Backpressure) -> list[Outcome]:
        """Append none of these: one before them had no room. Those that are there have their offsets."""
        there = await asyncio.gather(
            *(self._link.last(self._stream, self._subject_of(fact)) for fact in facts)
        )
        return [
            refused if known is None else _duplicate(fact, known)
            for fact, known in zip(facts, there, strict=True)
        ]

    async def _limit(self, within: int | None) -> None:
        """Once: JetStream itself then counts the bytes of all servers."""
        if within is not None and within != self._within:
            async with self._limiting:
                if within != self._within:
                    await self._link.limit(self._stream, within)
                    self._within = within

    def _check_size(self, fact: NewFact) -> None:
        if len(fact.record) + HEADERS_ROOM > self._link.largest_message:
            raise InvalidArgument(
                "fact.object_json",
                f"makes a message of {len(fact.record)} bytes, but this NATS accepts {self._link.largest_message}; "
                "raise max_payload in its configuration, or put it into an object and refer to that",
            )

    def _message(self, fact: NewFact) -> Message:
        self._check_size(fact)
        appended_at = time.time_ns() // 1_000_000 if fact.appended_at is None else fact.appended_at
        headers = {DIGEST: fact.digest.hex(), CLASS: fact.stream, APPENDED_AT: str(appended_at)}
        return self._subject_of(fact), fact.record, headers

    def _subject_of(self, fact: NewFact) -> str:
        return self._subject + token(fact.message_id)

    async def read(self, after: int, limit: int, largest: int = PAGE_BYTES) -> list[Record]:
        records: list[Record] = []
        size = 0
        for message in await self._link.page(self._stream, after, limit, largest=largest):
            size += len(message.data) + AROUND_RECORD
            if records and size > largest:
                break
            headers = message.headers or {}
            records.append((int(headers["Nats-Sequence"]), message.data, int(headers[APPENDED_AT])))
        if not records and self._replicas > 1:
            # That replica may be behind. Only the leader knows that there is nothing more, which ends a copy.
            found = await self._link.next(self._stream, after)
            if found is not None:
                records.append((found.seq, found.data, int(found.headers[APPENDED_AT])))
        return records

    async def times_after(self, offsets: Sequence[int]) -> list[int | None]:
        pages = await asyncio.gather(*(self.read(offset, 1) for offset in offsets))
        return [page[0][2] if page else None for page in pages]

    async def bounds(self) -> Bounds:
        state = await self._link.info(self._stream)
        return Bounds(state.first_seq if state.messages else state.last_seq + 1, state.last_seq)

    async def size(self) -> int:
        return (await self._link.info(self._stream)).bytes

    async def expire(self, older_than: Mapping[str, int], at_most: int | None = None) -> int:
        return await self._expiry.run(older_than, await self.bounds(), at_most)

    async def drop(self, through: int) -> int:
        bounds = await self.bounds()
        through = min(through, bounds.last)  # a purge beyond it would skip offsets
        if through < bounds.first:
            return 0
        return await self._link.purge(self._stream, seq=through + 1)

    # ── cursors ─────────────────────────────────────────────────────────────────────────────────────────

    async def position(
        self, name: str, *, create: bool, start: int = 0, most: int | None = None
    ) -> int | None:
        return await self._cursors.position(name, create=create, start=start, most=most)

    async def holes(self, name: str, gap: Gap) -> list[Hole]:
        return await self._cursors.holes(name)

    async def _holes_now(self) -> list[Hole]:
        """The first holes in the log; a name that is registered now keeps them beside its cursor."""
        if not 0 < (await self._link.info(self._stream)).num_deleted <= MOST_DELETED:
            return []
        state = await self._link.info(self._stream, deleted_details=True)
        return holes_of(state.deleted or ())[:MOST_HOLES]

    async def remove(self, name: str) -> int | None:
        return await self._cursors.remove(name)

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        return await self._cursors.advance(name, offset, at)

    async def cursors(self) -> list[Cursor]:
        return await self._cursors.all()

    async def durability(self) -> StoreDurability:
        """Cached: it asks other ports, which may not answer."""
        if self._durability is None or time.monotonic() > self._durable_until:
            self._durability = await durability_of(self._link.servers, self._monitoring)
            self._durable_until = time.monotonic() + ASK_AGAIN_AFTER
        return self._durability

    # ── the clock ───────────────────────────────────────────────────────────────────────────────────────

    async def trusted_time(self) -> Moment | None:
        return await self._clock.read()

    async def trust_time(self, moment: Moment) -> None:
        await self._clock.write(moment)

    async def close(self) -> None:
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait({self._tidying})
        await self._link.close()


def _duplicate(fact: NewFact, there: KeptMessage) -> Appended | ConflictingDuplicate:
    if there.headers[DIGEST] == fact.digest.hex():
        return Appended(there.seq, duplicate=True)
    return ConflictingDuplicate(fact.message_id, there.seq)


def _batches(facts: Sequence[NewFact]) -> Iterator[list[NewFact]]:
    """Split in order; no batch has an id twice, or is larger than JetStream accepts."""
    batch: dict[str, NewFact] = {}
    size = 0
    for fact in facts:
        size += len(fact.record)
        if batch and (fact.message_id in batch or len(batch) == MOST_AT_ONCE or size > LARGEST_PAGE_BYTES):
            yield list(batch.values())
            batch, size = {}, len(fact.record)
        batch[fact.message_id] = fact
    if batch:
        yield list(batch.values())
