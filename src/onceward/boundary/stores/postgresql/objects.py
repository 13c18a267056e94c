"""Objects as rows: first the bytes in pieces, each committed by itself; then, in one transaction, the name.

Without its name an object does not exist. So an upload needs no long transaction, which would keep PostgreSQL from
vacuuming, and an interrupted one only leaves pieces that are removed later.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from onceward.boundary.errors import BoundaryError, NotFound, ObjectConflict, Unavailable
from onceward.boundary.model import ObjectRef
from onceward.boundary.store import NO_QUOTA, ObjectQuota, ObjectUsage
from onceward.boundary.stores.postgresql.connections import PostgreSqlConnections

CHUNK = 1024 * 1024
"""Bytes in a row."""
PAGE = 500
"""Names read at once."""
LONGEST_UPLOAD = "1 day"
"""An upload that takes longer counts as interrupted."""
TOO_LONG = f"the upload took longer than {LONGEST_UPLOAD} and was removed; try again"

FIND = """
    SELECT bucket, key, digest, size, media_type, content FROM onceward_boundary_objects WHERE bucket = %s AND key = %s
"""
NAMES = """
    SELECT bucket, key, digest, size, media_type FROM onceward_boundary_objects
    WHERE (bucket, key) > (%s, %s) ORDER BY bucket, key LIMIT %s
"""
READ = "SELECT data FROM onceward_boundary_chunks WHERE content = %s AND number = %s"
BEGIN = "INSERT INTO onceward_boundary_uploads DEFAULT VALUES RETURNING content"
WRITE = """
    WITH counted AS (
        UPDATE onceward_boundary_usage SET bytes = bytes + %(size)s
        WHERE %(most)s::bigint IS NULL OR bytes + %(size)s <= %(most)s RETURNING bytes
    ), written AS (
        INSERT INTO onceward_boundary_chunks (content, number, data)
        SELECT content, %(number)s, %(data)s FROM onceward_boundary_uploads
        WHERE content = %(upload)s AND EXISTS (SELECT FROM counted) FOR KEY SHARE RETURNING number
    )
    SELECT (SELECT count(*) FROM counted), (SELECT count(*) FROM written)
"""  # writes nothing beyond the quota, nor for an upload that was removed
UNCOUNT = "UPDATE onceward_boundary_usage SET bytes = bytes - %(size)s"
COUNT = "UPDATE onceward_boundary_usage SET objects = objects + 1 RETURNING objects"
USED = "SELECT bytes FROM onceward_boundary_usage"
USAGE = "SELECT objects, bytes FROM onceward_boundary_usage"
END = "DELETE FROM onceward_boundary_uploads WHERE content = %s"
NAME = """
    INSERT INTO onceward_boundary_objects (bucket, key, digest, size, media_type, content)
    VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT DO NOTHING
"""
FORGET = """
    WITH removed AS (
        DELETE FROM onceward_boundary_chunks WHERE content = %s RETURNING octet_length(data) AS bytes
    )
    UPDATE onceward_boundary_usage SET bytes = bytes - (SELECT coalesce(sum(bytes), 0) FROM removed)
"""
INTERRUPTED = f"""
    SELECT content FROM onceward_boundary_uploads WHERE begun_at < now() - interval '{LONGEST_UPLOAD}'
