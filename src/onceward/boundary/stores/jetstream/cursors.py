"""Cursors, and the trusted time, in JetStream key-value buckets. A write succeeds only on top of the revision that was
read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from onceward._nats.connection import CALL_WAIT, ON_ITS_WAY, token
from onceward._time import Moment
from onceward.boundary.errors import Unavailable
from onceward.boundary.holes import Hole
from onceward.boundary.store import Cursor, too_many_names
from onceward.boundary.stores.jetstream.connection import JetStreamConnection

HolesNow = Callable[[], Awaitable[list[Hole]]]
"""Returns the holes in the log."""


class Bucket:
    def __init__(self, link: JetStreamConnection, bucket: str) -> None:
        self._link = link
        self._stream = f"KV_{bucket}"
        self._subject = f"$KV.{bucket}."
        self._registering = asyncio.Lock()

    async def prepare(self, replicas: int) -> None:
        """Create the bucket as `nats kv add` does, but read from the leader only: a confirm is visible at once."""
        config = {
            "subjects": [f"{self._subject}>"],
            "storage": "file",
            "num_replicas": replicas,
            "max_msgs_per_subject": 1,
            "discard": "new",
            "deny_delete": True,
            "allow_rollup_hdrs": True,
            "allow_direct": False,
        }
        await self._link.stream(self._stream, config)


class JetStreamClock(Bucket):
    """The last time that was known to be right."""

    async def read(self) -> Moment | None:
        kept = await self._link.last(self._stream, f"{self._subject}trusted")
        return msgspec.json.decode(kept.data, type=Moment) if kept is not None and kept.data else None

    async def write(self, moment: Moment) -> None:
        key, data = f"{self._subject}trusted", msgspec.json.encode(moment)
        deadline = time.monotonic() + CALL_WAIT
        while time.monotonic() < deadline:
            kept = await self._link.last(self._stream, key)
            if await self._link.put(key, data, last=0 if kept is None else kept.seq) is not None:
                return
            await asyncio.sleep(ON_ITS_WAY)  # another server was faster
        raise Unavailable("too many servers store the time; try again")


class KeptCursor(Cursor, frozen=True):
    holes: tuple[Hole, ...] = ()
    """Those of the log when the name was registered, which are still ahead of the cursor."""


class JetStreamCursors(Bucket):
    """A name is any text, so its key is a hash; the value has the name."""

    def __init__(self, link: JetStreamConnection, bucket: str, holes_now: HolesNow) -> None:
        super().__init__(link, bucket)
        self._holes_now = holes_now

    async def position(self, name: str, *, create: bool, start: int, most: int | None) -> int | None:
        cursor, _ = await self._read(self._key(name))
        if cursor is None and create:
            async with self._registering:
                cursor = await self._register(name, start, most)
        return None if cursor is None else cursor.offset

    async def _register(self, name: str, start: int, most: int | None) -> KeptCursor:
        if most is not None and await self._count() >= most:
            raise too_many_names(name, most)
        cursor = await self._reach(KeptCursor(name, start, holes=tuple(await self._holes_now())))
        if most is not None and cursor.offset == start and await self._count() > most:
            # Another server has registered one at the same moment. It may find that as well, and then both try again.
            await self.remove(name, only_at=start)
            raise too_many_names(name, most)
        return cursor

    async def remove(self, name: str, only_at: int | None = None) -> int | None:
        key = self._key(name)
        while True:
            cursor, revision = await self._read(key)
            if cursor is None or only_at not in (None, cursor.offset):
                return None
            if await self._link.purge(self._stream, filter=key, seq=revision + 1):
                return cursor.offset  # otherwise it has just advanced

    async def _count(self) -> int:
        return (await self._link.info(self._stream)).messages

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        return (await self._reach(KeptCursor(name, offset, at or time.time_ns() // 1_000_000))).offset

    async def holes(self, name: str) -> list[Hole]:
        """Return the holes that were there before the name, and that its cursor has not passed."""
        cursor, _ = await self._read(self._key(name))
        return [] if cursor is None else list(cursor.holes)

    async def all(self) -> list[Cursor]:
        keys = await self._link.subjects(self._stream, f"{self._subject}>")
        read = await asyncio.gather(*(self._read(key) for key in keys))
        known = [cursor for cursor, _ in read if cursor is not None]
        return sorted(
            (Cursor(each.name, each.offset, each.confirmed_at_unix_ms) for each in known),
            key=lambda cursor: cursor.name,
        )

    async def _read(self, key: str) -> tuple[KeptCursor | None, int]:
        """Return the cursor and its revision. A cursor that an operator deleted leaves an empty value."""
        kept = await self._link.last(self._stream, key)
        if kept is None:
            return None, 0
        return msgspec.json.decode(kept.data, type=KeptCursor) if kept.data else None, kept.seq

    async def _reach(self, wanted: KeptCursor) -> KeptCursor:
        """Write the cursor, unless it is there or further already. Return where it is."""
        key = self._key(wanted.name)
        deadline = time.monotonic() + CALL_WAIT
        while time.monotonic() < deadline:
            cursor, revision = await self._read(key)
            if cursor is not None:
                if cursor.offset >= wanted.offset:
                    return cursor
                ahead = tuple(hole for hole in cursor.holes if hole[1] > wanted.offset)
                wanted = msgspec.structs.replace(wanted, holes=ahead)
            data = msgspec.json.encode(wanted)
            if await self._link.put(key, data, last=revision) is not None:
                return wanted
            await asyncio.sleep(ON_ITS_WAY)  # another write was faster, and may still be in flight
        raise Unavailable(f"too many concurrent confirms for {wanted.name!r}; try again")

    def _key(self, name: str) -> str:
        return self._subject + token(name)
