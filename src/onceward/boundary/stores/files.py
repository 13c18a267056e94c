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
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path

import msgspec

from onceward.boundary.artifacts import sync_directory
from onceward.boundary.errors import NotFound, ObjectConflict, Unavailable
from onceward.boundary.model import ObjectRef

CHUNK = 256 * 1024
"""Bytes read at once."""


class FileObjects:
    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        """`read_only`: another process stores objects there, and its uploads must not be touched."""
        self._content = directory / "content"
        self._names = directory / "names"
        self._incoming = directory / "incoming"
        if read_only:
            return
        for each in (self._content, self._names, self._incoming):
            each.mkdir(parents=True, exist_ok=True)
        for left_over in self._incoming.iterdir():  # of interrupted uploads
            left_over.unlink(missing_ok=True)

    async def put(self, bucket: str, key: str, chunks: AsyncIterator[bytes], media_type: str) -> ObjectRef:
        incoming = self._incoming / secrets.token_hex(16)
        try:
            digest, size = await self._receive(incoming, chunks)
            ref = ObjectRef(
                bucket=bucket, key=key, digest=f"sha256:{digest}", size=size, media_type=media_type
            )
            with _writable():
                return await asyncio.to_thread(self._keep, incoming, digest, ref)
        finally:
            incoming.unlink(missing_ok=True)

    async def head(self, bucket: str, key: str) -> ObjectRef | None:
        try:
            return msgspec.json.decode(self._name_path(bucket, key).read_bytes(), type=ObjectRef)
        except FileNotFoundError:
            return None

    async def get(self, bucket: str, key: str) -> tuple[ObjectRef, AsyncIterator[bytes]]:
        ref = await self.head(bucket, key)
        if ref is None:
            raise NotFound(f"there is no object {bucket}/{key}")
        return ref, self._send(self._content_path(ref.digest.removeprefix("sha256:")))

    async def refs(self) -> AsyncIterator[ObjectRef]:
        for name in sorted(self._names.glob("*/*")):
            yield msgspec.json.decode(name.read_bytes(), type=ObjectRef)

    async def _receive(self, incoming: Path, chunks: AsyncIterator[bytes]) -> tuple[str, int]:
        digest, size = hashlib.sha256(), 0
        with _writable():
            file = incoming.open("wb", buffering=0)
        try:
            async for chunk in chunks:  # errors of the source are not errors of the disk
                digest.update(chunk)
                size += len(chunk)
                with _writable():
                    await asyncio.to_thread(_write, file, chunk)
            with _writable():
                await asyncio.to_thread(os.fsync, file.fileno())
        finally:
            file.close()
        return digest.hexdigest(), size

    def _keep(self, incoming: Path, digest: str, ref: ObjectRef) -> ObjectRef:
        content = self._content_path(digest)
        if not content.exists():
            content.parent.mkdir(exist_ok=True)
            incoming.rename(content)
            sync_directory(content.parent)
        name = self._name_path(ref.bucket, ref.key)
        name.parent.mkdir(exist_ok=True)
        written = self._incoming / secrets.token_hex(16)
        try:
            with written.open("wb", buffering=0) as file:
                _write(file, msgspec.json.encode(ref))
                os.fsync(file.fileno())
            try:
                os.link(written, name)  # fails if it exists: of two at once, one wins
            except FileExistsError:
                return self._check_same(name, ref)
        finally:
            written.unlink(missing_ok=True)
        sync_directory(name.parent)
        return ref

    def _check_same(self, name: Path, ref: ObjectRef) -> ObjectRef:
        known = msgspec.json.decode(name.read_bytes(), type=ObjectRef)
        if known.digest != ref.digest:
            raise ObjectConflict(ref.bucket, ref.key)
        return known

    async def _send(self, content: Path) -> AsyncIterator[bytes]:
        with content.open("rb") as file:
            while chunk := await asyncio.to_thread(file.read, CHUNK):
                yield chunk

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
