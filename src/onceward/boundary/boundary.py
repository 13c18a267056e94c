"""The rules of a boundary, on top of any store. Independent of the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from onceward.boundary.canonical import content_digest
from onceward.boundary.capacity import Fill
from onceward.boundary.errors import (
    ArtifactMissing,
    ConflictingDuplicate,
    InvalidArgument,
    NotFound,
    OffsetOutOfRange,
)
from onceward.boundary.metrics import BoundaryMetrics
from onceward.boundary.model import (
    Appended,
    Envelope,
    Fact,
    Gap,
    ObjectRef,
    check_append,
    check_consumer,
    check_object_name,
    clamp_limit,
    stream_of,
)
from onceward.boundary.settings import BoundarySettings
from onceward.boundary.store import BoundaryStore, NewFact
from onceward.boundary.wire import Record, record

__all__ = ["Boundary", "BoundarySettings", "reference_in"]


class Boundary:
    """A durable log of facts with named cursors, and the objects that facts refer to."""

    def __init__(self, store: BoundaryStore, settings: BoundarySettings | None = None) -> None:
        self.store = store
        self.settings = settings or BoundarySettings()
        self.metrics = BoundaryMetrics()
        self.fill = Fill(store, self.settings, self.metrics)

    async def append(self, envelope: Envelope, fact: Fact, encoded: bytes | None = None) -> Appended:
        """Append a fact. Durable when this returns. Idempotent by message_id. `encoded` is the record, if known."""
        new = self._new_fact(envelope, fact, encoded)
        if self.settings.require_artifacts:
            await self._check_artifact(fact)
        if self.settings.capacity_bytes is not None:
            await self.fill.make_room()
        return await self.store.append(new)

    async def append_all(
        self, messages: Sequence[tuple[Envelope, Fact]]
    ) -> list[Appended | ConflictingDuplicate]:
        """Append all facts in this order. If one of them is malformed or lacks its artifact, none is appended."""
        new = [self._new_fact(*each) for each in messages]
        if self.settings.require_artifacts:
            for _, fact in messages:
                await self._check_artifact(fact)
        if self.settings.capacity_bytes is not None:
            await self.fill.make_room()
        return await self.store.append_all(new)

    def _new_fact(self, envelope: Envelope, fact: Fact, encoded: bytes | None = None) -> NewFact:
        check_append(envelope, fact)
        digest = content_digest(envelope, fact)
        return NewFact(envelope.message_id, digest, encoded or record(envelope, fact), stream_of(envelope))

    async def fetch(self, consumer_name: str, limit: int) -> tuple[list[Record], Gap | None]:
        """Return the next facts after the consumer's cursor, and the gap of those that expired before it."""
        check_consumer(consumer_name)
        limit = clamp_limit(limit)
        position = await self.store.position(consumer_name, create=not self.settings.strict_consumers)
        if position is None:
            raise NotFound(
                f"there is no consumer {consumer_name!r}, and this server does not register names on fetch; "
                "add it with the server's option --consumer, or to `consumers` in its configuration"
            )
        records = await self.store.read(position, limit)
        if not records:
            return records, _gap(position, (await self.store.bounds()).first)
        return _unbroken(records), _gap(position, records[0][0])

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

    async def put(self, bucket: str, key: str, chunks: AsyncIterator[bytes], media_type: str) -> ObjectRef:
        check_object_name(bucket, key)
        return await self.store.objects.put(bucket, key, chunks, media_type)

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        check_object_name(bucket, key)
        return await self.store.objects.get(bucket, key)

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


def _gap(position: int, first: int) -> Gap | None:
    return Gap(position + 1, first - 1) if first > position + 1 else None


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
