"""`onceward boundary serve`: one server on one store, until stopped."""

from __future__ import annotations

import logging
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onceward.cli.boundary.options import require_extra
from onceward.cli.exit import FAILED, LogFormat, flag, option, refuse
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from onceward.boundary.server.config import Config
    from onceward.boundary.settings import BoundarySettings

_log = logging.getLogger("onceward.boundary")

LISTEN = "127.0.0.1:7700"
DATA = "boundary-data"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    config: Annotated[
        Path | None, option("FILE", "TOML file with settings, TLS, peers and links. Options win over it.")
    ] = None,
    listen: Annotated[
        str | None,
        option("HOST:PORT", "Address to listen on; port 0 picks a free port.", show_default=LISTEN),
    ] = None,
    data: Annotated[
        Path | None,
        option("DIR", "Directory of facts, cursors and objects; created if missing.", show_default=DATA),
    ] = None,
    store: Annotated[
        str | None, option("URL", "Store to use instead of --data: postgresql://…, nats://…, or a directory.")
    ] = None,
    consumer: Annotated[list[str] | None, option("NAME", "Consumer to register; repeatable.")] = None,
    strict_consumers: Annotated[
        bool, flag("Do not register a consumer at its first fetch; see --consumer.", "--strict-consumers")
    ] = False,
    require_artifacts: Annotated[
        bool, flag("Refuse a fact whose object is missing.", "--require-artifacts")
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            show_default="console on a terminal, json elsewhere", help="Format of the log on stderr."
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="debug logs every fact and confirm.")] = LogLevel.INFO,
) -> None:
    """Serve a boundary. It prints its URL as the only line on stdout, and logs to stderr.

    One port answers gRPC, Connect, curl with JSON, and GET for /metrics, /stats, /livez and /readyz. The first SIGTERM
    or Ctrl-C lets running calls finish, a second one cuts them off; acknowledged facts are durable either way. Peers,
    links and certificates are reloaded when their files change.

    Exit code: 0 when stopped; 1 if a part of it failed, so a supervisor restarts it; 130 or 143 if a second signal cut
    calls off; 2 for wrong arguments or a wrong configuration, an address or a store that cannot be used, or a directory
    that another server uses.
    """
    from msgspec import structs

    with require_extra(as_json=False):
        from onceward.boundary.server.config import Config, read_config
        from onceward.boundary.server.process import start_logging

    form = log_format or (LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON)
    start_logging(form, log_level)
    try:
        if data is not None and store is not None:
            raise ConfigurationError("--data and --store exclude each other; pass one of them")
        found = Config() if config is None else read_config(config)
        found = structs.replace(found, consumers=(*found.consumers, *(consumer or ())))
        settings = structs.replace(
            found,
            strict_consumers=strict_consumers or found.strict_consumers,
            require_artifacts=require_artifacts or found.require_artifacts,
        ).settings()
        kept_in = store or (None if data is None else str(data)) or _store_of(found, config) or DATA
        with require_extra(as_json=False):
            code = _run(found, config, listen or found.listen or LISTEN, kept_in, settings)
    except OncewardError as error:
        refuse(str(error), form, _log)
    raise typer.Exit(code)


def _run(config: Config, path: Path | None, listen: str, kept_in: str, settings: BoundarySettings) -> int:
    """Serve until stopped. Returns the exit code."""
    import asyncio
    import signal

    from onceward.boundary.boundary import Boundary
    from onceward.boundary.server.process import running
    from onceward.boundary.server.server import parse_address
    from onceward.boundary.stores import open_store

    address = parse_address(listen)
    code = 0

    async def run() -> None:
        loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        assert task is not None

        def on_signal(number: int) -> None:
            nonlocal code
            if stop.is_set():
                code = 128 + number
                task.cancel()
            stop.set()

        def on_failure() -> None:
            nonlocal code
            code = FAILED
            stop.set()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, on_signal, int(each))
        try:
            store = await open_store(kept_in)
        except OSError as error:
            raise ConfigurationError(
                f"cannot use {without_password(kept_in)} as a data directory: {error}"
            ) from error
        try:
            boundary = Boundary(store, settings)
            async with running(boundary, config, *address, path=path, broken=on_failure) as url:
                _log.info("serving %s from %s", url, without_password(kept_in))
                typer.echo(url)
                await stop.wait()
                _log.info("stopping: running calls may finish, new ones are refused")
        finally:
            await store.close()
        _log.info("stopped")

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        _log.warning("stopped, with calls cut off")
    return code


def _store_of(config: Config, path: Path | None) -> str | None:
    """The store that the configuration names; a directory is relative to the configuration file."""
    if config.store is None or path is None or "://" in config.store:
        return config.store
    return str(path.parent / config.store)


def without_password(store: str) -> str:
    return re.sub(r"(?<=://)([^/@]*):[^/@]*@", r"\1:***@", store)
