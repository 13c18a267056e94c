"""The boundary on the wire: Connect, in JSON and binary, and gRPC, on one port; with /metrics, /livez and /readyz."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar, cast

import msgspec
from connectrpc.code import Code
from connectrpc.codec import proto_binary_codec
from connectrpc.errors import ConnectError

from onceward.boundary import wire
from onceward.boundary.errors import BoundaryError, ConflictingDuplicate, InvalidArgument
from onceward.boundary.model import LARGEST_FACT
from onceward.boundary.service import Boundary
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryService, BoundaryServiceASGIApplication

_log = logging.getLogger("onceward.boundary")

LARGEST_UNARY = 2 * LARGEST_FACT
"""Bytes of one message. Larger objects go in pieces."""
CHUNK = 256 * 1024


T = TypeVar("T")


class ReadyPage:
    """A `FetchFactsResponse` that is bytes already."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded


class BinaryCodec:
    """Protobuf; what is ready is sent as it is."""

    def name(self) -> str:
        return "proto"

    def encode(self, message: Any) -> bytes:
        if type(message) is ReadyPage:
            return message.encoded
        return bytes(message.to_binary())

    def decode(self, data: bytes | bytearray, message_class: Any) -> Any:
        return proto_binary_codec().decode(data, message_class)


class JsonCodec:
    """Protobuf's JSON. A field that nobody knows is refused: it is a misspelt one."""

    def name(self) -> str:
        return "json"

    def encode(self, message: Any) -> bytes:
        if type(message) is ReadyPage:
            message = pb.FetchFactsResponse.from_binary(message.encoded)
        return str(message.to_json()).encode()

    def decode(self, data: bytes | bytearray, message_class: Any) -> Any:
        try:
            return message_class.from_json(data, ignore_unknown_fields=False)
        except ConnectError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the parser says, it is the caller's message
            raise _refusal(InvalidArgument(_field_in(str(error)), f"cannot be read: {error}")) from None


class Service:
    """The calls, each as the service wants it."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._metrics = boundary.metrics

    async def append_fact(self, request: pb.AppendFactRequest, ctx: Any) -> pb.AppendFactResponse:
        return await self._counted("append", self._append(request))

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
            _log.warning(
                "append refused: %s",
                error,
                extra={"message_id": envelope.message_id, "zone": envelope.from_zone, "outcome": error.code},
            )
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
        return await self._counted("fetch", self._fetch(request))

    async def _fetch(self, request: pb.FetchFactsRequest) -> ReadyPage:
        self._metrics.fetches.inc()
        records, gap = await self._boundary.fetch(request.consumer_name, request.limit)
        self._metrics.fetched.inc(len(records))
        if gap is not None:
            _log.warning(
                "consumer %s missed facts %d to %d: they have expired",
                request.consumer_name,
                gap.first_missing,
                gap.last_missing,
                extra={"consumer": request.consumer_name, "offset": gap.first_missing, "outcome": "gap"},
            )
        return ReadyPage(wire.page_bytes(records, gap))

    async def confirm_receipt(self, request: pb.ConfirmReceiptRequest, ctx: Any) -> pb.ConfirmReceiptResponse:
        return await self._counted("confirm", self._confirm(request))

    async def _confirm(self, request: pb.ConfirmReceiptRequest) -> pb.ConfirmReceiptResponse:
        self._metrics.confirms.inc()
        position = await self._boundary.confirm(request.consumer_name, request.offset)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug(
                "confirmed",
                extra={"consumer": request.consumer_name, "offset": position, "outcome": "confirmed"},
            )
        return pb.ConfirmReceiptResponse(cursor_advanced_to=position)

    async def put_object(self, request: pb.PutObjectRequest, ctx: Any) -> pb.PutObjectResponse:
        async def whole() -> AsyncIterator[bytes]:
            yield request.blob

        return await self._counted("put", self._put(request.bucket, request.key, whole(), request.media_type))

    async def put_object_stream(
        self, request: AsyncIterator[pb.PutObjectChunk], ctx: Any
    ) -> pb.PutObjectResponse:
        return await self._counted("put", self._put_stream(request))

    async def _put_stream(self, chunks: AsyncIterator[pb.PutObjectChunk]) -> pb.PutObjectResponse:
        first = await anext(aiter(chunks), None)
        if first is None:
            raise InvalidArgument("bucket", "is missing: the first piece of an object names bucket and key")

        async def data() -> AsyncIterator[bytes]:
            yield first.data
            async for chunk in chunks:
                yield chunk.data

        return await self._put(first.bucket, first.key, data(), first.media_type)

    async def _put(
        self, bucket: str, key: str, data: AsyncIterator[bytes], media_type: str
    ) -> pb.PutObjectResponse:
        self._metrics.objects.inc()
        ref = await self._boundary.put(bucket, key, data, media_type)
        return pb.PutObjectResponse(bucket=ref.bucket, key=ref.key, digest=ref.digest, size=ref.size)

    async def get_object(self, request: pb.GetObjectRequest, ctx: Any) -> pb.GetObjectResponse:
        return await self._counted("get", self._get(request))

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
            self._metrics.refused.labels("get", error.code).inc()
            raise _refusal(error) from None

    async def _counted(self, operation: str, call: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await call
        except BoundaryError as error:
            self._metrics.refused.labels(operation, error.code).inc()
            raise _refusal(error) from None
        finally:
            self._metrics.latency.labels(operation).observe(time.perf_counter() - began)


class Application:
    """The ASGI application: the service, and what operators ask for."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._rpc = BoundaryServiceASGIApplication(
            cast(BoundaryService, Service(boundary)),
            codecs=[BinaryCodec(), JsonCodec()],
            read_max_bytes=LARGEST_UNARY,
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        answer = _PAGES.get(scope.get("path", ""))
        if answer is None:
            await self._rpc(scope, receive, send)
            return
        status, kind, body = await answer(self._boundary)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": body})


