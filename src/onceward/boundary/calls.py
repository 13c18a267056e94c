"""What both clients do, written once: every call of a boundary, over a port that blocks or awaits.

Every call is made once, and what comes back as an error is the error that the boundary raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from connectrpc.errors import ConnectError
from pyqwest import Client, HTTPTransport, HTTPVersion, SyncClient, SyncHTTPTransport

from onceward.boundary import errors, wire
from onceward.boundary.errors import BoundaryError
from onceward.boundary.model import Appended, Envelope, Fact, ObjectRef, Page
from onceward.boundary.tls import Tls, client_context
from onceward.boundary.v1 import boundary_pb as pb
from onceward.boundary.v1.boundary_connect import BoundaryServiceClient, BoundaryServiceClientSync
from onceward.now import now
from onceward.task.exceptions import ConfigurationError

_log = logging.getLogger("onceward.boundary")

CHUNK = 256 * 1024
INLINE = 1024 * 1024
"""Bytes; a larger object is sent in pieces."""
MOST_IDLE = 64
"""Connections with TLS that are kept for the next calls."""
MOST_CALLS = 10
FIRST_WAIT = 0.1
"""Seconds; doubled after every call that failed, so that ten calls take 51.1 s of waiting."""

T = TypeVar("T")


class Port(Protocol):
    """What differs between threads and asyncio."""

    async def ask(self, method: str, request: Any) -> Any: ...
    async def send(self, method: str, messages: AsyncIterator[Any]) -> Any: ...
    def answers(self, method: str, request: Any) -> AsyncGenerator[Any]: ...
    def each(self, data: Any) -> AsyncIterator[bytes]: ...
    async def do(self, function: Callable[..., T], *args: Any) -> T:
        """Something that waits for a disk."""
        ...

    async def sleep(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


class ThreadPort:
    """Blocks, and never suspends."""

    def __init__(
        self, url: str, times: Times, sleep: Callable[[float], object] | None, tls: Tls | None
    ) -> None:
        self._transport = None if tls is None else SyncHTTPTransport(**_secured(tls))
        self._rpc = BoundaryServiceClientSync(
            url, send_compression=None, accept_compression=(), http_client=SyncClient(self._transport)
        )
        self._times = times
        self._sleep = sleep or time.sleep

    async def ask(self, method: str, request: Any) -> Any:
        return getattr(self._rpc, method)(request, timeout_ms=self._times.call)

    async def send(self, method: str, messages: AsyncIterator[Any]) -> Any:
        return getattr(self._rpc, method)(blocking(messages), timeout_ms=self._times.transfer)

    async def answers(self, method: str, request: Any) -> AsyncGenerator[Any]:
        for answer in getattr(self._rpc, method)(request, timeout_ms=self._times.transfer):
            yield answer

    async def each(self, data: Any) -> AsyncIterator[bytes]:
        for piece in data:
            yield piece

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def sleep(self, seconds: float) -> None:
        self._sleep(seconds)

    async def close(self) -> None:
        self._rpc.close()
        if self._transport is not None:
            self._transport.close()


@contextmanager
def _cancellable() -> Iterator[None]:
    """The library forgets a cancellation that comes at the moment of the answer; whoever asked for it would wait."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


class TaskPort:
    """Awaits."""

    def __init__(
        self, url: str, times: Times, sleep: Callable[[float], Awaitable[object]] | None, tls: Tls | None
    ) -> None:
        self._transport = None if tls is None else HTTPTransport(**_secured(tls))
        self._rpc = BoundaryServiceClient(
            url, send_compression=None, accept_compression=(), http_client=Client(self._transport)
        )
        self._times = times
        self._sleep = sleep or asyncio.sleep

    async def ask(self, method: str, request: Any) -> Any:
        with _cancellable():
            return await getattr(self._rpc, method)(request, timeout_ms=self._times.call)

    async def send(self, method: str, messages: AsyncIterator[Any]) -> Any:
        with _cancellable():
            return await getattr(self._rpc, method)(messages, timeout_ms=self._times.transfer)

    def answers(self, method: str, request: Any) -> AsyncGenerator[Any]:
        found: AsyncGenerator[Any] = getattr(self._rpc, method)(request, timeout_ms=self._times.transfer)
        return found

    async def each(self, data: Any) -> AsyncIterator[bytes]:
        if hasattr(data, "__aiter__"):
            async for piece in data:
                yield piece
        else:
            for piece in data:
                yield piece

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, *args)

    async def sleep(self, seconds: float) -> None:
        await self._sleep(seconds)

    async def close(self) -> None:
        await self._rpc.close()
        if self._transport is not None:
            await self._transport.aclose()


