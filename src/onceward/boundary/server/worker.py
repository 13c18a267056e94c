"""The server inside Envoy: the ASGI application, and the life of the process from its start to its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from threading import Thread, Timer
from typing import Any

from msgspec import structs

from onceward._process.lifeline import end_with_parent
from onceward.boundary.boundary import Boundary
from onceward.boundary.server.address import is_loopback
from onceward.boundary.server.admin import CHECK_EVERY, Admin
from onceward.boundary.server.asgi import Application
from onceward.boundary.server.calls import LimitedCalls
from onceward.boundary.server.handshakes import Handshakes
from onceward.boundary.server.launch import SIGNALS, Launch
from onceward.boundary.server.process import running, start_logging
from onceward.boundary.server.secrets import Secrets
from onceward.boundary.stores import open_store
from onceward.errors import OncewardError
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.boundary"))

FAILED, MISUSED = 1, 2
"""Exit codes."""
CLOSING = 2.0
"""Seconds to close the store and all else, after the calls have ended. A store that hangs has nothing to close: what it
has not answered was not acknowledged."""


class BoundaryWorker:
    """Envoy calls it with `lifespan` once, before it opens the port, and then with each request."""

    def __init__(self) -> None:
        self._calls: LimitedCalls | None = None
        self._code = 0
        self._runtime = Path()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            assert self._calls is not None
            await self._calls(scope, receive, send)
            return
        await receive()
        self._stop = asyncio.Event()
        opened = asyncio.Event()
        self._task = asyncio.create_task(self._live(opened), name="onceward-boundary")
        await opened.wait()
        await send({"type": "lifespan.startup.complete"})
        await receive()  # Envoy ends, though nobody asked it to
        _log.error("Envoy ended by itself; its own lines of the log say why")
        self._on_failure()
        await self._task

    async def _live(self, opened: asyncio.Event) -> None:
        """Serve, and end the process."""
        try:
            launch = Launch.current()
            self._runtime = Path(launch.runtime)
            self._limits = launch.limits
            start_logging(launch.log_format, launch.log_level)
            self._listen_to_signals(launch)
            await self._serve(launch, opened)
            _log.info("stopped")
        except asyncio.CancelledError:
            _log.warning("stopped, with calls cut off")
        except OncewardError as error:
            _log.critical("%s", error)
            self._code = MISUSED
        except Exception:  # noqa: BLE001  the process must end, with a code
            _log.exception("the server failed")
            self._code = FAILED
        self._exit(self._code)

    async def _serve(self, launch: Launch, opened: asyncio.Event) -> None:
        admin, secrets = Admin(self._runtime), Secrets(self._runtime)
        store = await open_store(launch.kept_in)
        try:
            config = launch.config
            rules = structs.replace(
                config,
                strict_consumers=launch.strict_consumers or config.strict_consumers,
                require_artifacts=launch.require_artifacts or config.require_artifacts,
            )
            boundary = Boundary(store, rules.settings())
            async with running(
                boundary,
                config,
                consumers=launch.consumers,
                path=None if launch.path is None else Path(launch.path),
                renew=lambda pem: secrets.replace(pem, admin),
                check_every=launch.check_every,
                broken=self._on_failure,
            ) as live:
                service = Application(boundary, live.guard, live.links)
                self._calls = LimitedCalls(service, launch.limits, boundary.metrics)
                if launch.handshakes is not None:
                    Handshakes(launch.handshakes[0], boundary.metrics).start()
                opened.set()
                if (port := await self._port(admin)) is None:
                    return
                secrets.remove()
                self._announce(launch, port)
                await self._stop.wait()
                _log.info("stopping: running calls may finish, new ones are refused")
                boundary.end_waits()
                await self._finish(admin)
        finally:
            await store.close()

    async def _port(self, admin: Admin) -> int | None:
        """Return the port; None if the server was stopped before it had one."""
        port, stop = asyncio.create_task(admin.port()), asyncio.create_task(self._stop.wait())
        await asyncio.wait({port, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return port.result() if port.done() else None

    def _announce(self, launch: Launch, port: int) -> None:
        scheme = "http" if launch.handshakes is None else "https"
        host = f"[{launch.host}]" if ":" in launch.host else launch.host
        if launch.handshakes is None and not is_loopback(launch.address):
            _log.warning(
                "everyone who reaches %s can read, append and confirm: this server has no TLS and no peers; listen on "
                "127.0.0.1, or add [tls] and [[peers]] to its configuration",
                launch.host,
            )
        url = f"{scheme}://{host}:{port}"
        _log.info("serving %s from %s", url, launch.shown)
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()

    async def _finish(self, admin: Admin) -> None:
        assert self._calls is not None
        try:
            async with asyncio.timeout(self._limits.shutdown):
                await admin.stop_accepting()
                await self._calls.finish()
                while await admin.count("http.ingress_http.downstream_rq_active"):
                    await asyncio.sleep(CHECK_EVERY)  # until the last answers are sent
        except TimeoutError:
            _log.warning("calls that still ran after %g s were cut off", self._limits.shutdown)
        except OSError as error:
            _log.warning("calls were cut off: Envoy does not answer: %s", error)

    def _listen_to_signals(self, launch: Launch) -> None:
        loop = asyncio.get_running_loop()

        def listen() -> None:
            while True:
                loop.call_soon_threadsafe(self._on_signal, int(signal.sigwait(SIGNALS)))

        Thread(target=listen, daemon=True, name="onceward-boundary-signals").start()
        if launch.ends_with_stdin:
            end_with_parent()

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._code = 128 + number
            self._task.cancel()
            return
        self._stop.set()
        late = Timer(self._limits.shutdown + CLOSING, self._give_up)
        late.daemon = True
        late.start()

    def _on_failure(self) -> None:
        self._code = FAILED
        self._stop.set()

    def _give_up(self) -> None:
        _log.error("the server did not stop in time")
        self._exit(FAILED)

    def _exit(self, code: int) -> None:
        """Envoy would end with 0, or wait for peers."""
        shutil.rmtree(self._runtime, ignore_errors=True)
        logging.shutdown()
        os._exit(code)


application = BoundaryWorker()