"""


class PostgreSqlObjects:
    def __init__(self, connections: PostgreSqlConnections) -> None:
        self._connections = connections

    async def put(
        self,
        bucket: str,
        key: str,
        chunks: AsyncIterator[bytes],
        media_type: str,
        quota: ObjectQuota = NO_QUOTA,
    ) -> ObjectRef:
        known = await self.head(bucket, key)
        if known is not None:
            return _check_same(known, await _digest(chunks))
        [(upload,)] = await self._query(BEGIN)
        try:
            digest, size = await self._receive(upload, chunks, quota)
            ref = ObjectRef(bucket=bucket, key=key, digest=digest, size=size, media_type=media_type)
            if await self._name(ref, upload, quota):
                return ref
        except BaseException:
            with suppress(Unavailable):  # `remove_interrupted` will do it
                await self._discard(upload)
            raise
        await self._discard(upload)
        known = await self.head(bucket, key)
        assert known is not None, "another upload was first, and objects are never removed"
        return _check_same(known, digest)

    async def head(self, bucket: str, key: str) -> ObjectRef | None:
        row = await self._query(FIND, bucket, key)
        return _ref(row[0]) if row else None

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        row = await self._query(FIND, bucket, key)
        if not row:
            raise NotFound(f"there is no object {bucket}/{key}")
        return _ref(row[0]), self._send(_ref(row[0]), row[0][5])

    async def usage(self) -> ObjectUsage:
        [(count, size)] = await self._query(USAGE)
        return ObjectUsage(count, size)

    async def refs(self) -> AsyncIterator[ObjectRef]:
        after = ("", "")
        while rows := await self._query(NAMES, *after, PAGE):
            for row in rows:
                yield _ref(row)
            after = rows[-1][:2]

    async def remove_interrupted(self) -> None:
        """Remove the pieces of uploads whose server is gone."""
        for (upload,) in await self._query(INTERRUPTED):
            await self._discard(upload)

    async def _receive(
        self, upload: int, chunks: AsyncIterator[bytes], quota: ObjectQuota
    ) -> tuple[str, int]:
        digest, size, number = hashlib.sha256(), 0, 0
        async for piece in _pieces(chunks):
            digest.update(piece)
            size += len(piece)
            await self._write(upload, number, piece, quota)
            number += 1
        return f"sha256:{digest.hexdigest()}", size

    async def _write(self, upload: int, number: int, piece: bytes, quota: ObjectQuota) -> None:
        values = {"upload": upload, "number": number, "data": piece, "size": len(piece), "most": quota.size}
        async with self._connections.one() as connection:
            cursor = await connection.execute(WRITE, values, binary=True)
            [(counted, written)] = await cursor.fetchall()
            if counted and not written:
                await connection.execute(UNCOUNT, values)
        if not counted:
            [(used,)] = await self._query(USED)
            quota.check_size(used, len(piece))
            raise Unavailable("the objects had no room for a moment; try again")
        if not written:
            raise Unavailable(TOO_LONG)

    async def _name(self, ref: ObjectRef, upload: int, quota: ObjectQuota) -> bool:
        """Make the object exist. Return False if another upload was first."""
        async with self._connections.one() as connection, connection.transaction():
            named = await connection.execute(
                NAME, (ref.bucket, ref.key, ref.digest, ref.size, ref.media_type, upload)
            )
            if named.rowcount == 0:
                return False
            if (await connection.execute(END, (upload,))).rowcount == 0:
                raise Unavailable(TOO_LONG)
            [(count,)] = await (await connection.execute(COUNT)).fetchall()
            quota.check_count(count - 1)
            return True

    async def _discard(self, upload: int) -> None:
        """Remove the pieces, unless they have a name: that is unknown if the connection broke during the commit."""
        async with self._connections.one() as connection, connection.transaction():
            if (await connection.execute(END, (upload,))).rowcount == 1:
                await connection.execute(FORGET, (upload,))

    async def _send(self, ref: ObjectRef, content: int) -> AsyncIterator[bytes]:
        digest = hashlib.sha256()
        for number in itertools.count():
            rows = await self._query(READ, content, number)
            if not rows:
                break
            digest.update(rows[0][0])
            yield rows[0][0]
        if ref.digest != f"sha256:{digest.hexdigest()}":
            raise BoundaryError(
                f"object {ref.bucket}/{ref.key} is damaged in the store: its bytes do not match {ref.digest}; restore "
                "onceward_boundary_chunks from a backup"
            )

    async def _query(self, query: str, *values: Any) -> list[Any]:
        async with self._connections.one() as connection:
            cursor = await connection.execute(query, values, binary=True)
            return await cursor.fetchall()


def _ref(row: tuple[Any, ...]) -> ObjectRef:
    bucket, key, digest, size, media_type = row[:5]
    return ObjectRef(bucket=bucket, key=key, digest=digest, size=size, media_type=media_type)


def _check_same(known: ObjectRef, digest: str) -> ObjectRef:
    if known.digest != digest:
        raise ObjectConflict(known.bucket, known.key)
    return known


async def _digest(chunks: AsyncIterator[bytes]) -> str:
    digest = hashlib.sha256()
    async for chunk in chunks:
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


async def _pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of equal size; the last may be smaller."""
    collected = bytearray()
    async for chunk in chunks:
        collected += chunk
        while len(collected) >= CHUNK:
            yield bytes(collected[:CHUNK])
            del collected[:CHUNK]
    if collected:
        yield bytes(collected)
