"""Facts and their artifacts in one file, for zones without a network between them.

    onceward boundary bundle 1\n
    H  zone, since, last                 JSON
    O  an artifact's name and size       JSON, followed by its bytes; before the first fact that refers to it
    F  a fact, with its offset           protobuf, as in FetchFacts
    G  offsets that had expired          JSON
    SHA-256 of all before it             32 bytes

Each part begins with its letter and its length in 8 bytes. Bundles are streamed both ways: only a few pieces are in
memory, however large they are. A truncated or altered file is refused before any of it is imported. The digest protects
against accidents, not forgery: secure the way bundles are carried.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any, BinaryIO

import msgspec

from onceward.boundary.artifacts import Landing
from onceward.boundary.boundary import Boundary
from onceward.boundary.client.client_asyncio import AsyncBoundaryClient
from onceward.boundary.errors import BoundaryError
from onceward.boundary.links.receiver import (
    Receiver,
    append_until_refused,
    artifact_of,
    receiver_of,
    verify_pieces,
)
from onceward.boundary.model import Gap, ObjectRef, StoredFact
from onceward.boundary.stores.read_only import StoreReader
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.wire import Record, from_pb, stored, stored_bytes
from onceward.errors import OncewardError

MAGIC = b"onceward boundary bundle 1\n"
KIND, LENGTH, DIGEST = 1, 8, 32
"""Bytes."""
PAGE = 500
PIECE = 256 * 1024
LARGEST_PART = 32 * 1024 * 1024
"""Bytes, of any part except an artifact."""

Progress = Callable[[int], object]
"""Called with the number of bytes processed since the last call."""


class BundleError(OncewardError):
    """The file is not a complete bundle, or a fact in it cannot be imported."""


class Header(msgspec.Struct, frozen=True, kw_only=True):
    zone: str
    """The zone whose log was exported."""
    since: int
    last: int
    """Facts above `since`, up to `last`."""


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    facts: int
    objects: int
    missed: int
    """Facts that had already expired."""


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────


async def export(
    store: StoreReader,
    zone: str,
    since: int,
    through: int | None,
    path: str,
    progress: Progress = lambda size: None,
) -> tuple[Header, Contents]:
    """Write the facts above `since`, up to `through` or the current last one. The file gets its name once complete."""
    last = (await store.bounds()).last
    header = Header(zone=zone, since=since, last=last if through is None else min(last, through))
    landing = Landing(path)
    try:
        writer = _Writer(landing, progress)
        contents = await writer.write(store, header)
        await asyncio.to_thread(landing.keep)
    except BaseException:
        landing.drop()
        raise
    return header, contents


class _Writer:
    def __init__(self, landing: Landing, progress: Progress) -> None:
        self._landing = landing
        self._progress = progress
        self._digest = hashlib.sha256()
        self._written: set[tuple[str, str]] = set()
        self._facts = self._missed = 0

    async def write(self, store: StoreReader, header: Header) -> Contents:
        self._put(MAGIC)
        self._part(b"H", msgspec.json.encode(header))
        at = header.since
        async for record in _records(store, header):
            self._put_gap(at, record[0])
            await self._put_artifact(store, stored(record))
            self._part(b"F", stored_bytes(record))
            self._facts += 1
            at = record[0]
        self._put_gap(at, header.last + 1)
        self._put(self._digest.digest())
        return Contents(facts=self._facts, objects=len(self._written), missed=self._missed)

    def _put_gap(self, before: int, after: int) -> None:
        """Record the offsets between two facts as expired, if there are any."""
        if after - before > 1:
            self._part(b"G", msgspec.json.encode(Gap(before + 1, after - 1)))
            self._missed += after - before - 1

    async def _put_artifact(self, store: StoreReader, fact: StoredFact) -> None:
        ref = artifact_of(fact.fact)
        if ref is None or (ref.bucket, ref.key) in self._written:
            return
        if await store.objects.head(ref.bucket, ref.key) is None:
            raise BundleError(
                f"the fact at offset {fact.offset} refers to object {ref.bucket}/{ref.key}, which does not exist here; "
                f"put it, or leave the fact out with --through {fact.offset - 1} and --since {fact.offset}"
            )
        _, pieces = await store.objects.get(ref.bucket, ref.key)
        self._part(b"O", msgspec.json.encode(ref))
        async for piece in verify_pieces(ref, pieces):
            self._put(piece)
        self._written.add((ref.bucket, ref.key))

    def _part(self, kind: bytes, body: bytes) -> None:
        self._put(b"".join((kind, len(body).to_bytes(LENGTH, "big"), body)))

    def _put(self, data: bytes) -> None:
        self._landing.write(data)
        self._digest.update(data)
        self._progress(len(data))


async def _records(store: StoreReader, header: Header) -> AsyncIterator[Record]:
    at = header.since
    while at < header.last and (records := await store.read(at, PAGE)):
        for record in records:
            if record[0] > header.last:
                return
            yield record
        at = records[-1][0]


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────


def check(file: BinaryIO, progress: Progress = lambda size: None) -> Header:
    """Read all of a bundle once. Raise `BundleError` if it is not a bundle, or is not intact."""
    size = os.fstat(file.fileno()).st_size
    begin = file.read(len(MAGIC))
    if begin != MAGIC:
        raise BundleError("this is not a bundle of facts, or its version is unknown here")
    digest, left = hashlib.sha256(begin), size - len(MAGIC) - DIGEST
    while left > 0 and (piece := file.read(min(left, PIECE))):
        digest.update(piece)
        left -= len(piece)
        progress(len(piece))
    if left or file.read(DIGEST + 1) != digest.digest():
        raise BundleError("this bundle is damaged or truncated; none of it was imported: transfer it again")
    header = next(_parts(file, size - DIGEST), (b"", None))[1]
    if not isinstance(header, Header):
        raise BundleError("this bundle cannot be read: its first part is not a header")
    return header


class Imported(msgspec.Struct, kw_only=True):
    """The outcomes of the facts so far."""

    appended: int = 0
    duplicates: int = 0
    own: int = 0
    """From the importing zone itself, which has them already."""
    skipped: int = 0
    """Left out on request."""
    missed: int = 0
    """Already expired when the bundle was exported."""


class Import:
    """Imports a bundle into a boundary, directly or through a client. Safe to repeat."""

    def __init__(self, side: Boundary | AsyncBoundaryClient, zone: str, skip: Iterable[int] = ()) -> None:
        self._receiver: Receiver = receiver_of(side)
        self._zone = zone
        self._skip = frozenset(skip)
        self._waiting: list[StoredFact] = []
        self._refused: dict[tuple[str, str], str] = {}
        self.done = Imported()

    async def run(self, file: BinaryIO, progress: Progress = lambda size: None) -> None:
        """Import a bundle that `check` accepted.

        Raise `BundleError` at a fact that cannot be imported; those before it are imported.
        """
        end = os.fstat(file.fileno()).st_size - DIGEST
        at = len(MAGIC)
        for kind, part in _parts(file, end):
            if kind == b"O":
                await self._take_object(file, part)
            elif kind == b"F":
                await self._take_fact(part)
            elif kind == b"G":
                self.done.missed += part.last_missing - part.first_missing + 1
            progress(file.tell() - at)
            at = file.tell()
        await self._append()

    async def _take_object(self, file: BinaryIO, ref: ObjectRef) -> None:
        try:
            if await self._receiver.lacks(ref):
                async with aclosing(_pieces(file, ref.size)) as pieces:
                    await self._receiver.keep(ref, pieces)
        except BoundaryError as error:
            if error.retryable:
                raise
            # An error only if a fact that is not skipped needs it.
            self._refused[ref.bucket, ref.key] = str(error)

    async def _take_fact(self, fact: StoredFact) -> None:
        if fact.offset in self._skip:
            self.done.skipped += 1
            return
        if fact.envelope.from_zone == self._zone:
            self.done.own += 1
            return
        ref = artifact_of(fact.fact)
        if ref is not None and (why := self._refused.get((ref.bucket, ref.key))):
            await self._append()
            raise _failed_import(fact, why)
        self._waiting.append(fact)
        if len(self._waiting) >= PAGE:
            await self._append()

    async def _append(self) -> None:
        facts, self._waiting = self._waiting, []
        appended, refused = await append_until_refused(self._receiver, facts)
        known = sum(each.duplicate for each in appended)
        self.done.duplicates += known
        self.done.appended += len(appended) - known
        if refused is not None:
            raise _failed_import(*refused)


def _failed_import(fact: StoredFact, why: str) -> BundleError:
    return BundleError(
        f"fact {fact.message_id!r} at offset {fact.offset} of the bundle cannot be imported: {why} (those before it "
        f"are imported; to continue without it, repeat with --skip {fact.offset})"
    )


def _parts(file: BinaryIO, end: int) -> Iterator[tuple[bytes, Any]]:
    """Yield the kind and content of each part. An object's bytes may be read before the next part, or ignored."""
    file.seek(len(MAGIC))
    while file.tell() < end:
        place = file.tell()
        kind = file.read(KIND)
        length = int.from_bytes(file.read(LENGTH), "big")
        try:
            part = _READ[kind](file.read(min(length, LARGEST_PART)))
        except Exception as error:  # noqa: BLE001  whatever the parser raises
            raise BundleError(
                f"the part at byte {place} cannot be read: {error!r}; this bundle was not made by onceward"
            ) from None
        following = place + KIND + LENGTH + length + (part.size if kind == b"O" else 0)
        yield kind, part
        file.seek(following)


def _header(body: bytes) -> Header:
    header = msgspec.json.decode(body, type=Header)
    if not 0 <= header.since <= header.last:
        raise ValueError(f"no facts are above {header.since} and up to {header.last}")
    return header


def _object(body: bytes) -> ObjectRef:
    ref = msgspec.json.decode(body, type=ObjectRef)
    if ref.size < 0:
        raise ValueError(f"an object cannot have {ref.size} bytes")
    return ref


def _gap(body: bytes) -> Gap:
    gap = msgspec.json.decode(body, type=Gap)
    if not 1 <= gap.first_missing <= gap.last_missing:
        raise ValueError(f"no offsets are from {gap.first_missing} to {gap.last_missing}")
    return gap


_READ: dict[bytes, Callable[[bytes], Any]] = {
    b"H": _header,
    b"O": _object,
    b"F": lambda body: from_pb(pb.StoredFact.from_binary(body)),
    b"G": _gap,
}


async def _pieces(file: BinaryIO, size: int) -> AsyncGenerator[bytes]:
    while size and (piece := await asyncio.to_thread(file.read, min(size, PIECE))):
        size -= len(piece)
        yield piece