async def _metrics(boundary: Boundary) -> tuple[int, bytes, bytes]:
    last = (await boundary.store.bounds()).last
    boundary.metrics.frontier.set(last)
    for cursor in await boundary.store.cursors():
        boundary.metrics.backlog.labels(cursor.name).set(max(last - cursor.offset, 0))
    return 200, b"text/plain; version=0.0.4; charset=utf-8", boundary.metrics.text()


async def _stats(boundary: Boundary) -> tuple[int, bytes, bytes]:
    bounds = await boundary.store.bounds()
    consumers = [
        {
            "name": cursor.name,
            "offset": cursor.offset,
            "backlog": max(bounds.last - max(cursor.offset, bounds.first - 1), 0),
            "confirmed_at_unix_ms": cursor.confirmed_at_unix_ms,
        }
        for cursor in await boundary.store.cursors()
    ]
    stats = {"first": bounds.first, "last": bounds.last, "consumers": consumers}
    return 200, b"application/json", msgspec.json.encode(stats)


async def _livez(boundary: Boundary) -> tuple[int, bytes, bytes]:
    return 200, b"text/plain", b"alive\n"


async def _readyz(boundary: Boundary) -> tuple[int, bytes, bytes]:
    try:
        await boundary.store.bounds()
    except Exception as error:  # noqa: BLE001  whatever it is, that is the answer
        return 503, b"text/plain", f"not ready: {error}\n".encode()
    return 200, b"text/plain", b"ready\n"


_PAGES: dict[str, Callable[[Boundary], Awaitable[tuple[int, bytes, bytes]]]] = {
    "/metrics": _metrics,
    "/stats": _stats,
    "/livez": _livez,
    "/readyz": _readyz,
}


async def _lifespan(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _refusal(error: BoundaryError) -> ConnectError:
    detail = pb.ErrorDetail(
        reason=error.reason, field=error.field, original_offset=getattr(error, "original_offset", 0)
    )
    return ConnectError(Code(error.code), str(error), [detail])


def _field_in(text: str) -> str:
    """The field that a parser's message speaks of, as far as it says."""
    found = re.search(r"field[^\w]*[`'\"]?([\w.]+)", text)
    return found[1] if found else "request"