class Times:
    """How long a call and a transfer may take, in milliseconds; None for as long as they like."""

    def __init__(self, timeout: float | None, transfer_timeout: float | None) -> None:
        self.call = _ms("timeout", timeout)
        self.transfer = _ms("transfer_timeout", transfer_timeout)


class Calls:
    """The calls, over a port."""

    def __init__(self, url: str, port: Port) -> None:
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

    async def fetch(self, consumer_name: str, limit: int) -> Page:
        request = pb.FetchFactsRequest(consumer_name=consumer_name, limit=limit)
        return wire.page(await self._ask("fetch_facts", request))

    async def confirm(self, consumer_name: str, offset: int) -> int:
        request = pb.ConfirmReceiptRequest(consumer_name=consumer_name, offset=offset)
        return int((await self._ask("confirm_receipt", request)).cursor_advanced_to)

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

    async def get_stream(self, bucket: str, key: str, write: Callable[[bytes], object]) -> ObjectRef:
        async def plainly(piece: bytes) -> object:
            return write(piece)

        return await self.receive(bucket, key, plainly)

    async def pieces(self, bucket: str, key: str) -> AsyncGenerator[bytes]:
        request = pb.GetObjectRequest(bucket=bucket, key=key)
        async with aclosing(self._answers("get_object_stream", request)) as chunks:
            async for chunk in chunks:
                if chunk.data:
                    yield chunk.data

    async def receive(self, bucket: str, key: str, write: Callable[[bytes], Awaitable[object]]) -> ObjectRef:
        """Every piece of an object, in order. What `write` raises is raised."""
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
                if chunk.data:
                    await write(chunk.data)
        if ref is None:
            raise errors.Unavailable(f"{self.url} answered nothing for object {bucket}/{key}; try again")
        return ref

    async def patiently(
        self, call: Callable[[], Awaitable[T]], *, worth: Callable[[BoundaryError], bool], what: str
    ) -> T:
        """Call until it succeeds, ten times at most, with longer and longer waits. The last error is raised, and at
        once one that is not worth another try."""
        wait = FIRST_WAIT
        for left in range(MOST_CALLS - 1, 0, -1):
            try:
                return await call()
            except BoundaryError as error:
                if not worth(error):
                    raise
                _log.info("%s: %s; %d more tries, the next in %.1f s", what, error, left, wait)
            await self.port.sleep(wait)
            wait *= 2
        return await call()

    async def _put_pieces(
        self, bucket: str, key: str, pieces: AsyncIterator[bytes], media_type: str
    ) -> ObjectRef:
        broken: list[Exception] = []

        async def messages() -> AsyncIterator[Any]:
            yield pb.PutObjectChunk(bucket=bucket, key=key, media_type=media_type)
            try:
                async for piece in pieces:
                    yield pb.PutObjectChunk(data=piece)
            except Exception as error:
                broken.append(error)
                raise

        try:
            return _ref(await self.port.send("put_object_stream", messages()), media_type)
        except ConnectError as error:
            if broken:  # the caller's data failed, not the boundary, which keeps nothing of it
                raise broken[0] from None
            raise self._failure(error) from error

    async def _ask(self, method: str, request: Any) -> Any:
        try:
            return await self.port.ask(method, request)
        except ConnectError as error:
            raise self._failure(error) from error

    async def _answers(self, method: str, request: Any) -> AsyncGenerator[Any]:
        try:
            async with aclosing(self.port.answers(method, request)) as answers:
                async for answer in answers:
                    yield answer
        except ConnectError as error:
            raise self._failure(error) from error

    def _failure(self, error: ConnectError) -> BaseException:
        """The error as it was raised on the other side."""
        if isinstance(error.__cause__, asyncio.CancelledError):
            return error.__cause__  # the library makes an error of it; a task that is cancelled has to end
        detail = next((found for each in error.details if (found := each.value(pb.ErrorDetail))), None)
        if detail is None:
            return self._from_elsewhere(error)
        kind = _BY_REASON.get(detail.reason) or _BY_CODE.get(error.code.value) or BoundaryError
        made = _made(kind, error.message)
        if isinstance(made, errors.ConflictingDuplicate):
            made.original_offset = detail.original_offset
        if detail.field:
            made.field = detail.field
        return made

    def _from_elsewhere(self, error: ConnectError) -> BoundaryError:
        """Of the network, a proxy, or something that is no boundary at all."""
        code = error.code.value
        made = _made(
            _BY_CODE.get(code, BoundaryError), f"{self.url} cannot be used: {error.message} ({code})"
        )
        made.code = code
        return made


