"""What a boundary needs of a store. `onceward.testing.boundary` has one suite for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

import msgspec

from onceward.boundary.errors import ConflictingDuplicate
from onceward.boundary.model import Appended, ObjectRef
from onceward.boundary.wire import Record


class Bounds(msgspec.Struct, frozen=True):
    """The first retained and the last offset; an empty log has `first` one above `last`."""

    first: int
    last: int


class NewFact(msgspec.Struct, frozen=True, gc=False):
    """A fact on its way into a log: checked, with the digest of its content."""

    message_id: str
    digest: bytes
    record: bytes
    stream: str = "operational"
    """The class by which it is retained."""
    appended_at: int | None = None
    """Milliseconds since 1970, for one that was appended elsewhere before; None is now."""


class FactLog(Protocol):
    """An append-only log. Offsets begin at 1, leave none out, and are served in commit order: no fact ever appears
    below an offset that a reader has been given. What has expired leaves a hole, and its offset is not used again."""

    async def append(self, fact: NewFact) -> Appended:
        """Durable when this returns. A known id with the same digest answers its offset; with another raises
        `ConflictingDuplicate`. Many at once share what makes them durable. Raises `Unavailable` if it cannot be
        written now; nothing is half written then."""
        ...

    async def append_all(self, facts: Sequence[NewFact]) -> list[Appended | ConflictingDuplicate]:
        """Each as `append` would, and the new ones get offsets in this order. Raises `Unavailable` if not all could be
        written; what was written then are the first ones."""
        ...

    async def read(self, after: int, limit: int) -> list[Record]:
        """Up to `limit` records above this offset, ascending; fewer if their bytes would be too many, but one at
        least if there is one."""
        ...

    async def bounds(self) -> Bounds: ...

    async def size(self) -> int:
        """Bytes that the facts take."""
        ...

    async def expire(self, older_than: Mapping[str, int]) -> int:
        """Remove the facts of each class that were appended before this time (milliseconds since 1970). Their ids
        count as new from then on. Returns how many."""
        ...

    async def drop(self, through: int) -> int:
        """Remove all facts up to this offset. Returns how many."""
        ...


class Cursor(msgspec.Struct, frozen=True):
    name: str
    offset: int
    """Confirmed; 0 before the first confirm."""
    confirmed_at_unix_ms: int | None = None


class Cursors(Protocol):
    """How far each named consumer has come. Durable."""

    async def position(self, name: str, *, create: bool) -> int | None:
        """The confirmed offset; None for a name that is not known, which `create` makes known."""
        ...

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        """Never back. Returns where it stands. Durable when this returns. Makes the name known. `at` is in milliseconds
        since 1970, for what was confirmed elsewhere before; None is now."""
        ...

    async def cursors(self) -> list[Cursor]:
        """All of them, by name."""
        ...


class Objects(Protocol):
    """Immutable objects by bucket and key. Keys are any text: none leads out of the place where objects are."""

    async def put(self, bucket: str, key: str, chunks: AsyncIterator[bytes], media_type: str) -> ObjectRef:
        """Whole or not at all; durable when this returns. The same bytes again are fine, others raise
        `ObjectConflict`. Never holds more than a few chunks in memory."""
        ...

    async def head(self, bucket: str, key: str) -> ObjectRef | None: ...

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        """Raises `NotFound`. Never holds more than a few chunks in memory."""
        ...

    def refs(self) -> AsyncIterator[ObjectRef]:
        """All objects, in no particular order."""
        ...


class BoundaryStore(FactLog, Cursors, Protocol):
    """All of one place."""

    @property
    def objects(self) -> Objects: ...

    async def close(self) -> None:
        """Idempotent. Whoever still waits is answered first."""
        ...
