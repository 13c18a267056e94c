"""Talking to a boundary: `BoundaryClient` for threads, `AsyncBoundaryClient` for asyncio.

Both make every call once: nothing is tried again behind your back. What is worth trying again says so (`retryable`),
and an append is safe to repeat with the same id and content.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec
from connectrpc.errors import ConnectError
from protobuf import Message

from onceward.boundary import errors, wire
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, Page
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryServiceClient, BoundaryServiceClientSync
from onceward.now import now

CHUNK = 256 * 1024
INLINE = 1024 * 1024
"""Bytes; a larger object is sent and fetched in pieces."""


class _Client:
    """Written for both modes: `_call` blocks in one and awaits in the other."""

    def __init__(self, rpc: Any) -> None:
        self._rpc = rpc

    async def _call(self, method: str, request: Message) -> Any:
        raise NotImplementedError

    async def _append(self, envelope: Envelope, fact: Fact) -> Appended:
        request = pb.AppendFactRequest(envelope=wire.as_pb_envelope(envelope), fact=wire.as_pb_fact(fact))
        answer = await self._call("append_fact", request)
        return Appended(answer.offset, answer.duplicate)

    async def _fetch(self, consumer_name: str, limit: int) -> Page:
        request = pb.FetchFactsRequest(consumer_name=consumer_name, limit=limit)
        return wire.page(await self._call("fetch_facts", request))

    async def _confirm(self, consumer_name: str, offset: int) -> int:
        request = pb.ConfirmReceiptRequest(consumer_name=consumer_name, offset=offset)
        return int((await self._call("confirm_receipt", request)).cursor_advanced_to)

    async def _put(self, bucket: str, key: str, blob: bytes, media_type: str) -> ObjectRef:
        request = pb.PutObjectRequest(bucket=bucket, key=key, blob=blob, media_type=media_type)
        return _ref(await self._call("put_object", request), media_type)

    async def _get(self, bucket: str, key: str) -> tuple[bytes, ObjectRef]:
        answer = await self._call("get_object", pb.GetObjectRequest(bucket=bucket, key=key))
        ref = ObjectRef(
            bucket=bucket, key=key, digest=answer.digest, size=answer.size, media_type=answer.media_type
        )
        return answer.blob, ref


class BoundaryClient(_Client):
    """A boundary at a URL, for threads. Safe to share among them."""

    def __init__(self, url: str, *, timeout: float | None = 30.0) -> None:
        rpc = BoundaryServiceClientSync(
            url, send_compression=None, accept_compression=(), timeout_ms=_ms(timeout)
        )
        super().__init__(rpc)

    async def _call(self, method: str, request: Message) -> Any:
        try:
            return getattr(self._rpc, method)(request)
        except ConnectError as error:
            raise translated(error) from error

    def append(self, envelope: Envelope, fact: Fact) -> Appended:
        """Make a fact durable. Repeat it with the same id and content until it answers."""
        return now(self._append(envelope, fact))

    def fetch(self, consumer_name: str, limit: int = 100) -> Page:
        """The next facts of this consumer; the same again until they are confirmed."""
        return now(self._fetch(consumer_name, limit))

    def confirm(self, consumer_name: str, offset: int) -> int:
        """Everything up to this offset is handled durably. Returns where the cursor stands."""
        return now(self._confirm(consumer_name, offset))

    def put(self, bucket: str, key: str, blob: bytes, media_type: str = "") -> ObjectRef:
        """Keep an object that fits into memory. `put_stream` takes others."""
        if len(blob) > INLINE:
            return self.put_stream(bucket, key, _pieces(blob), media_type)
        return now(self._put(bucket, key, blob, media_type))

    def put_stream(self, bucket: str, key: str, data: Iterable[bytes], media_type: str = "") -> ObjectRef:
        """Keep an object of any size."""

        def chunks() -> Iterator[pb.PutObjectChunk]:
            yield pb.PutObjectChunk(bucket=bucket, key=key, media_type=media_type)
            for piece in data:
                yield pb.PutObjectChunk(data=piece)

        try:
            return _ref(self._rpc.put_object_stream(chunks()), media_type)
        except ConnectError as error:
            raise translated(error) from error

    def get(self, bucket: str, key: str) -> tuple[bytes, ObjectRef]:
        """An object that fits into memory, not verified: see `onceward.boundary.artifacts`."""
        parts: list[bytes] = []
        ref = self.get_stream(bucket, key, parts.append)
        return b"".join(parts), ref

    def get_stream(self, bucket: str, key: str, write: Callable[[bytes], object]) -> ObjectRef:
        """An object of any size, piece by piece."""
        ref: ObjectRef | None = None
        try:
            for chunk in self._rpc.get_object_stream(pb.GetObjectRequest(bucket=bucket, key=key)):
                if ref is None:
                    ref = _described(bucket, key, chunk)
                if chunk.data:
                    write(chunk.data)
        except ConnectError as error:
            raise translated(error) from error
        assert ref is not None
        return ref

    def close(self) -> None:
        self._rpc.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncBoundaryClient(_Client):
    """`BoundaryClient` for asyncio: the same methods, awaited."""

    def __init__(self, url: str, *, timeout: float | None = 30.0) -> None:
        rpc = BoundaryServiceClient(
            url, send_compression=None, accept_compression=(), timeout_ms=_ms(timeout)
        )
        super().__init__(rpc)

    async def _call(self, method: str, request: Message) -> Any:
        try:
            return await getattr(self._rpc, method)(request)
        except ConnectError as error:
            raise translated(error) from error

    async def append(self, envelope: Envelope, fact: Fact) -> Appended:
        return await self._append(envelope, fact)

    async def fetch(self, consumer_name: str, limit: int = 100) -> Page:
        return await self._fetch(consumer_name, limit)

    async def confirm(self, consumer_name: str, offset: int) -> int:
        return await self._confirm(consumer_name, offset)

    async def put(self, bucket: str, key: str, blob: bytes, media_type: str = "") -> ObjectRef:
        if len(blob) > INLINE:

            async def pieces() -> AsyncIterator[bytes]:
                for piece in _pieces(blob):
                    yield piece

            return await self.put_stream(bucket, key, pieces(), media_type)
        return await self._put(bucket, key, blob, media_type)

    async def put_stream(
        self, bucket: str, key: str, data: AsyncIterator[bytes], media_type: str = ""
    ) -> ObjectRef:
        async def chunks() -> AsyncIterator[pb.PutObjectChunk]:
            yield pb.PutObjectChunk(bucket=bucket, key=key, media_type=media_type)
            async for piece in data:
                yield pb.PutObjectChunk(data=piece)

        try:
            return _ref(await self._rpc.put_object_stream(chunks()), media_type)
        except ConnectError as error:
            raise translated(error) from error

    async def get(self, bucket: str, key: str) -> tuple[bytes, ObjectRef]:
        parts: list[bytes] = []
        ref = await self.get_stream(bucket, key, parts.append)
        return b"".join(parts), ref

    async def get_stream(self, bucket: str, key: str, write: Callable[[bytes], object]) -> ObjectRef:
        ref: ObjectRef | None = None
        try:
            async for chunk in self._rpc.get_object_stream(pb.GetObjectRequest(bucket=bucket, key=key)):
                if ref is None:
                    ref = _described(bucket, key, chunk)
                if chunk.data:
                    write(chunk.data)
        except ConnectError as error:
            raise translated(error) from error
        assert ref is not None
        return ref

    async def close(self) -> None:
        await self._rpc.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def message_id_for(*parts: str | int) -> str:
    """An id made from what happened, such as ("batch", "B1042", "step_completed", 7): the same for every retry.

    Give it all that makes the event unlike every other, and nothing that a retry would have anew: no time, nothing
    random, no counter that starts again.
    """
    if not parts or any(part is None or part == "" for part in parts):
        raise ValueError(
            "a message id needs parts, none of them empty: what kind of thing, which one, what happened"
        )
    for part in parts:
        if not isinstance(part, (str, int)) or isinstance(part, bool):
            raise TypeError(
                f"the parts of a message id are texts and whole numbers, not {type(part).__name__}"
            )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def envelope_for(message_id: str, *, from_zone: str, to_zone: str, **more: Any) -> Envelope:
    """An envelope with the time of now, which is no part of a fact's identity."""
    produced_at = more.pop("produced_at_unix_ms", time.time_ns() // 1_000_000)
    return Envelope(
        message_id=message_id, from_zone=from_zone, to_zone=to_zone, produced_at_unix_ms=produced_at, **more
    )


def fact_of(subject: str, predicate: str, value: Any) -> Fact:
    """A fact whose object is this value."""
    return Fact(subject=subject, predicate=predicate, object_json=msgspec.json.encode(value).decode())


_BY_REASON: Mapping[str, type[BoundaryError]] = {
    "conflicting_duplicate": errors.ConflictingDuplicate,
    "object_conflict": errors.ObjectConflict,
    "artifact_missing": errors.ArtifactMissing,
    "backpressure": errors.Backpressure,
}
_BY_CODE: Mapping[str, type[BoundaryError]] = {
    "invalid_argument": errors.InvalidArgument,
    "out_of_range": errors.OffsetOutOfRange,
    "not_found": errors.NotFound,
    "permission_denied": errors.PermissionDenied,
    "unauthenticated": errors.Unauthenticated,
    "unavailable": errors.Unavailable,
    "deadline_exceeded": errors.Unavailable,
}


def translated(error: ConnectError) -> BoundaryError:
    """The error as it was raised on the other side."""
    detail = next((found for each in error.details if (found := each.value(pb.ErrorDetail))), None)
    reason = detail.reason if detail is not None else ""
    code = error.code.value
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code) or BoundaryError
    made = kind.__new__(kind)
    if isinstance(made, errors.ConflictingDuplicate) and detail is not None:
        made.original_offset = detail.original_offset
    made.args = (error.message,)
    if detail is not None and detail.field:
        made.field = detail.field
    return made


def _ref(answer: pb.PutObjectResponse, media_type: str) -> ObjectRef:
    return ObjectRef(
        bucket=answer.bucket, key=answer.key, digest=answer.digest, size=answer.size, media_type=media_type
    )


def _described(bucket: str, key: str, chunk: pb.GetObjectChunk) -> ObjectRef:
    return ObjectRef(
        bucket=bucket, key=key, digest=chunk.digest, size=chunk.size, media_type=chunk.media_type
    )


def _pieces(blob: bytes) -> Iterator[bytes]:
    for at in range(0, len(blob), CHUNK):
        yield blob[at : at + CHUNK]


def _ms(timeout: float | None) -> int | None:
    return None if timeout is None else int(timeout * 1000)
