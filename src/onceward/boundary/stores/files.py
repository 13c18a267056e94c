"""Objects as files: content under its digest, names as small files that point to it.

    objects/content/ab/abcdef…          the bytes, written to incoming/ first, fsynced, then renamed
    objects/names/<bucket>/<sha256 of the key>   JSON: key, digest, size, media type

A key is never part of a path, so no key can lead outside the directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from stat import S_ISREG

import msgspec

from onceward._files.identity import OpenFile
from onceward._files.private import make_directory, open_new
from onceward.boundary.artifacts import sync_directory
from onceward.boundary.errors import NotFound, ObjectConflict, Unavailable
from onceward.boundary.model import ObjectRef
from onceward.boundary.store import NO_QUOTA, ObjectQuota, ObjectUsage
from onceward.errors import FileLostError

CHUNK = 256 * 1024
"""Bytes read at once."""


class FileObjects:
    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        """`read_only`: another process stores objects there, and its uploads must not be touched."""
        self._content = directory / "content"
        self._names = directory / "names"
        self._incoming = directory / "incoming"
        self._made: set[Path] = set()
        """Directories whose names are on disk."""
        self._usage: ObjectUsage | None = None
        self._measuring = asyncio.Lock()
        self.directories: list[OpenFile] = []
        if read_only:
            return
        for each in (self._content, self._names, self._incoming):
            self._make(each)
            self.directories.append(OpenFile(each, hold=True))
        for left_over in self._incoming.iterdir():  # of interrupted uploads
            left_over.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise unless the directories are still those that were opened: what is put elsewhere would be lost."""
        try:
            for each in self.directories:
                each.check()
        except FileLostError as error:
            raise Unavailable(str(error)) from error

    async def put(
        self,
        bucket: str,
        key: str,
        chunks: AsyncIterator[bytes],
        media_type: str,
        quota: ObjectQuota = NO_QUOTA,
    ) -> ObjectRef:
        known = await self.head(bucket, key)
        if known is not None and self._is_whole(known):  # its bytes must be compared, but not stored
            return _check_same(known, await _digest_of(chunks))
        incoming = self._incoming / secrets.token_hex(16)
        usage = await self._measured()
        quota = quota if known is None else NO_QUOTA
        quota.check_count(usage.count)
        usage.count += 1
        received, is_new_name, is_new_content = 0, False, False

        def count(more: int) -> None:
            nonlocal received
            quota.check_size(usage.size, more)
            usage.size += more
            received += more

        try:
            digest = await self._receive(incoming, chunks, count)
            if known is not None:
                _check_same(known, f"sha256:{digest}")
            ref = ObjectRef(
                bucket=bucket, key=key, digest=f"sha256:{digest}", size=received, media_type=media_type
            )
            with _writable():
                is_new_content = await asyncio.to_thread(self._keep_content, incoming, digest)
                is_new_name = await asyncio.to_thread(self._keep_name, ref)
            self.check()
        finally:
            incoming.unlink(missing_ok=True)
            usage.count -= not is_new_name
            usage.size -= 0 if is_new_content else received
        return ref if is_new_name else _check_same(self._read_name(bucket, key), ref.digest)

    async def head(self, bucket: str, key: str) -> ObjectRef | None:
        self.check()
        try:
            return self._read_name(bucket, key)
        except FileNotFoundError:
            if not self._names.is_dir():
                raise Unavailable(f"the directory of objects is gone: {self._names}; put it back") from None
            return None

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        ref = await self.head(bucket, key)
        if ref is None:
            raise NotFound(f"there is no object {bucket}/{key}")
        if not self._is_whole(ref):
            raise Unavailable(
                f"object {bucket}/{key} is damaged: {self._content_of(ref)} has lost its bytes; put it again"
            )
        return ref, self._send(self._content_of(ref))

    async def refs(self) -> AsyncIterator[ObjectRef]:
        for name in await asyncio.to_thread(lambda: sorted(self._names.glob("*/*"))):
            yield msgspec.json.decode(name.read_bytes(), type=ObjectRef)

    async def usage(self) -> ObjectUsage:
        return msgspec.structs.replace(await self._measured())

    async def _measured(self) -> ObjectUsage:
        """What is stored, and what is being stored. Counted once: no other process stores objects here."""
        async with self._measuring:
            if self._usage is None:
                self._usage = await asyncio.to_thread(self._measure)
        return self._usage

    def _measure(self) -> ObjectUsage:
        names = sum(1 for _ in self._names.glob("*/*"))
        return ObjectUsage(names, sum(each.stat().st_size for each in self._content.glob("*/*")))

    async def _receive(
        self, incoming: Path, chunks: AsyncIterator[bytes], count: Callable[[int], None]
    ) -> str:
        digest = hashlib.sha256()
        with _writable():
            file = open_new(incoming, 0)
        try:
            async for chunk in chunks:  # errors of the source are not errors of the disk
                digest.update(chunk)
                count(len(chunk))
                with _writable():
                    await asyncio.to_thread(_write, file, chunk)
            with _writable():
                await asyncio.to_thread(os.fsync, file.fileno())
        finally:
            file.close()
        return digest.hexdigest()

    def _keep_content(self, incoming: Path, digest: str) -> bool:
        """Return whether it is new."""
        content = self._content_path(digest)
        self._make(content.parent)
        try:
            os.link(incoming, content)
        except FileExistsError:
            if _size_of(content) == _size_of(incoming):
                return False
            os.replace(incoming, content)  # it was damaged
        sync_directory(content.parent)
        return True

    def _keep_name(self, ref: ObjectRef) -> bool:
        """Make the object exist. Return False if another upload was first."""
        name = self._name_path(ref.bucket, ref.key)
        self._make(name.parent)
        written = self._incoming / secrets.token_hex(16)
        try:
            with open_new(written, 0) as file:
                _write(file, msgspec.json.encode(ref))
                os.fsync(file.fileno())
            try:
                os.link(written, name)  # fails if it exists: of two at once, one wins
            except FileExistsError:
                return False
        finally:
            written.unlink(missing_ok=True)
        sync_directory(name.parent)
        return True

    def _make(self, directory: Path) -> None:
        """Make a directory, and its name durable: otherwise a power cut takes it away with all that is in it."""
        if directory in self._made:
            return
        if not directory.parent.exists():
            self._make(directory.parent)
        make_directory(directory)
        sync_directory(directory.parent)
        self._made.add(directory)

    def _read_name(self, bucket: str, key: str) -> ObjectRef:
        path = self._name_path(bucket, key)
        try:
            return msgspec.json.decode(path.read_bytes(), type=ObjectRef)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"object {bucket}/{key} is damaged: {path} does not say what it is ({error}); remove "
                "that file, and put it again"
            ) from None

    def _is_whole(self, ref: ObjectRef) -> bool:
        return _size_of(self._content_of(ref)) == ref.size

    async def _send(self, content: Path) -> AsyncIterator[bytes]:
        with content.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

    def _content_of(self, ref: ObjectRef) -> Path:
        return self._content_path(ref.digest.removeprefix("sha256:"))

    def _content_path(self, digest: str) -> Path:
        return self._content / digest[:2] / digest

    def _name_path(self, bucket: str, key: str) -> Path:
        return self._names / bucket / hashlib.sha256(key.encode()).hexdigest()


@contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"the object could not be written: {error}; try again") from error


def _write(file: RawIOBase, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) or 0 :]


def _size_of(path: Path) -> int | None:
    """The size of a file; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size if S_ISREG(found.st_mode) else None


def _check_same(known: ObjectRef, digest: str) -> ObjectRef:
    if known.digest != digest:
        raise ObjectConflict(known.bucket, known.key)
    return known


async def _digest_of(chunks: AsyncIterator[bytes]) -> str:
    digest = hashlib.sha256()
    async for chunk in chunks:
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"
