"""The rules of a boundary, on top of any store. Independent of the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from math import inf
from typing import Any, NamedTuple, cast

from onceward._process.bell import Bell
from onceward._time import WatchedClock
from onceward.boundary.canonical import content_digest
from onceward.boundary.capacity import Fill
from onceward.boundary.errors import (
    Aborted,
    ArtifactMissing,
    Backpressure,
    BoundaryError,
    ConflictingDuplicate,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
    Unavailable,
    holds_up,
)
from onceward.boundary.holes import missed
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.model import (
    Appended,
    Envelope,
    Fact,
    Gap,
    ObjectRef,
    check_append,
    check_consumer,
    check_labels,
    check_media_type,
    check_object_name,
    clamp_bytes,
    clamp_limit,
    stream_of,
)
from onceward.boundary.settings import BoundarySettings
from onceward.boundary.store import BoundaryStore, NewFact, ObjectQuota
from onceward.boundary.wire import AROUND_PAGE, Record, record

LOOK_EVERY = 1.0
"""Seconds between two looks at where the log begins, and of a fetch that waits for facts of other servers."""
LONGEST_WAIT = 20.0
"""Seconds that a fetch waits for a fact."""

__all__ = ["Boundary", "BoundarySettings", "reference_in"]

LARGEST_TOLERANCE = 1800.0
"""Seconds by which a clock may be corrected while a server runs, without asking anybody. An hour may be a wrong time
zone."""


def tolerance_of(retention: float) -> float:
    """How many seconds of the retention a wrong clock may cost."""
    return min(LARGEST_TOLERANCE, max(60.0, retention / 20))


class Boundary:
    """A durable log of facts with named cursors, and the objects that facts refer to."""

    def __init__(self, store: BoundaryStore, settings: BoundarySettings | None = None) -> None:
        self.store = store
        self.settings = settings or BoundarySettings()
        self.metrics = BoundaryMetrics()
        self._bell = Bell()
        self._is_ending = False
        self.expiry_halted = ""
        """Why no fact expires now, as `Retention` last found."""
        self.fill = Fill(store, self.settings, self.metrics)
        self._begins_at = 0
        self._looked_at = -inf
        self.clock = WatchedClock(tolerance=tolerance_of(self.settings.shortest_retention))

    async def append(self, envelope: Envelope, fact: Fact, encoded: bytes | None = None) -> Appended:
        """Append a fact. Durable when this returns. Idempotent by message_id. `encoded` is the record, if known."""
        new = self.new_fact(envelope, fact, encoded)
        if self.settings.require_artifacts:
            await self._check_artifact(fact)
        try:
            return await self._append(new)
        finally:
            self._bell.ring()

    async def _append(self, new: NewFact) -> Appended:
        try:
            return await self.store.append(new)
        except Backpressure:
            if problem := self.fill.problem(new):
                raise problem from None
            if not self.fill.may_drop:
                raise
        [appended] = await self.fill.append_dropping([new])
        if isinstance(appended, BoundaryError):
            raise appended
        return appended

    async def append_all(
        self, messages: Sequence[tuple[Envelope, Fact]]
    ) -> list[Appended | ConflictingDuplicate]:
        """Append all facts in this order. If one of them is malformed or lacks its artifact, none is appended. If not
        all of them fit, those that were appended are the first ones."""
        new = [self.new_fact(*each) for each in messages]
        for problem in await self.find_missing([fact for _, fact in messages]):
            if problem is not None:
                raise problem
        outcomes: list[Appended | ConflictingDuplicate] = []
        for outcome in await self.append_each(new, in_order=True):
            if isinstance(outcome, BoundaryError) and not isinstance(outcome, ConflictingDuplicate):
                raise outcome
            outcomes.append(outcome)
        return outcomes

    async def append_each(
        self, facts: Sequence[NewFact], *, in_order: bool = False
    ) -> list[Appended | BoundaryError]:
        """Append in this order. The outcome of each is what `append` would return or raise, and affects no other; with
        `in_order` nothing new is appended behind one that is refused, unless that is a conflict."""
        outcomes: list[Appended | BoundaryError] = []
        try:
            for portion in self.fill.portions(facts):
                if in_order and any(map(holds_up, outcomes)):
                    outcomes += [Aborted(fact.message_id) for fact in portion]
                else:
                    outcomes += await self._append_portion(portion, in_order)
        finally:
            self._bell.ring()
        return outcomes

    async def _append_portion(
        self, facts: Sequence[NewFact], in_order: bool
    ) -> Sequence[Appended | BoundaryError]:
        try:
            outcomes = await self.store.append_all(facts)
        except InvalidArgument:  # one is too large for this store
            return await self._append_in_turn(facts, in_order)
        if not any(isinstance(each, Backpressure) for each in outcomes):
            return outcomes
        if problem := self.fill.problem(facts[0]):  # then it is the only one
            return [problem]
        return await self.fill.append_dropping(facts) if self.fill.may_drop else outcomes

    async def _append_in_turn(
        self, facts: Sequence[NewFact], in_order: bool
    ) -> list[Appended | BoundaryError]:
        outcomes: list[Appended | BoundaryError] = []
        for fact in facts:
            if in_order and any(map(holds_up, outcomes)):
                outcomes.append(Aborted(fact.message_id))
                continue
            try:
                outcomes.append(await self._append(fact))
            except BoundaryError as error:
                outcomes.append(error)
        return outcomes

    async def find_missing(self, facts: Sequence[Fact]) -> Sequence[BoundaryError | None]:
        """Why each may not be appended because of the artifact that it refers to; None if it may."""
        if not self.settings.require_artifacts:
            return [None] * len(facts)
        found = await asyncio.gather(*map(self._check_artifact, facts), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, BoundaryError):
                raise each
        return cast(list[BoundaryError | None], found)

    def new_fact(self, envelope: Envelope, fact: Fact, encoded: bytes | None = None) -> NewFact:
        """Check a fact. Raise `InvalidArgument`, which names the field, if it is malformed."""
        check_append(envelope, fact)
        check_labels(envelope, self.settings.max_labels)
        encoded = encoded or record(envelope, fact)
        return NewFact(
            envelope.message_id,
            content_digest(envelope, fact),
            encoded,
            stream_of(envelope),
            # A fact with the time of a wrong clock would expire too early, once the clock is right again.
            appended_at=int(self.clock.now() * 1000) if self.clock.jump() else None,
            within=self.fill.limit,
        )

    async def fetch(
        self, consumer_name: str, limit: int, max_bytes: int = 0, ahead: Ahead | None = None
    ) -> tuple[list[Record], Gap | None]:
        """Return the next facts after the consumer's cursor, and the gap of those before them that it has missed: they
        expired after it was registered. The facts fit into a message of `max_bytes`, by default `PAGE_BYTES`, unless
        the first one alone is larger. `ahead` is what was read behind a cursor that a confirmation has just moved."""
        check_consumer(consumer_name)
        size = _page_size(limit, max_bytes)  # raises
        if ahead is not None:
            return await self._page(consumer_name, *ahead)
        position = await self.store.position(consumer_name, create=False)
        if position is None and not self.settings.strict_consumers:
            position = await self.register(consumer_name, most=self.settings.max_consumers)
        if position is None:
            raise NotFound(
                f"there is no consumer {consumer_name!r}, and this server does not register names on fetch; "
                "add it with the server's option --consumer, or to `consumers` in its configuration"
            )
        return await self._page(consumer_name, position, await self.store.read(position, *size))

    async def _page(
        self, consumer_name: str, position: int, records: list[Record]
    ) -> tuple[list[Record], Gap | None]:
        first = records[0][0] if records else (await self.store.bounds()).first
        return _unbroken(records) if records else records, await self._missed(consumer_name, position, first)

    async def read_ahead(self, after: int, limit: int, max_bytes: int) -> Ahead | None:
        """Read what a fetch would return if the cursor were at this offset, while a confirmation moves it there: the
        disk takes longer for that. Nobody may see it before the cursor is there. None if it cannot be read."""
        if after < 0:
            return None
        for _ in range(2):
            await asyncio.sleep(0)  # the confirmation goes first
        try:
            return Ahead(after, await self.store.read(after, *_page_size(limit, max_bytes)))
        except BoundaryError:  # the fetch says what is wrong
            return None

    async def _missed(self, consumer_name: str, position: int, first: int) -> Gap | None:
        """The gap between a cursor and the first fact after it, without what was gone before the consumer was there."""
        if first <= position + 1:
            return None
        gap = Gap(position + 1, first - 1)
        return missed(gap, await self.store.holes(consumer_name, gap))

    async def await_facts(self, consumer_name: str, after: int, seconds: float) -> None:
        """Wait until there is a fact beyond `after` and the consumer's cursor, or that long."""
        until = time.monotonic() + min(seconds, LONGEST_WAIT)
        while not self._is_ending and (left := until - time.monotonic()) > 0:
            with self._bell.heard_async() as ear:
                position = await self.store.position(consumer_name, create=False)
                if position is None or (await self.store.bounds()).last > max(position, after):
                    return
                await ear.wait(min(left, LOOK_EVERY))

    def end_waits(self) -> None:
        """End all current and future waits for facts: the server stops."""
        self._is_ending = True
        self._bell.ring()

    async def log_begins_at(self) -> int:
        """No fact below this offset is in the log any more. It never moves back, so an earlier answer stays true, and
        the store is asked only occasionally."""
        now = time.monotonic()
        if now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._begins_at = (await self.store.bounds()).first
        return self._begins_at

    async def register(self, consumer_name: str, *, most: int | None = None) -> int:
        """Create the consumer unless it exists, at the first fact that is still here: it has missed none before it.
        Return its position. Raises `QuotaExceeded` if there would be more than `most` names."""
        check_consumer(consumer_name)
        start = (await self.store.bounds()).first - 1
        position = await self.store.position(consumer_name, create=True, start=start, most=most)
        assert position is not None
        return position

    async def confirm(self, consumer_name: str, offset: int) -> int:
        """Confirm everything up to this offset. Never moves back. Return the cursor's position."""
        check_consumer(consumer_name)
        if offset < 0:
            raise InvalidArgument("offset", f"must be 0 or more, not {offset}")
        position = await self.store.position(consumer_name, create=False)
        if position is None:
            raise NotFound(f"there is no consumer {consumer_name!r}; it has never fetched")
        if offset <= position:
            return position
        last = (await self.store.bounds()).last
        if offset > last:
            raise OffsetOutOfRange(f"offset {offset} cannot be confirmed: the last fact is {last}")
        return await self.store.advance(consumer_name, offset)

    async def remove_consumer(self, name: str) -> int:
        """Forget a consumer. Return where its cursor was."""
        check_consumer(name)
        position = await self.store.remove(name)
        if position is None:
            raise NotFound(f"there is no consumer {name!r}")
        self.metrics.forget_consumer(name)
        return position

    async def put(self, bucket: str, key: str, chunks: AsyncIterator[bytes], media_type: str) -> ObjectRef:
        check_object_name(bucket, key)
        check_media_type(media_type)
        quota = ObjectQuota(self.settings.max_objects, self.settings.max_object_bytes)
        return await self.store.objects.put(bucket, key, chunks, media_type, quota)

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        check_object_name(bucket, key)
        ref, chunks = await self.store.objects.get(bucket, key)
        return ref, _whole(ref, chunks)

    async def _check_artifact(self, fact: Fact) -> None:
        named = reference_in(fact)
        if named is None:
            return
        try:
            check_object_name(*named)
        except InvalidArgument as error:
            raise InvalidArgument("fact.object_json", f"does not name an object: {error}") from None
        found = await self.store.objects.head(*named)
        if found is None:
            raise ArtifactMissing(
                f"object {named[0]}/{named[1]} does not exist here; put it before the fact that refers to it"
            )
        digest = fact.object.get("digest")
        if digest is not None and digest != found.digest:
            raise InvalidArgument(
                "fact.object_json",
                f"names {named[0]}/{named[1]} with the digest {digest!r:.80}, but that object has {found.digest}",
            )


