"""The interface of a boundary's store. `onceward.testing.boundary` has a test suite for all implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from onceward.boundary.errors import ConflictingDuplicate
from onceward.boundary.model import Appended, ObjectRef
from onceward.boundary.wire import Record


class Bounds(msgspec.Struct, frozen=True):
    """The first retained and the last offset. In an empty log `first` is `last + 1`."""

    first: int
    last: int


class NewFact(msgspec.Struct, frozen=True, gc=False):
    """A checked fact to be appended, with the digest of its content."""

    message_id: str
    digest: bytes
    record: bytes
    stream: str = "operational"
    """Its retention class."""
    appended_at: int | None = None
    """Milliseconds since 1970, for a fact that was first appended elsewhere; None is now."""


class FactLog(Protocol):
    """An append-only log. Offsets begin at 1, without gaps, and are served in commit order: no fact ever appears below
    an offset that a reader has seen. An expired fact leaves a hole; its offset is not reused."""

    async def append(self, fact: NewFact) -> Appended:
        """Append a fact. Durable when this returns. Concurrent calls share the cost of that.

        For an existing id with the same digest, return its offset; with another, raise `ConflictingDuplicate`. Raise
        `Unavailable`, with nothing half written, if the fact cannot be written now.
        """
        ...

    async def append_all(self, facts: Sequence[NewFact]) -> list[Appended | ConflictingDuplicate]:
        """Append each as `append` would; new ones get offsets in this order. Raise `Unavailable` if not all could be
        written; those that were are the first ones."""
        ...

    async def read(self, after: int, limit: int) -> list[Record]:
        """Return up to `limit` records above this offset, ascending; fewer if they would be too large together, but at
        least one if there is one."""
        ...

    async def bounds(self) -> Bounds: ...

    async def size(self) -> int:
        """Return how many bytes the facts take."""
        ...

    async def expire(self, older_than: Mapping[str, int]) -> int:
        """Remove the facts of each class that were appended before its time (milliseconds since 1970). Their ids count
        as new from then on. Return how many were removed."""
        ...

    async def drop(self, through: int) -> int:
        """Remove all facts up to this offset. Return how many."""
        ...


class Cursor(msgspec.Struct, frozen=True):
    name: str
    offset: int
    """Confirmed; 0 before the first confirm."""
    confirmed_at_unix_ms: int | None = None


class Cursors(Protocol):
    """The position of each named consumer. Durable."""

    async def position(self, name: str, *, create: bool) -> int | None:
        """Return the confirmed offset, or None for an unknown name. `create` registers the name instead."""
        ...

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        """Move the cursor forward, never back, and register the name. Return its position. Durable when this returns.

        `at` is in milliseconds since 1970, for offsets that were first confirmed elsewhere; None is now.
        """
        ...

    async def cursors(self) -> list[Cursor]:
        """Return all cursors, sorted by name."""
        ...


class Objects(Protocol):
    """Immutable objects by bucket and key. A key is any text, and cannot lead outside the store."""

    async def put(self, bucket: str, key: str, chunks: AsyncIterator[bytes], media_type: str) -> ObjectRef:
        """Store an object, completely or not at all. Durable when this returns. The same bytes again are fine; others
        raise `ObjectConflict`. Never holds more than a few chunks in memory."""
        ...

    async def head(self, bucket: str, key: str) -> ObjectRef | None: ...

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        """Return an object and its bytes. Raise `NotFound`. Never holds more than a few chunks in memory."""
        ...

    def refs(self) -> AsyncIterator[ObjectRef]:
        """Yield all objects, in no particular order."""
        ...


class BoundaryStore(FactLog, Cursors, Protocol):
    """Facts, cursors and objects in one store."""

    @property
    def objects(self) -> Objects: ...

    async def close(self) -> None:
        """Answer pending calls, then close. Idempotent."""
        ...
