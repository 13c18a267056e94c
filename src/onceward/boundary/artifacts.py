"""Artifacts of facts: found by the reference in a fact, fetched, verified; and put before the fact that names them.

A reference is a JSON object with bucket, key, digest, size and media_type; what else it has is the fact's own. An
artifact may arrive later than the fact that names it, so *not found* is tried again for a while before it is an error.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import msgspec

from onceward.boundary.client.calls import MOST_CALLS, Calls
from onceward.boundary.errors import BoundaryError, InvalidArgument, NotFound
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, StoredFact, fact_of
from onceward.errors import ConfigurationError, OncewardError

# What a file's own fsync does not do: a new name in a directory is durable only when the directory is.


def sync_directory(directory: str | os.PathLike[str]) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ArtifactError(OncewardError):
    """An artifact cannot be used. The fact that names it cannot be processed, and must not be confirmed."""


class IntegrityError(ArtifactError):
    """What came is not what the fact speaks of."""


class ArtifactMissingError(ArtifactError):
    """It is not there, and has not come in time."""


class BadReferenceError(ArtifactError):
    """The fact's object is no reference to an artifact."""


class _Reference(msgspec.Struct, frozen=True):
    """As it is in object_json. All of it has to be there."""

    bucket: str
    key: str
    digest: str
    size: int
    media_type: str


def reference_of(fact: StoredFact | Fact) -> ObjectRef:
    """What the fact's object refers to."""
    plain = fact.fact if isinstance(fact, StoredFact) else fact
    try:
        found = msgspec.json.decode(plain.object_json, type=_Reference)
    except msgspec.DecodeError as error:
        raise BadReferenceError(
            f"the object of {plain.subject} {plain.predicate} is no reference to an artifact: {error}; it needs "
            "bucket, key, digest, size and media_type"
        ) from None
    digest = found.digest.lower()
    if not _DIGEST.fullmatch(digest):
        raise BadReferenceError(
            f"the digest in the object of {plain.subject} {plain.predicate} must be sha256:<64 hexadecimal "
            f"digits>, not {found.digest!r:.80}"
        )
    return ObjectRef(
        bucket=found.bucket, key=found.key, digest=digest, size=found.size, media_type=found.media_type
    )


def as_reference(ref: ObjectRef, file_name: str | None = None) -> dict[str, Any]:
    """What a fact's object says of an artifact."""
    value: dict[str, Any] = msgspec.to_builtins(ref)
    return {**value, "file_name": file_name} if file_name else value


class Check:
    """Takes pieces as they come, and says in the end whether they are the artifact."""

    def __init__(self, ref: ObjectRef) -> None:
        self._ref = ref
        self._digest = hashlib.sha256()
        self._size = 0

    def add(self, piece: bytes) -> None:
        self._digest.update(piece)
        self._size += len(piece)

    def conclude(self) -> None:
        name = f"{self._ref.bucket}/{self._ref.key}"
        if self._size != self._ref.size:
            raise IntegrityError(f"object {name} has {self._size} bytes where the fact says {self._ref.size}")
        found = f"sha256:{self._digest.hexdigest()}"
        if found != self._ref.digest:
            raise IntegrityError(f"object {name} has digest {found} where the fact says {self._ref.digest}")


class Landing:
    """The file that an artifact is written to. Each method waits for a disk."""

    def __init__(self, target: Any) -> None:
        self._path = ""
        self._part = ""
        if hasattr(target, "write"):
            if not target.seekable():
                raise ConfigurationError(
                    f"an artifact goes to a path or to a seekable file, not to {target!r}"
                )
            self._file: BinaryIO = target
        else:
            self._path = os.path.abspath(target)
            folder, name = os.path.split(self._path)
            self._part = os.path.join(folder, f".{name[:50]}.{secrets.token_hex(8)}.part")
            self._file = open(self._part, "xb")  # noqa: SIM115  closed by keep and drop
        self._start = self._file.tell()

    def again(self) -> None:
        """Forget what was written: another try begins."""
        self._file.seek(self._start)
        self._file.truncate()

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def keep(self) -> None:
        self._file.flush()
        if not self._path:
            return
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)
        sync_directory(os.path.dirname(self._path))

    def drop(self) -> None:
        if not self._path:
            self.again()
            return
        self._file.close()
        with suppress(FileNotFoundError):
            os.unlink(self._part)


async def fetch(calls: Calls, fact: StoredFact | Fact, verify: bool) -> bytes:
    ref = reference_of(fact)
    parts: list[bytes] = []

    async def take(piece: bytes) -> None:
        parts.append(piece)

    await _receive(calls, ref, verify, begin=parts.clear, write=take)
    return b"".join(parts)


async def fetch_to(calls: Calls, fact: StoredFact | Fact, target: Any, verify: bool) -> ObjectRef:
    ref = reference_of(fact)
    landing = await calls.port.do(Landing, target)
    try:
        await _receive(
            calls, ref, verify, begin=landing.again, write=lambda piece: calls.port.do(landing.write, piece)
        )
        await calls.port.do(landing.keep)
    except BaseException:
        landing.drop()
        raise
    return ref


async def _receive(
    calls: Calls, ref: ObjectRef, verify: bool, begin: Callable[[], None], write: Callable[[bytes], Any]
) -> None:
    """The schedule of tries is the guide's: *not found* and what may pass, ten calls, from 100 ms."""

    async def once() -> None:
        check = Check(ref)
        begin()

        async def take(piece: bytes) -> None:
            check.add(piece)
            await write(piece)

        await calls.receive(ref.bucket, ref.key, take)
        if verify:
            check.conclude()

    try:
        await calls.patiently(once, worth=_may_come, what=f"object {ref.bucket}/{ref.key}")
    except BoundaryError as error:
        if not _may_come(error):
            raise
        raise ArtifactMissingError(
            f"object {ref.bucket}/{ref.key} could not be fetched in {MOST_CALLS} calls; the last said: {error}"
        ) from error


def _may_come(error: BoundaryError) -> bool:
    return error.retryable or isinstance(error, NotFound)


class Place(NamedTuple):
    """Where an artifact is put."""

    bucket: str
    key: str
    media_type: str


async def append_with(
    calls: Calls,
    envelope: Envelope,
    subject: str,
    predicate: str,
    artifact: Any,
    into: Place,
    more: Mapping[str, Any],
) -> Appended:
    clash = sorted(_Reference.__struct_fields__ & more.keys())
    if clash:
        raise InvalidArgument("more", f"must not have {', '.join(clash)}: these are the reference's own")
    if isinstance(artifact, bytes):
        ref = await calls.put(into.bucket, into.key, artifact, into.media_type)
    else:
        ref = await calls.put_file(into.bucket, into.key, artifact, into.media_type)
    fact = fact_of(subject, predicate, {**more, **as_reference(ref)})
    if not envelope.object_media_type:
        envelope = msgspec.structs.replace(envelope, object_media_type=into.media_type)
    return await calls.append(envelope, fact)
