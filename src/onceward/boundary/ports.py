"""What a boundary needs of a store. `onceward.testing.boundary` has one suite for all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from onceward.boundary.model import Appended, ObjectRef
from onceward.boundary.wire import Record


class Bounds(msgspec.Struct, frozen=True):
    """The first retained and the last offset; an empty log has `first` one above `last`."""

    first: int
    last: int


class NewFact(msgspec.Struct, frozen=True):
    """A fact on its way into a log: checked, with the digest of its content."""

    message_id: str
    digest: bytes
    record: bytes


class FactLog(Protocol):
    """An append-only log. Offsets are gap-free and served in commit order: no fact ever appears below an offset that a
    reader has been given."""

    async def append(self, fact: NewFact) -> Appended:
        """Durable when this returns. A known id with the same digest answers its offset; with another raises
        `ConflictingDuplicate`."""
        ...

    async def read(self, after: int, limit: int) -> list[Record]:
        """Up to `limit` records above this offset, ascending; fewer if their bytes would be too many."""
        ...

    async def bounds(self) -> Bounds: ...


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

    async def advance(self, name: str, offset: int) -> int:
        """Never back. Returns where it stands. Durable when this returns."""
        ...

    async def cursors(self) -> list[Cursor]: ...


class Objects(Protocol):
    """Immutable objects by bucket and key."""

    async def put(self, bucket: str, key: str, chunks: AsyncIterator[bytes], media_type: str) -> ObjectRef:
        """Whole or not at all; durable when this returns. The same bytes again are fine, others raise
        `ObjectConflict`."""
        ...

    async def head(self, bucket: str, key: str) -> ObjectRef | None: ...
    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        """Raises `NotFound`."""
        ...


class Store(FactLog, Cursors, Protocol):
    """Both, of one place."""

    objects: Objects

    async def close(self) -> None: ...
