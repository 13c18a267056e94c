"""Cursors in a JetStream key-value bucket: a cursor is written only over the revision that was read."""

from __future__ import annotations

import asyncio
import time

import msgspec

from onceward.boundary.errors import Unavailable
from onceward.boundary.store import Cursor
from onceward.boundary.stores.jetstream.connection import CALL_WAIT, ON_ITS_WAY, JetStreamConnection, token


class JetStreamCursors:
    """A name is any text, so that a key is made from it; the value says the name."""

    def __init__(self, link: JetStreamConnection, bucket: str) -> None:
        self._link = link
        self._stream = f"KV_{bucket}"
        self._subject = f"$KV.{bucket}."

    async def prepare(self, replicas: int) -> None:
        """As `nats kv add` makes it, but read from the leader only: what was confirmed is seen by all at once."""
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
        """The cursor and its revision. One that an operator has deleted leaves an empty value."""
        kept = await self._link.last(self._stream, key)
        if kept is None:
            return None, 0
        return msgspec.json.decode(kept.data, type=Cursor) if kept.data else None, kept.seq

    async def _reach(self, wanted: Cursor) -> Cursor:
        """Write it, unless the cursor stands there or further. Returns where it stands."""
        key, data = self._key(wanted.name), msgspec.json.encode(wanted)
        deadline = time.monotonic() + CALL_WAIT
        while time.monotonic() < deadline:
            cursor, revision = await self._read(key)
            if cursor is not None and cursor.offset >= wanted.offset:
                return cursor
            if await self._link.put(key, data, last=revision) is not None:
                return wanted
            await asyncio.sleep(ON_ITS_WAY)  # another was faster, and may still be on its way
        raise Unavailable(f"too many confirm for {wanted.name!r} at the same time; try again")

    def _key(self, name: str) -> str:
        return self._subject + token(name)
