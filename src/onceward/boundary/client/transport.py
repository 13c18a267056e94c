"""How a call gets to a boundary and back: the part that differs between threads, which block, and asyncio."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import copy_context
from functools import cache
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from pyqwest import Client, HTTPTransport, HTTPVersion, SyncClient, SyncHTTPTransport

from onceward._process.aside import call_aside
from onceward._process.stop import LAST_WAIT, engine_stop
from onceward._secrets import mask_url, remember
from onceward._sync import run_blocking
from onceward.boundary.client.gateway_pages import retryable_pages
from onceward.boundary.client.loads import AsyncLoads, BlockingLoads, Loads, Send
from onceward.boundary.client.plain_http import ANSWERS, AsyncPlainCalls, BlockingPlainCalls, may_call_plainly
from onceward.boundary.tls import Tls, client_context
from onceward.boundary.v1.boundary_connect import BoundaryServiceClient, BoundaryServiceClientSync
from onceward.errors import ConfigurationError

MOST_IDLE = 64
"""TLS connections kept open for the next calls."""
EXIT_PAUSE = 0.05
"""Seconds to wait at the end of a process that used an asyncio client."""

T = TypeVar("T")


class BoundaryPort(Protocol):
    """What differs between threads and asyncio: one port blocks, the other awaits."""

    async def ask(self, method: str, request: Any, grace: float = LAST_WAIT) -> Any:
        """Make a call. After a stop of the engine, its answer may take `grace` seconds."""
        ...

    async def call(self, method: str, request: Any) -> Any:
        """Make a call that nothing ends, for several callers."""
        ...

    def loads(self, send: Send) -> Loads: ...

    async def send(self, method: str, messages: AsyncIterator[Any]) -> Any: ...
    def answers(self, method: str, request: Any) -> AsyncGenerator[Any]: ...
    def each(self, data: Any) -> AsyncIterator[bytes]: ...
    async def do(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function that waits for a disk."""
        ...

    async def sleep(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


class BlockingBoundaryPort:
    """Blocks, and never suspends. The library waits where no signal reaches it, so its calls are made aside."""

    def __init__(
        self, url: str, times: CallTimes, sleep: Callable[[float], object] | None, tls: Tls | None
    ) -> None:
        self._plain = BlockingPlainCalls(url) if may_call_plainly(url) else None
        self._transport = None if tls is None else SyncHTTPTransport(**_tls_options(tls))
        self._rpc = BoundaryServiceClientSync(
            url, send_compression=None, accept_compression=(), http_client=SyncClient(self._transport)
        )
        self._times = times
        self._sleep = sleep or time.sleep

    async def ask(self, method: str, request: Any, grace: float = LAST_WAIT) -> Any:
        return call_aside(self._call, method, request, stop=engine_stop(), grace=grace)

    async def call(self, method: str, request: Any) -> Any:
        return self._call(method, request)

    def _call(self, method: str, request: Any) -> Any:
        if self._plain is not None and method in ANSWERS:
            return self._plain.call(method, request, self._times.call)
        with retryable_pages():
            return getattr(self._rpc, method)(request, timeout_ms=self._times.call)

    def loads(self, send: Send) -> Loads:
        return BlockingLoads(send, self._times.call_seconds)

    async def send(self, method: str, messages: AsyncIterator[Any]) -> Any:
        left = threading.Event()

        def sent() -> Iterator[Any]:
            for message in blocking(messages):
                if left.is_set():  # end the request, or an interrupted upload would be stored
                    raise ConnectionAbortedError("the caller has left")
                yield message

        def upload() -> Any:
            with retryable_pages():
                return getattr(self._rpc, method)(sent(), timeout_ms=self._times.transfer)

        try:
            return call_aside(upload)
        finally:
            left.set()

    async def answers(self, method: str, request: Any) -> AsyncGenerator[Any]:
        answers = self._download(method, request)
        context = copy_context()
        while (answer := call_aside(context.run, next, answers, None)) is not None:
            yield answer

    def _download(self, method: str, request: Any) -> Iterator[Any]:
        with retryable_pages():
            yield from getattr(self._rpc, method)(request, timeout_ms=self._times.transfer)

    async def each(self, data: Any) -> AsyncIterator[bytes]:
        for piece in data:
            yield piece

    def stream(self, pieces: AsyncGenerator[T]) -> Iterator[T]:
        return blocking(pieces)

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    async def sleep(self, seconds: float) -> None:
        self._sleep(seconds)

    async def close(self) -> None:
        self._rpc.close()
        if self._plain is not None:
            self._plain.close()
        if self._transport is not None:
            self._transport.close()


class AsyncBoundaryPort:
    """Awaits."""

    def __init__(
        self, url: str, times: CallTimes, sleep: Callable[[float], Awaitable[object]] | None, tls: Tls | None
    ) -> None:
        self._plain = AsyncPlainCalls(url) if may_call_plainly(url) else None
        self._transport = None if tls is None else HTTPTransport(**_tls_options(tls))
        self._rpc = BoundaryServiceClient(
            url, send_compression=None, accept_compression=(), http_client=Client(self._transport)
        )
        self._times = times
        self._sleep = sleep or asyncio.sleep

    async def ask(self, method: str, request: Any, grace: float = LAST_WAIT) -> Any:
        stop = engine_stop()
        return await (
            self.call(method, request)
            if stop is None
            else stop.leave(self.call, method, request, grace=grace)
        )

    async def call(self, method: str, request: Any) -> Any:
        if self._plain is not None and method in ANSWERS:
            return await self._plain.call(method, request, self._times.call)
        _wait_for_threads_at_exit()
        with _cancellable(), retryable_pages():
            return await getattr(self._rpc, method)(request, timeout_ms=self._times.call)

    def loads(self, send: Send) -> Loads:
        return AsyncLoads(send, self._times.call_seconds)

    async def send(self, method: str, messages: AsyncIterator[Any]) -> Any:
        _wait_for_threads_at_exit()
        with _cancellable(), retryable_pages():
            return await getattr(self._rpc, method)(messages, timeout_ms=self._times.transfer)

    async def answers(self, method: str, request: Any) -> AsyncGenerator[Any]:
        _wait_for_threads_at_exit()
        found: AsyncGenerator[Any] = getattr(self._rpc, method)(request, timeout_ms=self._times.transfer)
        async with aclosing(found):
            with retryable_pages():
                async for answer in found:
                    yield answer

    async def each(self, data: Any) -> AsyncIterator[bytes]:
        if hasattr(data, "__aiter__"):
            async for piece in data:
                yield piece
        else:
            for piece in data:
                yield piece

    def stream(self, pieces: AsyncGenerator[T]) -> AsyncGenerator[T]:
        return pieces

    async def do(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, *args)

    async def sleep(self, seconds: float) -> None:
        await self._sleep(seconds)

    async def close(self) -> None:
        await self._rpc.close()
        if self._plain is not None:
            self._plain.close()
        if self._transport is not None:
            await self._transport.aclose()


class CallTimes:
    """How long a call and a transfer may take, in milliseconds; None is no limit."""

    def __init__(self, timeout: float | None, transfer_timeout: float | None) -> None:
        self.call = _ms("timeout", timeout)
        self.call_seconds = timeout
        self.transfer = _ms("transfer_timeout", transfer_timeout)


def check_url(url: str, tls: Tls | None = None) -> str:
    """Return the URL without a trailing slash. Raise `ConfigurationError` if it cannot be that of a boundary."""
    try:
        parts = urlsplit(url)
        usable = (
            parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isprintable()
        )
        (parts.hostname or "").encode("idna")
    except (ValueError, AttributeError, TypeError):  # a bad port or name, or not a string
        usable = False
    if isinstance(url, str):
        remember(url)
    if not usable or parts.query or parts.fragment or any(each.isspace() for each in url):
        raise ConfigurationError(
            f"the URL of a boundary must be http://HOST:PORT or https://HOST:PORT, not {mask_url(str(url))!r:.200}"
        )
    if "@" in parts.netloc:
        raise ConfigurationError(
            f"the URL of a boundary has a user or password, which would not be sent: {mask_url(url)!r:.200}; remove "
            "it; a boundary knows its peers by their certificates: set `tls` (for commands: ONCEWARD_BOUNDARY_CA, "
            "_CERT and _KEY)"
        )
    if tls is not None and parts.scheme != "https":
        raise ConfigurationError(
            f"with tls the URL of a boundary must be https://HOST:PORT, not {mask_url(str(url))!r:.200}"
        )
    return url.rstrip("/")


@contextmanager
def _cancellable() -> Iterator[None]:
    """Raise a cancellation that the library loses if it arrives together with the answer."""
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    yield
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


@cache
def _wait_for_threads_at_exit() -> None:
    """The library's threads need the interpreter once more after handing back an answer. If it is shutting down, that
    aborts the process, as it did in every fifth program that ended right after a call. There is no event to wait for,
    so give them a moment."""
    atexit.register(time.sleep, EXIT_PAUSE)


def _tls_options(tls: Tls) -> dict[str, Any]:
    """Read the files, once: a client created later uses newer ones.

    HTTP/1.1, as without TLS: concurrent calls have their own connections, which are kept open.
    """
    client_context(tls)  # raises if a file is bad
    ca, cert, key = tls.read()
    return {
        "tls_ca_cert": ca,
        "tls_cert": cert,
        "tls_key": key,
        "http_version": HTTPVersion.HTTP1,
        "pool_max_idle_per_host": MOST_IDLE,
    }


def blocking(messages: AsyncIterator[T]) -> Iterator[T]:
    """Turn an async iterator that never suspends into a plain one."""

    async def step() -> T | None:
        return await anext(messages, None)

    while (message := run_blocking(step())) is not None:
        yield message


def _ms(name: str, seconds: float | None) -> int | None:
    if seconds is None:
        return None
    if not seconds > 0:
        raise ConfigurationError(f"{name} must be more than 0 seconds, or None for no limit, not {seconds!r}")
    return max(1, int(seconds * 1000))
