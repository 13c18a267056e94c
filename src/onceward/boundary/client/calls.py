"""The calls of a boundary, shared by both clients, over a port that blocks or awaits.

Every call is made once, and raises the error that the boundary raised.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from math import isnan
from typing import Any, TypeVar

from connectrpc.code import Code
from connectrpc.errors import ConnectError

from onceward._process.stop import LAST_WAIT
from onceward._secrets import mask_url
from onceward.backoff import Backoff
from onceward.boundary import errors, wire
from onceward.boundary.client.errors import failure, refused
from onceward.boundary.client.loads import next_load
from onceward.boundary.client.transport import BoundaryPort
from onceward.boundary.errors import BoundaryError, holds_up
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, Page
from onceward.boundary.v1 import boundary_pb as pb
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

CHUNK = 256 * 1024
INLINE = 1024 * 1024
"""Bytes. A larger object is sent in pieces."""
MOST_WAIT = 3600.0
"""Seconds. A boundary waits for less."""
MOST_CALLS = 10
PATIENCE = Backoff(0.1)
"""Waits between the calls of `patiently`: 51.1 s in total for ten calls."""

T = TypeVar("T")


class OneByOne(Exception):
    """This boundary has no call for several facts."""


class Calls:
    """The calls of a boundary, over a port."""

    def __init__(self, url: str, port: BoundaryPort) -> None:
        self.url = url
        self.port = port
        self._loads = port.loads(self._append_load)
        self._one_by_one = self._confirms_apart = False
        """Whether the boundary is an older one."""

    async def append(self, envelope: Envelope, fact: Fact) -> Appended:
        request = wire.append_request(envelope, fact)
        if not self._one_by_one:
            try:
                appended: Appended = await self._loads.append(request)
                return appended
            except OneByOne:
                pass
            except TimeoutError as error:
                late = ConnectError(Code.DEADLINE_EXCEEDED, "no answer in time")
                late.__cause__ = error
                raise failure(late, self.url) from error
        outcome = self._appended(await self._ask("append_fact", wire.Encoded(request)))
        if isinstance(outcome, BoundaryError):
            raise outcome
        return outcome

    async def append_all(
        self, messages: Iterable[tuple[Envelope, Fact]], in_order: bool
    ) -> list[Appended | BoundaryError]:
        given = [(envelope.message_id, wire.append_request(envelope, fact)) for envelope, fact in messages]
        waiting = deque(given)
        outcomes: list[Appended | BoundaryError] = []
        while load := next_load(waiting, lambda each: len(each[1])):
            outcomes += await self._append_portion([request for _, request in load], in_order)
            if any(_ends(each, in_order) for each in outcomes):
                break
        return [*outcomes, *(errors.Aborted(message_id) for message_id, _ in given[len(outcomes) :])]

    async def _append_portion(
        self, requests: Sequence[bytes], in_order: bool
    ) -> list[Appended | BoundaryError]:
        if not self._one_by_one:
            with suppress(OneByOne):
                return await self._append_together(requests, self.port.ask, in_order)
        outcomes: list[Appended | BoundaryError] = []
        for request in requests:
            outcomes += await self._append_together([request], self.port.ask)
            if _ends(outcomes[-1], in_order):
                break
        return outcomes

    async def _append_load(self, requests: Sequence[bytes]) -> Sequence[Any]:
        """For several callers."""
        try:
            return await self._append_together(requests, self.port.call)
        except OneByOne:
            return [OneByOne() for _ in requests]

    async def _append_together(
        self, requests: Sequence[bytes], call: Callable[..., Awaitable[Any]], in_order: bool = False
    ) -> list[Appended | BoundaryError]:
        try:
            if len(requests) == 1:
                return [self._appended(await call("append_fact", wire.Encoded(requests[0])))]
            answer = await call("append_facts", wire.Encoded(wire.append_requests(requests, in_order)))
        except ConnectError as error:
            if error.code is Code.UNIMPLEMENTED and len(requests) > 1:
                self._one_by_one = True
                raise OneByOne from None
            return [self._failure(error) for _ in requests]  # one for each: a raised error has its traceback
        if len(answer.outcomes) != len(requests):
            what = f"{len(answer.outcomes)} outcomes for {len(requests)} facts"
            return [self._unclear(what) for _ in requests]
        return [self._outcome(each) for each in answer.outcomes]

    def _outcome(self, answer: pb.AppendOutcome) -> Appended | BoundaryError:
        refusal = answer.refusal
        if refusal is None:
            return self._appended(answer)
        return refused(refusal.code, refusal.message, refusal.detail or pb.ErrorDetail())

    def _appended(self, answer: pb.AppendFactResponse | pb.AppendOutcome) -> Appended | BoundaryError:
        return Appended(answer.offset, answer.duplicate) if answer.offset > 0 else self._unclear("no offset")

    def _unclear(self, what: str) -> errors.Unavailable:
        """An answer that does not say what was asked, such as an empty one: it is unknown what was done."""
        return errors.Unavailable(
            f"{mask_url(self.url)} answered {what}; check that this is the URL of a boundary, or try again"
        )

    def _failure(self, error: ConnectError) -> BoundaryError:
        raised = failure(error, self.url)
        if not isinstance(raised, BoundaryError):
            raise raised  # canceled
        raised.__cause__ = error
        return raised

    async def append_until_durable(self, envelope: Envelope, fact: Fact) -> Appended:
        return await self.patiently(
            lambda: self.append(envelope, fact),
            worth=lambda error: error.retryable,
            what=f"append of {envelope.message_id}",
        )

    async def fetch(
        self,
        consumer_name: str,
        limit: int,
        max_bytes: int,
        wait: float = 0.0,
        wait_after: int = 0,
        confirm: int = 0,
    ) -> Page:
        if isnan(wait):
            raise errors.InvalidArgument("wait", "must be a number of seconds, not NaN")
        if confirm and self._confirms_apart:
            await self.confirm(consumer_name, confirm)
            confirm = 0
        request = wire.encode(
            pb.FetchFactsRequest,
            consumer_name=consumer_name,
            limit=limit,
            max_bytes=max_bytes,
            wait_ms=int(min(max(wait, 0.0), MOST_WAIT) * 1000),
            wait_after=wait_after,
            confirm=confirm,
        )
        grace = 0.0 if wait > 0 and not confirm else LAST_WAIT
        answer = await self._ask("fetch_facts", request, grace)
        if answer.cursor_advanced_to < confirm:  # it has only fetched
            self._confirms_apart = True
            return await self.fetch(consumer_name, limit, max_bytes, wait, wait_after, confirm)
        return wire.page(answer)

    async def confirm(self, consumer_name: str, offset: int) -> int:
        request = wire.encode(pb.ConfirmReceiptRequest, consumer_name=consumer_name, offset=offset)
        position = int((await self._ask("confirm_receipt", request)).cursor_advanced_to)
        if position < offset:
            raise self._unclear(f"a call to confirm {offset}, and its cursor is at {position}")
        return position

    async def remove_consumer(self, consumer_name: str) -> int:
        request = wire.encode(pb.RemoveConsumerRequest, consumer_name=consumer_name)
        return int((await self._ask("remove_consumer", request)).offset)

    async def put(self, bucket: str, key: str, blob: bytes, media_type: str) -> ObjectRef:
        if len(blob) > INLINE:
            pieces = (blob[at : at + CHUNK] for at in range(0, len(blob), CHUNK))
            return await self.put_stream(bucket, key, pieces, media_type)
        request = wire.encode(pb.PutObjectRequest, bucket=bucket, key=key, blob=blob, media_type=media_type)
        return self._ref(await self._ask("put_object", request), media_type)

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
        request = wire.encode(pb.GetObjectRequest, bucket=bucket, key=key)
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
        request = wire.encode(pb.GetObjectRequest, bucket=bucket, key=key)
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

        begin = wire.encode(pb.PutObjectChunk, bucket=bucket, key=key, media_type=media_type)

        async def messages() -> AsyncIterator[Any]:
            yield begin
            try:
                async for piece in pieces:
                    if piece:
                        yield wire.encode(pb.PutObjectChunk, data=piece)
            except Exception as error:
                broken.append(error)
                raise

        try:
            return self._ref(await self.port.send("put_object_stream", messages()), media_type)
        except ConnectError as error:
            if broken:  # the caller's data failed, not the boundary, which stores none of it
                raise broken[0] from None
            raise failure(error, self.url) from error

    def _ref(self, answer: pb.PutObjectResponse, media_type: str) -> ObjectRef:
        if not answer.digest:
            raise self._unclear("no digest")
        return ObjectRef(
            bucket=answer.bucket,
            key=answer.key,
            digest=answer.digest,
            size=answer.size,
            media_type=media_type,
        )

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


def _ends(outcome: Appended | BoundaryError, in_order: bool) -> bool:
    """Return whether not to try those behind it: the boundary does not answer, or they must wait."""
    return isinstance(outcome, errors.Unavailable) or (in_order and holds_up(outcome))
