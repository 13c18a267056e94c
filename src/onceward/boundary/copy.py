"""Copies a boundary to another store: its objects, its facts in order with their ids and times, its cursors.

Nothing is removed from the source. Repeat a copy that was interrupted: facts already copied are recognized by their id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import msgspec

from onceward.boundary.canonical import content_digest
from onceward.boundary.errors import Backpressure, BoundaryError, ConflictingDuplicate
from onceward.boundary.model import LARGEST_PAGE, stream_of
from onceward.boundary.store import BoundaryStore, NewFact
from onceward.boundary.wire import Record, stored


class CopyError(BoundaryError):
    """The target is not empty, and not an unfinished copy of this source."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    facts: int
    objects: int
    cursors: int
    same_offsets: bool
    """Whether every fact kept its offset."""


Progress = Callable[[str, int], object]
"""Called with "facts" or "objects", and how many more were copied."""


async def copy(
    source: BoundaryStore, target: BoundaryStore, progress: Progress = lambda what, count: None
) -> Copied:
    """Copy everything. Raise `CopyError` if the target has other facts."""
    objects = await _copy_objects(source, target, progress)
    cursors = await source.cursors()
    passed = dict.fromkeys((cursor.name for cursor in cursors), 0)
    facts, position, same_offsets = 0, 0, True
    while records := await source.read(position, LARGEST_PAGE):
        await _copy_facts(records, target, facts)
        offsets = [record[0] for record in records]
        for cursor in cursors:
            if count := bisect_right(offsets, cursor.offset):
                passed[cursor.name] = facts + count
        facts += len(records)
        position = offsets[-1]
        same_offsets = same_offsets and position == facts
        progress("facts", len(records))
    for cursor in cursors:
        if cursor.confirmed_at_unix_ms is None:
            await target.position(cursor.name, create=True)
        else:
            await target.advance(cursor.name, passed[cursor.name], cursor.confirmed_at_unix_ms)
    return Copied(facts=facts, objects=objects, cursors=len(cursors), same_offsets=same_offsets)


async def _copy_objects(source: BoundaryStore, target: BoundaryStore, progress: Progress) -> int:
    count = 0
    async for ref in source.objects.refs():
        if await target.objects.head(ref.bucket, ref.key) is None:
            _, chunks = await source.objects.get(ref.bucket, ref.key)
            await target.objects.put(ref.bucket, ref.key, chunks, ref.media_type)
        count += 1
        progress("objects", 1)
    return count


async def _copy_facts(records: list[Record], target: BoundaryStore, before: int) -> None:
    """Append the facts with no others between them: a cursor in the target would pass those unseen."""
    new = [_new_fact(record) for record in records]
    for expected, (fact, outcome) in enumerate(
        zip(new, await target.append_all(new), strict=True), before + 1
    ):
        if isinstance(outcome, Backpressure):
            raise outcome
        if isinstance(outcome, ConflictingDuplicate):
            raise CopyError(f"the target has a different fact with this id: {outcome}")
        if outcome.offset != expected:
            raise CopyError(
                f"the target is not empty: {fact.message_id!r} has offset {outcome.offset} there, not {expected}; copy "
                "into an empty store, or into one with an interrupted copy of the same source"
            )


def _new_fact(record: Record) -> NewFact:
    fact = stored(record)
    digest = content_digest(fact.envelope, fact.fact)
    return NewFact(fact.message_id, digest, record[1], stream_of(fact.envelope), fact.appended_at_unix_ms)
