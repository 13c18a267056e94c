"""Artifacts of facts: stored before the fact that refers to them, fetched by that reference, and verified.

A reference is a JSON object with bucket, key, digest, size and media_type; other entries belong to the fact. An
artifact may arrive later than the fact that refers to it, so *not found* is retried for a while before it is an error.
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

from onceward._files.private import open_new
from onceward.boundary.client.calls import MOST_CALLS, Calls
from onceward.boundary.errors import BoundaryError, InvalidArgument, NotFound
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, StoredFact, fact_of
from onceward.errors import ConfigurationError, OncewardError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class ArtifactError(OncewardError):
    """An artifact cannot be used. The fact that refers to it cannot be processed, and must not be confirmed."""


class IntegrityError(ArtifactError):
    """The bytes received are not those that the fact refers to."""


class ArtifactMissingError(ArtifactError):
    """The artifact does not exist, and did not arrive in time."""


class BadReferenceError(ArtifactError):
    """The fact's object is not a reference to an artifact."""


class _Reference(msgspec.Struct, frozen=True):
    """A reference as it appears in object_json. All fields are required."""

    bucket: str
    key: str
    digest: str
    size: int
    media_type: str


def reference_of(fact: StoredFact | Fact) -> ObjectRef:
    """Return the artifact that the fact refers to. Raise `BadReferenceError` if it does not refer to one."""
    plain = fact.fact if isinstance(fact, StoredFact) else fact
    try:
        found = msgspec.json.decode(plain.object_json, type=_Reference)
    except msgspec.DecodeError as error:
        raise BadReferenceError(
            f"the object of {plain.subject} {plain.predicate} is not a reference to an artifact: {error}; it needs "
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
    """Return an artifact's reference for a fact's object."""
    value: dict[str, Any] = msgspec.to_builtins(ref)
    return {**value, "file_name": file_name} if file_name else value


class Check:
    """Verifies pieces as they arrive. `conclude` raises `IntegrityError` if they are not the artifact."""

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
            raise IntegrityError(f"object {name} has {self._size} bytes, but the fact says {self._ref.size}")
        found = f"sha256:{self._digest.hexdigest()}"
        if found != self._ref.digest:
            raise IntegrityError(f"object {name} has digest {found}, but the fact says {self._ref.digest}")


class Landing:
    """The file that an artifact is written to. Every method blocks on the disk."""

    def __init__(self, target: Any) -> None:
        self._path = ""
        self._part = ""
        if hasattr(target, "write"):
            if not target.seekable():
                raise ConfigurationError(
                    f"an artifact must be written to a path or a seekable file, not to {target!r}"
                )
            self._file: BinaryIO = target
        else:
            self._path = os.path.abspath(target)
            folder, name = os.path.split(self._path)
            self._part = os.path.join(folder, f".{name[:50]}.{secrets.token_hex(8)}.part")
            self._file = open_new(self._part)  # closed by keep and drop
        self._start = self._file.tell()

    def restart(self) -> None:
        """Discard what was written, for another try."""
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
            self.restart()
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
            calls, ref, verify, begin=landing.restart, write=lambda piece: calls.port.do(landing.write, piece)
        )
        await calls.port.do(landing.keep)
    except BaseException:
        landing.drop()
        raise
    return ref


async def _receive(
    calls: Calls, ref: ObjectRef, verify: bool, begin: Callable[[], None], write: Callable[[bytes], Any]
) -> None:
    """Retry as the guide says: on *not found* and on transient errors, ten calls, waiting 100 ms at first."""

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
        await calls.patiently(once, worth=_may_recover, what=f"object {ref.bucket}/{ref.key}")
    except BoundaryError as error:
        if not _may_recover(error):
            raise
        raise ArtifactMissingError(
            f"object {ref.bucket}/{ref.key} could not be fetched in {MOST_CALLS} calls; last error: {error}"
        ) from error


def _may_recover(error: BoundaryError) -> bool:
    return error.retryable or isinstance(error, NotFound)


class ArtifactPlace(NamedTuple):
    """Where to put an artifact."""

    bucket: str
    key: str
    media_type: str


async def append_with(
    calls: Calls,
    envelope: Envelope,
    subject: str,
    predicate: str,
    artifact: Any,
    into: ArtifactPlace,
    more: Mapping[str, Any],
) -> Appended:
    clash = sorted(_Reference.__struct_fields__ & more.keys())
    if clash:
        raise InvalidArgument("more", f"must not have {', '.join(clash)}: the reference sets these")
    if isinstance(artifact, bytes):
        ref = await calls.put(into.bucket, into.key, artifact, into.media_type)
    else:
        ref = await calls.put_file(into.bucket, into.key, artifact, into.media_type)
    fact = fact_of(subject, predicate, {**more, **as_reference(ref)})
    if not envelope.object_media_type:
        envelope = msgspec.structs.replace(envelope, object_media_type=into.media_type)
    return await calls.append(envelope, fact)


def sync_directory(directory: str | os.PathLike[str]) -> None:
    """Make a new name in a directory durable, which the fsync of the file itself does not."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