_BY_REASON: Mapping[str, type[BoundaryError]] = {
    kind.reason: kind
    for kind in (
        errors.ConflictingDuplicate,
        errors.ObjectConflict,
        errors.ArtifactMissing,
        errors.Backpressure,
    )
}
_BY_CODE: Mapping[str, type[BoundaryError]] = {
    "deadline_exceeded": errors.Unavailable,
    **{
        kind.code: kind
        for kind in (
            errors.InvalidArgument,
            errors.OffsetOutOfRange,
            errors.NotFound,
            errors.PermissionDenied,
            errors.Unauthenticated,
            errors.Unavailable,
        )
    },
}


def checked_url(url: str, tls: Tls | None = None) -> str:
    """Refuses what is no address of a boundary, before anything is sent there."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (ValueError, AttributeError, TypeError):  # a port that is none, or no text at all
        usable = False
    if not usable or parts.query or parts.fragment or any(each.isspace() for each in url):
        raise ConfigurationError(
            f"the URL of a boundary is http://HOST:PORT or https://HOST:PORT, not {url!r:.200}"
        )
    if tls is not None and parts.scheme != "https":
        raise ConfigurationError(f"with tls the URL of a boundary is https://HOST:PORT, not {url!r:.200}")
    return url.rstrip("/")


def _secured(tls: Tls) -> dict[str, Any]:
    """Files are read once: a client that is made later uses newer ones.

    HTTP/1.1, as without TLS: calls that run side by side have connections of their own, which are kept.
    """
    client_context(tls)  # which says what is wrong with a file
    ca, cert, key = tls.read()
    return {
        "tls_ca_cert": ca,
        "tls_cert": cert,
        "tls_key": key,
        "http_version": HTTPVersion.HTTP1,
        "pool_max_idle_per_host": MOST_IDLE,
    }


def _made(kind: type[BoundaryError], message: str) -> BoundaryError:
    made = kind.__new__(kind)
    made.args = (message,)
    return made


def _ref(answer: pb.PutObjectResponse, media_type: str) -> ObjectRef:
    return ObjectRef(
        bucket=answer.bucket, key=answer.key, digest=answer.digest, size=answer.size, media_type=media_type
    )


def blocking(messages: AsyncIterator[T]) -> Iterator[T]:
    """The same, for who cannot await; nothing in it suspends."""

    async def step() -> T | None:
        return await anext(messages, None)

    while (message := now(step())) is not None:
        yield message


def _ms(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if not seconds > 0:
        raise ConfigurationError(f"{name} must be more than 0 seconds, or None for no limit, not {seconds!r}")
    return max(1, int(seconds * 1000))
