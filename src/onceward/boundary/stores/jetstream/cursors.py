"""Cursors in a JetStream key-value bucket. A write succeeds only on top of the revision that was read."""

from __future__ import annotations

import asyncio
import time

import msgspec

from onceward.boundary.errors import Unavailable
from onceward.boundary.store import Cursor
from onceward.boundary.stores.jetstream.connection import CALL_WAIT, ON_ITS_WAY, JetStreamConnection, token


class JetStreamCursors:
    """A name is any text, so its key is a hash; the value has the name."""

    def __init__(self, link: JetStreamConnection, bucket: str) -> None:
        self._link = link
        self._stream = f"KV_{bucket}"
        self._subject = f"$KV.{bucket}."

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

    async def position(self, name: str, *, create: bool) -> int | None:
        cursor, _ = await self._read(self._key(name))
        if cursor is None and create:
            cursor = await self._reach(Cursor(name, 0))
        return None if cursor is None else cursor.offset

    async def advance(self, name: str, offset: int, at: int | None = None) -> int:
        return (await self._reach(Cursor(name, offset, at or time.time_ns() // 1_000_000))).offset

    async def all(self) -> list[Cursor]:
        keys = await self._link.subjects(self._stream, f"{self._subject}>")
        read = await asyncio.gather(*(self._read(key) for key in keys))
        return sorted((cursor for cursor, _ in read if cursor is not None), key=lambda cursor: cursor.name)

    async def _read(self, key: str) -> tuple[Cursor | None, int]:
        """Return the cursor and its revision. A cursor that an operator deleted leaves an empty value."""
        kept = await self._link.last(self._stream, key)
        if kept is None:
            return None, 0
        return msgspec.json.decode(kept.data, type=Cursor) if kept.data else None, kept.seq

    async def _reach(self, wanted: Cursor) -> Cursor:
        """Write the cursor, unless it is there or further already. Return where it is."""
        key, data = self._key(wanted.name), msgspec.json.encode(wanted)
        deadline = time.monotonic() + CALL_WAIT
        while time.monotonic() < deadline:
            cursor, revision = await self._read(key)
            if cursor is not None and cursor.offset >= wanted.offset:
                return cursor
            if await self._link.put(key, data, last=revision) is not None:
                return wanted
            await asyncio.sleep(ON_ITS_WAY)  # another write was faster, and may still be in flight
        raise Unavailable(f"too many concurrent confirms for {wanted.name!r}; try again")

    def _key(self, name: str) -> str:
        return self._subject + token(name)
