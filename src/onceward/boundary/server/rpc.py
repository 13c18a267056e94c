"""The boundary's calls: requests from the wire are counted, logged, and passed to the boundary."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward.boundary import wire
from onceward.boundary.boundary import Ahead, Boundary
from onceward.boundary.errors import (
    Aborted,
    AccessRefused,
    Backpressure,
    BoundaryError,
    Canceled,
    ConflictingDuplicate,
    InvalidArgument,
)
from onceward.boundary.model import MOST_APPENDED, Appended, Envelope, Fact, clamp_bytes
from onceward.boundary.server.codecs import ReadyPage, outcome, refusal
from onceward.boundary.server.limits import ANSWER_ROOM
from onceward.boundary.store import NewFact
from onceward.boundary.v1 import boundary_pb as pb
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from onceward.boundary.server.access import Guard

_log = OwnLogger(logging.getLogger("onceward.boundary"))

LARGEST_UNARY = 32 * 1024 * 1024
"""Bytes of one message. Larger objects are sent in pieces."""
DRAIN = 10.0
"""Seconds for the rest of an upload that is refused."""
LONGEST = 500
"""Characters of a refused id or name in the log. None that is accepted has more."""
NOTHING: Mapping[str, object] = {}
OPERATIONS = ("append", "fetch", "confirm", "remove", "put", "get")

T = TypeVar("T")


class BoundaryRpc:
    """Implements the service. The guard has checked each call; of several facts, it checks each."""

    def __init__(self, boundary: Boundary, guard: Guard | None = None) -> None:
        self._boundary = boundary
        self._guard = guard
        self._metrics = boundary.metrics
        self._reported_gaps: dict[str, int] = {}
        """The last missing fact that was logged, by consumer: a cursor that stays reports its gap with every page."""
        self._latency = {each: self._metrics.latency.labels(each).observe for each in OPERATIONS}

    async def append_fact(self, request: pb.AppendFactRequest, ctx: Any) -> pb.AppendFactResponse:
        return await self._answer("append", self._append(request), _about(request.envelope))

    async def _append(self, request: pb.AppendFactRequest) -> pb.AppendFactResponse:
        envelope, fact, record = _read(request)
        began = time.perf_counter()
        self._metrics.appends.inc()
        try:
            appended = await self._boundary.append(envelope, fact, record)
        except BoundaryError as error:
            self._count_failure(error)
            raise
        self._metrics.append_latency.observe(time.perf_counter() - began)
        self._report_appended(envelope, appended)
        return pb.AppendFactResponse(offset=appended.offset, duplicate=appended.duplicate)

    async def append_facts(self, request: pb.AppendFactsRequest, ctx: Any) -> pb.AppendFactsResponse:
        return await self._answer("append", self._append_each(request.facts, request.in_order))

    async def _append_each(
        self, requests: Sequence[pb.AppendFactRequest], in_order: bool
    ) -> pb.AppendFactsResponse:
        if len(requests) > MOST_APPENDED:
            raise InvalidArgument("facts", f"has {len(requests)} facts; the limit is {MOST_APPENDED}")
        began = time.perf_counter()
        self._metrics.appends.inc(len(requests))
        checked = await self._check_each(requests)
        if in_order:
            _abort_behind_refused(checked)
        new = [each for each in checked if isinstance(each, NewFact)]
        try:
            appended = iter(await self._boundary.append_each(new, in_order=in_order))
        except (
            BoundaryError
        ) as error:  # of the store: each fact could get another answer when it is sent again
            appended = iter([error] * len(new))
        outcomes = [next(appended) if isinstance(each, NewFact) else each for each in checked]
        self._metrics.append_latency.observe(time.perf_counter() - began)
        for given, each in zip(requests, outcomes, strict=True):
            if isinstance(each, Appended):
                self._report_appended(given.envelope, each)
            elif not isinstance(each, AccessRefused):  # those the guard has reported
                self._count_failure(each)
                self._report_refused("append", each, _about(given.envelope))
        return pb.AppendFactsResponse(outcomes=[outcome(each) for each in outcomes])

    async def _check_each(self, requests: Sequence[pb.AppendFactRequest]) -> list[NewFact | BoundaryError]:
        checked: list[NewFact | BoundaryError] = []
        facts: list[Fact] = []
        for request in requests:
            try:
                if self._guard is not None:
                    self._guard.check("AppendFacts", request)
                envelope, fact, record = _read(request)
                checked.append(self._boundary.new_fact(envelope, fact, record))
                facts.append(fact)
            except BoundaryError as error:
                checked.append(error)
        problems = iter(await self._boundary.find_missing(facts))
        return [(next(problems) or each) if isinstance(each, NewFact) else each for each in checked]

    def _count_failure(self, error: BoundaryError) -> None:
        self._metrics.append_failures.labels(error.reason or error.code).inc()
        if isinstance(error, ConflictingDuplicate):
            self._metrics.conflicts.inc()

    def _report_appended(self, envelope: Envelope | pb.Envelope | None, appended: Appended) -> None:
        if appended.duplicate:
            self._metrics.duplicates.inc()
        if _log.isEnabledFor(logging.DEBUG):
            result = "duplicate" if appended.duplicate else "appended"
            _log.debug("appended", extra={**_about(envelope), "offset": appended.offset, "outcome": result})

    async def fetch_facts(self, request: pb.FetchFactsRequest, ctx: Any) -> Any:
        waits = request.wait_ms > 0
        most = 0 if waits else _page_room(request.max_bytes)
        position, ahead = await self._confirm_first(request, most, ctx) if request.confirm else (0, None)
        if waits:
            with suppress(BoundaryError):  # the fetch says what is wrong
                await self._boundary.await_facts(
                    request.consumer_name, request.wait_after, request.wait_ms / 1000
                )
            most = _page_room(request.max_bytes)
        return await self._answer(
            "fetch", self._fetch(request, position, most, ahead), {"consumer": request.consumer_name}
        )

    async def _fetch(
        self, request: pb.FetchFactsRequest, position: int, most: int, ahead: Ahead | None
    ) -> ReadyPage:
        self._metrics.fetches.inc()
        records, gap = await self._boundary.fetch(request.consumer_name, request.limit, most, ahead)
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
        page = wire.page_bytes(records, gap, await self._boundary.log_begins_at(), position)
        if (room := ANSWER_ROOM.get(None)) is not None:
            room.hold(len(page))
        return ReadyPage(page)

    async def _confirm_first(
        self, request: pb.FetchFactsRequest, most: int, ctx: Any
    ) -> tuple[int, Ahead | None]:
        """Return where the cursor is, and what was read meanwhile, unless facts are waited for. The guard has not
        checked yet that the peer may confirm."""
        receipt = pb.ConfirmReceiptRequest(consumer_name=request.consumer_name, offset=request.confirm)
        if self._guard is not None:
            self._guard.check_call("ConfirmReceipt", receipt)
        confirming = asyncio.ensure_future(self.confirm_receipt(receipt, ctx))
        try:
            ahead = (
                None
                if request.wait_ms > 0
                else await self._boundary.read_ahead(request.confirm, request.limit, most)
            )
            position = (await confirming).cursor_advanced_to
            return position, ahead if position == request.confirm else None
        finally:
            confirming.cancel()

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
        if (room := ANSWER_ROOM.get(None)) is not None and room.reserve(ref.size) < ref.size:
            raise Backpressure(
                "answers that their callers have not read take all that [limits] body_memory allows; try later, or use "
                "GetObjectStream"
            )
        blob = b"".join([chunk async for chunk in chunks])
        return pb.GetObjectResponse(blob=blob, digest=ref.digest, size=ref.size, media_type=ref.media_type)

    async def get_object_stream(
        self, request: pb.GetObjectRequest, ctx: Any
    ) -> AsyncIterator[pb.GetObjectChunk]:
        with self._refusing("get", NOTHING):
            ref, chunks = await self._boundary.get(request.bucket, request.key)
            yield pb.GetObjectChunk(digest=ref.digest, size=ref.size, media_type=ref.media_type)
            async for chunk in chunks:
                yield pb.GetObjectChunk(data=chunk)

    def _refuse(self, operation: str, error: BoundaryError, about: Mapping[str, object]) -> ConnectError:
        self._report_refused(operation, error, about)
        return refusal(error)

    def _report_refused(self, operation: str, error: BoundaryError, about: Mapping[str, object]) -> None:
        self._metrics.refused.labels(operation, error.code).inc()
        shown = {name: value[:LONGEST] if isinstance(value, str) else value for name, value in about.items()}
        _log.warning("%s refused: %s", operation, error, extra={**shown, "outcome": error.code})

    async def _answer(self, operation: str, call: Awaitable[T], about: Mapping[str, object] = NOTHING) -> T:
        began = time.perf_counter()
        try:
            with self._refusing(operation, about):
                return await call
        finally:
            self._latency[operation](time.perf_counter() - began)

    @contextmanager
    def _refusing(self, operation: str, about: Mapping[str, object]) -> Iterator[None]:
        """Report every error, and raise the one that the caller gets."""
        try:
            yield
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


def _read(request: pb.AppendFactRequest) -> tuple[Envelope, Fact, bytes]:
    envelope, fact = request.envelope, request.fact
    if envelope is None:
        raise InvalidArgument("envelope", "is missing")
    if fact is None:
        raise InvalidArgument("fact", "is missing")
    record = wire.record_of(envelope.to_binary(), fact.to_binary())
    return wire.envelope_of(envelope), wire.fact_of(fact), record


def _page_room(max_bytes: int) -> int:
    """How many bytes a page may have, which are set aside for it."""
    room = ANSWER_ROOM.get(None)
    return max_bytes if room is None or max_bytes < 0 else room.reserve(clamp_bytes(max_bytes))


def _about(envelope: Envelope | pb.Envelope | None) -> Mapping[str, object]:
    return {} if envelope is None else {"message_id": envelope.message_id, "zone": envelope.from_zone}


def _abort_behind_refused(checked: list[NewFact | BoundaryError]) -> None:
    refused = False
    for at, each in enumerate(checked):
        if refused and isinstance(each, NewFact):
            checked[at] = Aborted(each.message_id)
        refused = refused or isinstance(each, BoundaryError)


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
