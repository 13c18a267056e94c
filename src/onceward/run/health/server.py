"""The HTTP server of a run and of a console: uvicorn, which cuts off clients that dawdle or come in crowds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from onceward.errors import ConfigurationError

PATIENCE = 5
"""Seconds that a client may take to send a request, to take some of the answer, or between two requests."""
AT_ONCE = 100
"""Connections that are served at the same time; more get 503 and are closed."""
LARGEST_HEAD = 64 * 1024
BUSY = "too many connections at once; close some\n"
TOO_LARGE = f"the head of a request has at most {LARGEST_HEAD} bytes\n"


class Connection(H11Protocol):
    """A connection whose client has to hurry: idle ones would keep probes out, and use up the files of the process."""

    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > AT_ONCE:
            self._refuse("503 Service Unavailable", BUSY)
        else:
            self._time_reading()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._time_reading()

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
            self._refuse("431 Request Header Fields Too Large", TOO_LARGE)
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
    config = uvicorn.Config(
        app,
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