class Ahead(NamedTuple):
    """Facts that were read before the cursor was at this offset."""

    after: int
    records: list[Record]


def _page_size(limit: int, max_bytes: int) -> tuple[int, int]:
    """How many facts, and bytes, a page may have."""
    return clamp_limit(limit), max(clamp_bytes(max_bytes) - AROUND_PAGE, 1)


def _unbroken(records: list[Record]) -> list[Record]:
    """Return the records up to the first hole left by expiry. The next page reports it, so no gap is missed."""
    first = records[0][0]
    if records[-1][0] - first == len(records) - 1:
        return records
    return [record for number, record in enumerate(records, first) if record[0] == number]


def reference_in(fact: Fact) -> tuple[str, str] | None:
    """Return bucket and key, if the fact's object is a reference to an artifact."""
    value: Any = fact.object
    if isinstance(value, dict) and isinstance(value.get("bucket"), str) and isinstance(value.get("key"), str):
        return value["bucket"], value["key"]
    return None


async def _whole(ref: ObjectRef, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield all of an object. Raise `Unavailable` if the store has lost a part of it."""
    size = 0
    async for chunk in chunks:
        size += len(chunk)
        yield chunk
    if size != ref.size:
        raise Unavailable(
            f"object {ref.bucket}/{ref.key} is damaged: {size:,} of its {ref.size:,} bytes are in the store"
        )
