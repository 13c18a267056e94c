"""The HTTP server of a run and of a console: uvicorn, which cuts off clients that dawdle or come in crowds."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from onceward.errors import ConfigurationError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.run"))

PATIENCE = 5
"""Seconds that a client may take to send a request, to take some of the answer, or between two requests."""
AT_ONCE = 100
"""Pages and streams that are served at the same time; more get 503. Probes and metrics are not among them."""
CONNECTIONS = 200
"""Open at the same time, at most: then the one that has waited longest for a request is closed for a new one."""
AT_A_TIME = 16
"""Connections that the event loop accepts before it closes others."""
WAITING = 512
"""Connections that wait in the kernel to be accepted."""
FULL = "socket.accept() out of system resource"
"""What asyncio says, with a traceback, for each connection that it cannot accept."""
SAY_EVERY = 60.0
FOR_MACHINES = frozenset(("/livez", "/readyz", "/progress", "/metrics"))
LARGEST_HEAD = 64 * 1024
BUSY = "too many pages are open at once; close some\n"
LARGE_HEAD = (
    "431 Request Header Fields Too Large",
    f"the head of a request has at most {LARGEST_HEAD} bytes\n",
)

_BLANK_LINE = re.compile(rb"\n\r?\n")


class Connection(H11Protocol):
    """A connection whose client has to hurry: idle ones would keep probes out, and use up the files of the process."""

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._idle_since = self.loop.time()
        if len(self.connections) >= most_connections() and not self._make_room():
            super().connection_made(transport)
            self._refuse("503 Service Unavailable", BUSY)
        else:
            super().connection_made(transport)
            self._time_reading()

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for a request: a probe sends its own at once."""
        others: list[Connection] = [
            each for each in self.connections if isinstance(each, Connection) and each.is_idle
        ]
        if not others:
            return False
        oldest = min(others, key=lambda each: each._idle_since)
        self.connections.discard(oldest)
        oldest.transport.abort()
        return True

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._time_reading()

    def handle_events(self) -> None:
        """Refuse a large head also if it arrives whole: h11 measures only incomplete ones."""
        if self.conn.their_state is h11.IDLE:
            blank = _BLANK_LINE.search(self.conn.trailing_data[0])
            if blank is not None and blank.end() > LARGEST_HEAD:
                self._refuse(*LARGE_HEAD)
                return
        super().handle_events()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(PATIENCE, self.transport.abort)

    def resume_writing(self) -> None:
        _cancel(self._writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._reading)
        _cancel(self._writing)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if len(self.conn.trailing_data[0]) > LARGEST_HEAD:
            self._refuse(*LARGE_HEAD)
        else:
            super().send_400_response(msg)

    def _time_reading(self) -> None:
        """Give the client so long for a whole request, however many pieces it sends."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            _cancel(self._reading)
            self._reading = None
        elif self._reading is None:
            self._reading = self.loop.call_later(PATIENCE, self.transport.abort)

    def _refuse(self, status: str, text: str) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close"
        self.transport.write(f"{head}\r\n\r\n{text}".encode())
        self.transport.close()


def most_connections() -> int:
    """How many fit: half of the files that this process may open are for its workers, its database and its logs."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return CONNECTIONS if allowed < 0 else max(min(CONNECTIONS, allowed // 2 - AT_A_TIME), 4)


def log_a_full_table_once(loop: asyncio.AbstractEventLoop) -> None:
    """Say in one line a minute that no file is left for a connection. The loop tries again after a second."""
    before, said_at = loop.get_exception_handler(), -SAY_EVERY

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said_at
        if context.get("message") == FULL:
            if time.monotonic() >= said_at + SAY_EVERY:
                said_at = time.monotonic()
                _log.error("connections are not accepted for now: %s", context.get("exception"))
        elif before is None:
            loop.default_exception_handler(context)
        else:
            before(loop, context)

    loop.set_exception_handler(handle)


class Admission:
    """Around an ASGI application: pages and streams are for so many at once, and probes for all who come, whatever
    browsers keep open."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in FOR_MACHINES:
            await self._app(scope, receive, send)
        elif self._inside >= AT_ONCE:
            headers = [
                (b"content-type", b"text/plain"),
                (b"content-length", str(len(BUSY)).encode()),
                (b"connection", b"close"),
            ]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": BUSY.encode()})
        else:
            self._inside += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._inside -= 1


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        await self._stopped.wait()  # uvicorn's own wakes up ten times a second

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for each in sockets or ():
            each.listen(WAITING)  # asyncio accepts as many at a time as it lets wait

    def capture_signals(self) -> Any:
        return nullcontext()  # the command decides what a signal means


@asynccontextmanager
async def serve(app: Any, host: str, port: int, option: str) -> AsyncIterator[str]:
    """Serve an ASGI application inside the block; yields the URL. `option` names the address in an error."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigurationError(
            f"{option}: cannot listen on {host}:{port}: {error.strerror or error}; choose another address, or port 0 "
            "for any free port"
        ) from error
    log_a_full_table_once(asyncio.get_running_loop())
    config = uvicorn.Config(
        Admission(app),
        backlog=AT_A_TIME,
        http=Connection,
        ws="none",
        log_config=None,
        log_level="error",  # its warnings are about what strangers send
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        proxy_headers=False,  # they replace the address of the connection, which says whether a header is trusted
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_keep_alive=PATIENCE,
        timeout_graceful_shutdown=1,
    )
    server = HttpServer(config)
    running = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        bound = listening.getsockname()[1]
        yield f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
    finally:
        server.stop()
        await asyncio.wait([running], timeout=5)
        running.cancel()
        listening.close()
