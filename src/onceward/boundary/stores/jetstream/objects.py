"""Objects in a JetStream object store, in the layout that `nats object` and all clients know.

    $O.<store>.C.<upload>         the bytes, in chunks, under the upload's own name
    $O.<store>.M.<base64 name>    the entry: size, digest, and which upload has the bytes

An object exists when its entry does, and an entry is published on the condition that its subject has none. So of two
concurrent uploads one wins, and an interrupted one is never seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta

import msgspec

from onceward._nats.connection import CALL_WAIT, ON_ITS_WAY
from onceward.boundary.errors import NotFound, ObjectConflict, QuotaExceeded, Unavailable
from onceward.boundary.model import ObjectRef
from onceward.boundary.store import NO_QUOTA, ObjectQuota, ObjectUsage
from onceward.boundary.stores.jetstream.connection import JetStreamConnection

CHUNK = 128 * 1024
CHUNKS_AT_ONCE = 8
ENTRIES_AT_ONCE = 1000
LEFT_OVER_AFTER = timedelta(days=1)
"""How long an upload without an entry may be idle before its bytes are removed."""

_DIGEST = "SHA-256="
_MEDIA_TYPE = "media-type"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An object's entry, in the format of JetStream object stores. Other clients omit what they do not know."""

    name: str
    """<bucket>/<key>; a bucket has no slash in it."""
    bucket: str
    """The whole store."""
    nuid: str
    """The upload."""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    metadata: dict[str, str] = {}
    deleted: bool = False
    """Set by an operator, never by this store."""

    @property
    def ref(self) -> ObjectRef:
        bucket, _, key = self.name.partition("/")
        digest = urlsafe_b64decode(self.digest.removeprefix(_DIGEST)).hex()
        media_type = self.metadata.get(_MEDIA_TYPE, "")
        return ObjectRef(
            bucket=bucket, key=key, digest=f"sha256:{digest}", size=self.size, media_type=media_type
        )


