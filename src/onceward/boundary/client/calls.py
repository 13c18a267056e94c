"""The calls of a boundary, shared by both clients, over a port that blocks or awaits.

Every call is made once, and raises the error that the boundary raised.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from connectrpc.errors import ConnectError

from onceward._process.stop import LAST_WAIT
from onceward._secrets import mask_url
from onceward.backoff import Backoff
from onceward.boundary import errors, wire
from onceward.boundary.client.errors import failure
from onceward.boundary.client.transport import BoundaryPort
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, Page
from onceward.boundary.v1 import boundary_pb as pb
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

CHUNK = 256 * 1024
INLINE = 1024 * 1024
"""Bytes. A larger object is sent in pieces."""
MOST_CALLS = 10
PATIENCE = Backoff(0.1)
"""Waits between the calls of `patiently`: 51.1 s in total for ten calls."""

T = TypeVar("T")


class Calls:
    """The calls of a boundary, over a port."""

    def __init__(self, url: str, port: BoundaryPort) -> None:
        self.url = url
        self.port = port

    async def append(self, envelope: Envelope, fact: Fact) -> Appended:
        request = pb.AppendFactRequest(envelope=wire.as_pb_envelope(envelope), fact=wire.as_pb_fact(fact))
        answer = await self._ask("append_fact", request)
        return Appended(answer.offset, answer.duplicate)

    async def append_until_durable(self, envelope: Envelope, fact: Fact) -> Appended:
        return await self.patiently(
            lambda: self.append(envelope, fact),
            worth=lambda error: error.retryable,
            what=f"append of {envelope.message_id}",
        )

    async def fetch(
        self, consumer_name: str, limit: int, max_bytes: int, wait: float = 0.0, wait_after: int = 0
    ) -> Page:
        request = pb.FetchFactsRequest(
            consumer_name=consumer_name,
            limit=limit,
            max_bytes=max_bytes,
            wait_ms=max(int(wait * 1000), 0),
            wait_after=wait_after,
        )
        return wire.page(await self._ask("fetch_facts", request, grace=0.0 if wait > 0 else LAST_WAIT))

    async def confirm(self, consumer_name: str, offset: int) -> int:
        request = pb.ConfirmReceiptRequest(consumer_name=consumer_name, offset=offset)
        return int((await self._ask("confirm_receipt", request)).cursor_advanced_to)

    async def remove_consumer(self, consumer_name: str) -> int:
        request = pb.RemoveConsumerRequest(consumer_name=consumer_name)
        return int((await self._ask("remove_consumer", request)).offset)

    async def put(self, bucket: str, key: str, blob: bytes, media_type: str) -> ObjectRef:
        if len(blob) > INLINE:
            pieces = (blob[at : at + CHUNK] for at in range(0, len(blob), CHUNK))
            return await self.put_stream(bucket, key, pieces, media_type)
        request = pb.PutObjectRequest(bucket=bucket, key=key, blob=blob, media_type=media_type)
        return _ref(await self._ask("put_object", request), media_type)

    async def put_stream(self, bucket: str, key: str, data: Any, media_type: str) -> ObjectRef:
        return await self._put_pieces(bucket, key, self.port.each(data), media_type)

    async def put_file(self, bucket: str, key: str, path: Any, media_type: str) -> ObjectRef:
        with open(path, "rb") as file:

            async def pieces() -> AsyncIterator[bytes]:
                while piece := await self.port.do(file.read, CHUNK):
                    yield piece

            return await self._put_pieces(bucket, key, pieces(), media_type)

    async def get(self, bucket: str, key: str) -> tuple[bytes, ObjectRef]:
        parts: list[bytes] = []
        ref = await self.get_stream(bucket, key, parts.append)
        return b"".join(parts), ref

    async def get_stream(
        self,
        bucket: str,
        key: str,
        write: Callable[[bytes], object],
        begin: Callable[[ObjectRef], object] = lambda ref: None,
    ) -> ObjectRef:
        async def plainly(piece: bytes) -> object:
            return write(piece)

        return await self.receive(bucket, key, plainly, begin)

    async def pieces(self, bucket: str, key: str) -> AsyncGenerator[bytes]:
        request = pb.GetObjectRequest(bucket=bucket, key=key)
        async with aclosing(self._answers("get_object_stream", request)) as chunks:
            async for chunk in chunks:
                if chunk.data:
                    yield chunk.data

    async def receive(
        self,
        bucket: str,
        key: str,
        write: Callable[[bytes], Awaitable[object]],
        begin: Callable[[ObjectRef], object] = lambda ref: None,
    ) -> ObjectRef:
        """Pass every piece of an object to `write`, in order. What `write` raises is raised."""
        request = pb.GetObjectRequest(bucket=bucket, key=key)
        ref: ObjectRef | None = None
        async with aclosing(self._answers("get_object_stream", request)) as chunks:
            async for chunk in chunks:
                if ref is None:
                    ref = ObjectRef(
                        bucket=bucket,
                        key=key,
                        digest=chunk.digest,
                        size=chunk.size,
                        media_type=chunk.media_type,
                    )
                    begin(ref)
                if chunk.data:
                    await write(chunk.data)
        if ref is None:
            raise errors.Unavailable(
                f"{mask_url(self.url)} sent nothing for object {bucket}/{key}; try again"
            )
        return ref

    async def patiently(
        self, call: Callable[[], Awaitable[T]], *, worth: Callable[[BoundaryError], bool], what: str
    ) -> T:
        """Call until it succeeds, ten times at most, with exponential waits. Raise the last error, or at once one that
        is not worth another try."""
        for number in range(MOST_CALLS - 1):
            wait, left = PATIENCE.delay(number), MOST_CALLS - 1 - number
            try:
                return await call()
            except BoundaryError as error:
                if not worth(error):
                    raise
                _log.info("%s: %s; %d more tries, the next in %.1f s", what, error, left, wait)
            await self.port.sleep(wait)
        return await call()

    async def _put_pieces(
        self, bucket: str, key: str, pieces: AsyncIterator[bytes], media_type: str
    ) -> ObjectRef:
        broken: list[Exception] = []

        async def messages() -> AsyncIterator[Any]:
            yield pb.PutObjectChunk(bucket=bucket, key=key, media_type=media_type)
            try:
                async for piece in pieces:
                    if piece:
                        yield pb.PutObjectChunk(data=piece)
            except Exception as error:
                broken.append(error)
                raise

        try:
            return _ref(await self.port.send("put_object_stream", messages()), media_type)
        except ConnectError as error:
            if broken:  # the caller's data failed, not the boundary, which stores none of it
                raise broken[0] from None
            raise failure(error, self.url) from error

    async def _ask(self, method: str, request: Any, grace: float = LAST_WAIT) -> Any:
        try:
            return await self.port.ask(method, request, grace)
        except ConnectError as error:
            raise failure(error, self.url) from error

    async def _answers(self, method: str, request: Any) -> AsyncGenerator[Any]:
        try:
            async with aclosing(self.port.answers(method, request)) as answers:
                async for answer in answers:
                    yield answer
        except ConnectError as error:
            raise failure(error, self.url) from error


def _ref(answer: pb.PutObjectResponse, media_type: str) -> ObjectRef:
    return ObjectRef(
        bucket=answer.bucket, key=answer.key, digest=answer.digest, size=answer.size, media_type=media_type
    )
