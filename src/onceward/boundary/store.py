"""The interface of a boundary's store. `onceward.testing.boundary` has a test suite for all implementations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from onceward._time import Moment
from onceward.boundary.errors import Backpressure, ConflictingDuplicate, QuotaExceeded
from onceward.boundary.holes import Hole
from onceward.boundary.model import PAGE_BYTES, Appended, Gap, ObjectRef
from onceward.boundary.wire import Record

Outcome = Appended | ConflictingDuplicate | Backpressure
"""What became of one of several facts."""


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
    within: int | None = None
    """Bytes that all facts may take together with this one. Otherwise it is refused with `Backpressure`, unless it is
    in the log already. None sets no limit; on JetStream the last one that was set stays."""


class FactLog(Protocol):
    """An append-only log. Offsets begin at 1, without gaps, and are served in commit order: no fact ever appears below
    an offset that a reader has seen. An expired fact leaves a hole; its offset is not reused."""

    async def append(self, fact: NewFact) -> Appended:
        """Append a fact. Durable when this returns. Concurrent calls share the cost of that.

        For an existing id with the same digest, return its offset; with another, raise `ConflictingDuplicate`. Raise
        `Backpressure` if there is no room for it, which counts what is appended at the same time, by any server. Raise
        `Unavailable`, with nothing half written, if the fact cannot be written now.
        """
        ...

    async def append_all(self, facts: Sequence[NewFact]) -> list[Outcome]:
        """Append each as `append` would, with an outcome for each; new ones get offsets in this order. After a new one
        that has no room, none of the new ones is written. Raise `Unavailable` if not all could be written; those that
        were are the first ones. Raise `InvalidArgument`, with none written, if one is too large for the store."""
        ...

    async def read(self, after: int, limit: int, largest: int = PAGE_BYTES) -> list[Record]:
        """Return up to `limit` records above this offset, ascending; fewer if, each with `AROUND_RECORD`, they would be
        larger than `largest` bytes together, but at least one if there is one."""
        ...

    async def times_after(self, offsets: Sequence[int]) -> list[int | None]:
        """Return when the first fact above each of these offsets was appended, in milliseconds since 1970; None if
        there is none."""
        ...

    async def bounds(self) -> Bounds: ...

    async def size(self) -> int:
        """Return how many bytes the facts take."""
        ...

    async def expire(self, older_than: Mapping[str, int], at_most: int | None = None) -> int:
        """Remove the facts of each class that were appended before its time (milliseconds since 1970); with `at_most`,
        no more than that. Their ids count as new from then on. Return how many were removed."""
        ...

    async def drop(self, through: int) -> int:
        """Remove all facts up to this offset. Return how many."""
        ...


def full(size: int, within: int) -> Backpressure:
    """The error for a fact that does not fit."""
    return Backpressure(
        f"the store is full: its facts take {size:,} bytes and may take {within:,}; try again later, with the same id"
    )


class Cursor(msgspec.Struct, frozen=True):
    name: str
    offset: int
    """Confirmed; 0 before the first confirm."""
    confirmed_at_unix_ms: int | None = None


def too_many_names(name: str, most: int) -> QuotaExceeded:
    """The error for a name that may not be registered."""
    return QuotaExceeded(
        f"consumer {name!r} cannot be registered: there are {most:,} consumers, as many as are allowed here; remove "
        "one that is no longer used with `onceward boundary consumers remove NAME`, or raise `consumers` in [quotas] "
        "of the boundary's configuration"
    )


class Cursors(Protocol):
    """The position of each named consumer. Durable."""

    async def position(
        self, name: str, *, create: bool, start: int = 0, most: int | None = None
    ) -> int | None:
        """Return the confirmed offset, or None for an unknown name. `create` registers the name instead, at `start`, or
        raises `QuotaExceeded` if there would be more than `most` names."""
        ...

    async def holes(self, name: str, gap: Gap) -> list[Hole]:
        """Return the holes within this gap that were there when the name was registered, as far as they are known. The
        gap ends before a fact that is there, or at the end of the log."""
        ...

    async def remove(self, name: str) -> int | None:
        """Forget a name. Return where its cursor was; None for an unknown name. Durable when this returns."""
        ...

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        """Move the cursor forward, never back, and register the name. Return its position. Durable when this returns.

        `at` is in milliseconds since 1970, for offsets that were first confirmed elsewhere; None is now.
        """
        ...

    async def cursors(self) -> list[Cursor]:
        """Return all cursors, sorted by name."""
        ...


class ObjectQuota(msgspec.Struct, frozen=True):
    """What all objects of a store may be together. None is no limit."""

    count: int | None = None
    size: int | None = None
    """Bytes."""

    def check_count(self, count: int) -> None:
        """Raise `QuotaExceeded` if there may not be one more than these."""
        if self.count is not None and count >= self.count:
            raise QuotaExceeded(
                f"there are {count:,} objects here, as many as are allowed; raise `objects` in [quotas] of the "
                "boundary's configuration"
            )

    def check_size(self, size: int, more: int) -> None:
        """Raise `QuotaExceeded` if there is no room for so many more bytes."""
        if self.size is not None and size + more > self.size:
            raise QuotaExceeded(
                f"the objects here take {size:,} bytes, and may take {self.size:,}; raise `object_bytes` in [quotas] "
                "of the boundary's configuration"
            )


NO_QUOTA = ObjectQuota()


class ObjectUsage(msgspec.Struct):
    """How many objects there are, and the bytes that they take; with what is being stored, so both are about right."""

    count: int
    size: int


class Objects(Protocol):
    """Immutable objects by bucket and key. A key is any text, and cannot lead outside the store."""

    async def put(
        self,
        bucket: str,
        key: str,
        chunks: AsyncIterator[bytes],
        media_type: str,
        quota: ObjectQuota = NO_QUOTA,
    ) -> ObjectRef:
        """Store an object, completely or not at all. Durable when this returns. The same bytes again are fine; others
        raise `ObjectConflict`. A new object that exceeds the quota, with what is stored at the same time, raises
        `QuotaExceeded`. Never holds more than a few chunks in memory."""
        ...

    async def head(self, bucket: str, key: str) -> ObjectRef | None: ...

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        """Return an object and its bytes. Raise `NotFound`. Never holds more than a few chunks in memory."""
        ...

    async def usage(self) -> ObjectUsage: ...

    def refs(self) -> AsyncIterator[ObjectRef]:
        """Yield all objects, in no particular order."""
        ...


class StoreDurability(msgspec.Struct, frozen=True):
    survives: Literal["process_crash", "machine_crash"] | None
    """The worst that an acknowledged fact survives. None if it could not be determined."""
    why: str
    advice: str = ""
    """The change that would make it stronger, or known."""


class BoundaryStore(FactLog, Cursors, Protocol):
    """Facts, cursors and objects in one store, and the last time that was known to be right."""

    async def trusted_time(self) -> Moment | None:
        """Return what `trust_time` stored last, by any server; None before the first."""
        ...

    async def trust_time(self, moment: Moment) -> None:
        """Store a time that is right. It may be earlier than the one before."""
        ...

    @property
    def objects(self) -> Objects: ...

    async def durability(self) -> StoreDurability:
        """Return what facts survive once they are acknowledged, as the store is configured now."""
        ...

    async def close(self) -> None:
        """Answer pending calls, then close. Idempotent."""
        ...