class JetStreamObjects:
    def __init__(self, link: JetStreamConnection, store: str) -> None:
        self._link = link
        self._store = store
        self._stream = f"OBJ_{store}"
        self._chunks = f"$O.{store}.C."
        self._entries = f"$O.{store}.M."
        self._uploads: dict[str, None] = {}
        self._counting = asyncio.Condition()

    async def prepare(self, replicas: int) -> None:
        config = {
            "subjects": [f"{self._chunks}>", f"{self._entries}>"],
            "storage": "file",
            "num_replicas": replicas,
            "discard": "new",
            "allow_rollup_hdrs": True,
            "allow_direct": True,
        }
        await self._link.stream(self._stream, config)

    async def put(
        self,
        bucket: str,
        key: str,
        chunks: AsyncIterator[bytes],
        media_type: str,
        quota: ObjectQuota = NO_QUOTA,
    ) -> ObjectRef:
        known = await self._entry(bucket, key)
        if known is not None:  # its bytes must be compared, but not stored
            digest = hashlib.sha256()
            async for chunk in chunks:
                digest.update(chunk)
            return _check_same(known, digest.digest())
        upload = secrets.token_hex(11)
        self._uploads[upload] = None
        try:
            digest, size, count = await self._send(upload, chunks, quota)
            entry = Entry(
                name=f"{bucket}/{key}",
                bucket=self._store,
                nuid=upload,
                size=size,
                chunks=count,
                digest=_DIGEST + urlsafe_b64encode(digest.digest()).decode(),
                mtime=datetime.now(UTC).isoformat(),
                metadata={_MEDIA_TYPE: media_type},
            )
            async with self._counted(quota, upload, another=True):
                self._uploads.pop(upload)
                # If this fails, the entry may or may not exist: the bytes stay.
                there = await self._link.put_if_absent(
                    self._stream, self._subject(bucket, key), msgspec.json.encode(entry)
                )
        except BaseException:
            if upload in self._uploads:
                try:
                    await self._forget(upload)
                finally:
                    self._uploads.pop(upload)
            raise
        finally:
            async with self._counting:
                self._counting.notify_all()
        if isinstance(there, int):
            return entry.ref
        await self._forget(upload)
        return _check_same(msgspec.json.decode(there.data, type=Entry), digest.digest())

    async def head(self, bucket: str, key: str) -> ObjectRef | None:
        entry = await self._entry(bucket, key)
        return None if entry is None or entry.deleted else entry.ref

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        entry = await self._entry(bucket, key)
        if entry is None or entry.deleted:
            raise NotFound(f"there is no object {bucket}/{key}")
        return entry.ref, self._receive(entry)

    async def usage(self) -> ObjectUsage:
        state = await self._link.info(self._stream)
        # An object has an entry and, unless it is empty, a subject of its bytes, as an unfinished upload has.
        return ObjectUsage((state.num_subjects - len(self._uploads) + 1) // 2, state.bytes)

    async def refs(self) -> AsyncIterator[ObjectRef]:
        async for entry in self._all_entries():
            if not entry.deleted:
                yield entry.ref

    async def remove_left_overs(self) -> None:
        """Remove bytes without an entry, of uploads whose server died."""
        uploads = await self._link.subjects(self._stream, f"{self._chunks}>")
        left = {subject.removeprefix(self._chunks) for subject in uploads}
        left -= {entry.nuid async for entry in self._all_entries()}
        for upload in left:
            newest = await self._link.last(self._stream, self._chunks + upload)
            if newest and newest.time and newest.time < datetime.now(UTC) - LEFT_OVER_AFTER:
                await self._forget(upload)

    @asynccontextmanager
    async def _counted(
        self, quota: ObjectQuota, upload: str, more: int = 0, *, another: bool = False
    ) -> AsyncIterator[None]:
        """Raise `QuotaExceeded`, or let the caller write. Of this server, nothing else is written in between; another
        server may be at the same point, so each can exceed the quota by one chunk, or one object.

        Uploads that need too much room together do not all fail: the oldest waits until the others have ended."""
        if quota == NO_QUOTA:
            yield
            return
        async with self._counting:
            give_up = asyncio.get_running_loop().time() + CALL_WAIT
            while True:
                used = await self.usage()
                try:
                    quota.check_size(used.size, more)
                    if another:
                        quota.check_count(used.count)
                    break
                except QuotaExceeded as exceeded:
                    if len(self._uploads) == 1 or next(iter(self._uploads)) != upload:
                        raise
                    try:
                        async with asyncio.timeout_at(give_up):
                            await self._counting.wait()
                    except TimeoutError:
                        raise exceeded from None
            yield

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────────

    async def _entry(self, bucket: str, key: str) -> Entry | None:
        kept = await self._link.last(self._stream, self._subject(bucket, key))
        return None if kept is None else msgspec.json.decode(kept.data, type=Entry)

    async def _all_entries(self) -> AsyncIterator[Entry]:
        after = 0
        while True:
            page = await self._link.page(
                self._stream,
                after,
                ENTRIES_AT_ONCE,
                largest=CHUNK * CHUNKS_AT_ONCE,
                subject=f"{self._entries}>",
            )
            for message in page:
                assert message.headers is not None
                after = int(message.headers["Nats-Sequence"])
                yield msgspec.json.decode(message.data, type=Entry)
            if not page:
                return

    async def _send(
        self, upload: str, chunks: AsyncIterator[bytes], quota: ObjectQuota
    ) -> tuple[hashlib._Hash, int, int]:
        digest, size, count = hashlib.sha256(), 0, 0
        waiting = bytearray()

        async def send(length: int) -> None:
            nonlocal count
            async with self._counted(quota, upload, length):
                await self._link.publish(self._chunks + upload, bytes(waiting[:length]))
            del waiting[:length]
            count += 1

        async for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            waiting += chunk
            while len(waiting) >= CHUNK:
                await send(CHUNK)
        if waiting:
            await send(len(waiting))
        return digest, size, count

    async def _receive(self, entry: Entry) -> AsyncIterator[bytes]:
        count, after = 0, 0
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CALL_WAIT
        while count < entry.chunks:
            page = await self._link.page(
                self._stream,
                after,
                min(CHUNKS_AT_ONCE, entry.chunks - count),
                largest=CHUNK * CHUNKS_AT_ONCE,
                subject=self._chunks + entry.nuid,
            )
            for message in page:
                assert message.headers is not None
                after = int(message.headers["Nats-Sequence"])
                count += 1
                yield message.data
                deadline = loop.time() + CALL_WAIT
            if not page:  # a replica that is behind
                if loop.time() > deadline:
                    raise Unavailable(f"some bytes of {entry.name} are missing; try again")
                await asyncio.sleep(ON_ITS_WAY)

    async def _forget(self, upload: str) -> None:
        with suppress(Unavailable):  # `remove_left_overs` will do it
            await self._link.purge(self._stream, filter=self._chunks + upload)

    def _subject(self, bucket: str, key: str) -> str:
        return self._entries + urlsafe_b64encode(f"{bucket}/{key}".encode()).decode()


def _check_same(known: Entry, digest: bytes) -> ObjectRef:
    ref = known.ref
    if known.deleted or ref.digest != f"sha256:{digest.hex()}":
        raise ObjectConflict(ref.bucket, ref.key)
    return ref
