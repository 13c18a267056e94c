"""The boundary's calls: requests from the wire are counted, logged, and passed to the boundary."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward.boundary import wire
from onceward.boundary.boundary import Boundary
from onceward.boundary.errors import BoundaryError, Canceled, ConflictingDuplicate, InvalidArgument
from onceward.boundary.server.codecs import ReadyPage, refusal
from onceward.boundary.v1 import boundary_pb as pb
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

LARGEST_UNARY = 32 * 1024 * 1024
"""Bytes of one message. Larger objects are sent in pieces."""
DRAIN = 10.0
"""Seconds for the rest of an upload that is refused."""
NOTHING: Mapping[str, object] = {}
OPERATIONS = ("append", "fetch", "confirm", "remove", "put", "get")

T = TypeVar("T")


class BoundaryRpc:
    """Implements the service."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._metrics = boundary.metrics
        self._reported_gaps: dict[str, int] = {}
        """The last missing fact that was logged, by consumer: a cursor that stays reports its gap with every page."""
        self._latency = {each: self._metrics.latency.labels(each).observe for each in OPERATIONS}

    async def append_fact(self, request: pb.AppendFactRequest, ctx: Any) -> pb.AppendFactResponse:
        envelope = request.envelope
        about = {} if envelope is None else {"message_id": envelope.message_id, "zone": envelope.from_zone}
        return await self._answer("append", self._append(request), about)

    async def _append(self, request: pb.AppendFactRequest) -> pb.AppendFactResponse:
        if not request.has_field("envelope"):
            raise InvalidArgument("envelope", "is missing")
        if not request.has_field("fact"):
            raise InvalidArgument("fact", "is missing")
        assert request.envelope is not None
        assert request.fact is not None
        began = time.perf_counter()
        metrics = self._metrics
        metrics.appends.inc()
        envelope = wire.envelope_of(request.envelope)
        fact = wire.fact_of(request.fact)
        record = wire.record_of(request.envelope.to_binary(), request.fact.to_binary())
        try:
            appended = await self._boundary.append(envelope, fact, record)
        except BoundaryError as error:
            metrics.append_failures.labels(error.reason or error.code).inc()
            if isinstance(error, ConflictingDuplicate):
                metrics.conflicts.inc()
            raise
        metrics.append_latency.observe(time.perf_counter() - began)
        if appended.duplicate:
            metrics.duplicates.inc()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "appended",
                extra={
                    "message_id": envelope.message_id,
                    "offset": appended.offset,
                    "zone": envelope.from_zone,
                    "outcome": "duplicate" if appended.duplicate else "appended",
                },
            )
        return pb.AppendFactResponse(offset=appended.offset, duplicate=appended.duplicate)

    async def fetch_facts(self, request: pb.FetchFactsRequest, ctx: Any) -> Any:
        if request.wait_ms > 0:
            with suppress(BoundaryError):  # the fetch says what is wrong
                await self._boundary.await_facts(
                    request.consumer_name, request.wait_after, request.wait_ms / 1000
                )
        return await self._answer("fetch", self._fetch(request), {"consumer": request.consumer_name})

    async def _fetch(self, request: pb.FetchFactsRequest) -> ReadyPage:
        self._metrics.fetches.inc()
        records, gap = await self._boundary.fetch(request.consumer_name, request.limit, request.max_bytes)
        self._metrics.fetched.inc(len(records))
        if gap is not None and gap.last_missing > self._reported_gaps.get(request.consumer_name, 0):
            self._reported_gaps[request.consumer_name] = gap.last_missing
            _log.warning(
                "consumer %s missed facts %d to %d: they have expired",
                request.consumer_name,
                gap.first_missing,
                gap.last_missing,
                extra={"consumer": request.consumer_name, "offset": gap.first_missing, "outcome": "gap"},
            )
        return ReadyPage(wire.page_bytes(records, gap, await self._boundary.log_begins_at()))

    async def confirm_receipt(self, request: pb.ConfirmReceiptRequest, ctx: Any) -> pb.ConfirmReceiptResponse:
        about = {"consumer": request.consumer_name, "offset": request.offset}
        return await self._answer("confirm", self._confirm(request), about)

    async def _confirm(self, request: pb.ConfirmReceiptRequest) -> pb.ConfirmReceiptResponse:
        self._metrics.confirms.inc()
        position = await self._boundary.confirm(request.consumer_name, request.offset)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "confirmed",
                extra={"consumer": request.consumer_name, "offset": position, "outcome": "confirmed"},
            )
        return pb.ConfirmReceiptResponse(cursor_advanced_to=position)

    async def remove_consumer(self, request: pb.RemoveConsumerRequest, ctx: Any) -> pb.RemoveConsumerResponse:
        about = {"consumer": request.consumer_name}
        return await self._answer("remove", self._remove(request.consumer_name), about)

    async def _remove(self, name: str) -> pb.RemoveConsumerResponse:
        offset = await self._boundary.remove_consumer(name)
        fields = {"consumer": name, "offset": offset, "outcome": "removed"}
        _log.warning("removed consumer %s, which had confirmed offset %d", name, offset, extra=fields)
        return pb.RemoveConsumerResponse(offset=offset)

    async def put_object(self, request: pb.PutObjectRequest, ctx: Any) -> pb.PutObjectResponse:
        async def whole() -> AsyncIterator[bytes]:
            yield request.blob

        return await self._answer("put", self._put(request.bucket, request.key, whole(), request.media_type))

    async def put_object_stream(
        self, request: AsyncIterator[pb.PutObjectChunk], ctx: Any
    ) -> pb.PutObjectResponse:
        return await self._answer("put", self._put_stream(request))

    async def _put_stream(self, chunks: AsyncIterator[pb.PutObjectChunk]) -> pb.PutObjectResponse:
        chunks = _readable(chunks)
        first = await anext(chunks, None)
        if first is None:
            raise InvalidArgument("bucket", "is missing: the first piece of an object names bucket and key")

        async def data() -> AsyncIterator[bytes]:
            yield first.data
            async for chunk in chunks:
                if (chunk.bucket or first.bucket, chunk.key or first.key) != (first.bucket, first.key):
                    raise InvalidArgument("key", "names another object than the first piece of this upload")
                if not chunk.data:  # a call could be held with them forever
                    raise InvalidArgument(
                        "data", "is empty: only the first piece of an object may have no data"
                    )
                yield chunk.data

        try:
            return await self._put(first.bucket, first.key, data(), first.media_type)
        except BoundaryError:
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN):
                    async for _ in chunks:  # a client that is still sending does not read
                        pass
            raise

    async def _put(
        self, bucket: str, key: str, data: AsyncIterator[bytes], media_type: str
    ) -> pb.PutObjectResponse:
        self._metrics.objects.inc()
        ref = await self._boundary.put(bucket, key, data, media_type)
        return pb.PutObjectResponse(bucket=ref.bucket, key=ref.key, digest=ref.digest, size=ref.size)

    async def get_object(self, request: pb.GetObjectRequest, ctx: Any) -> pb.GetObjectResponse:
        return await self._answer("get", self._get(request))

    async def _get(self, request: pb.GetObjectRequest) -> pb.GetObjectResponse:
        ref, chunks = await self._boundary.get(request.bucket, request.key)
        if ref.size > LARGEST_UNARY:
            raise InvalidArgument(
                "key", f"names an object of {ref.size} bytes, too large for one message; use GetObjectStream"
            )
        blob = b"".join([chunk async for chunk in chunks])
        return pb.GetObjectResponse(blob=blob, digest=ref.digest, size=ref.size, media_type=ref.media_type)

    async def get_object_stream(
        self, request: pb.GetObjectRequest, ctx: Any
    ) -> AsyncIterator[pb.GetObjectChunk]:
        try:
            ref, chunks = await self._boundary.get(request.bucket, request.key)
            yield pb.GetObjectChunk(digest=ref.digest, size=ref.size, media_type=ref.media_type)
            async for chunk in chunks:
                yield pb.GetObjectChunk(data=chunk)
        except BoundaryError as error:
            raise self._refuse("get", error, {}) from None

    def _refuse(self, operation: str, error: BoundaryError, about: Mapping[str, object]) -> ConnectError:
        self._metrics.refused.labels(operation, error.code).inc()
        _log.warning("%s refused: %s", operation, error, extra={**about, "outcome": error.code})
        return refusal(error)

    async def _answer(self, operation: str, call: Awaitable[T], about: Mapping[str, object] = NOTHING) -> T:
        began = time.perf_counter()
        try:
            return await call
        except BoundaryError as error:
            raise self._refuse(operation, error, about) from None
        except ConnectError as error:  # refused by the codec, before there was a message
            self._metrics.refused.labels(operation, error.code.value).inc()
            _log.warning("%s refused: %s", operation, error.message, extra={"outcome": error.code.value})
            raise
        except Exception as error:  # noqa: BLE001  reported to the caller and logged
            self._metrics.refused.labels(operation, BoundaryError.code).inc()
            _log.exception("%s failed", operation, extra={"outcome": BoundaryError.code})
            raise refusal(BoundaryError(f"{operation} failed: {error!r}; see the server's log")) from None
        finally:
            self._latency[operation](time.perf_counter() - began)


async def _readable(messages: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield the messages of a stream. Whatever is wrong with it is the caller's mistake, or the caller is gone."""
    try:
        async for message in messages:
            yield message
    except ConnectError as error:
        if error.code is Code.CANCELED:
            raise Canceled(
                "the client disconnected before its request was complete; nothing was stored"
            ) from None
        if error.details:  # ours
            raise
        raise InvalidArgument("request", f"cannot be read: {error.message}") from None
    except OSError as error:
        raise Canceled(
            f"the connection broke before the request was complete: {error}; nothing was stored"
        ) from None
