"""`onceward boundary serve`: one server on one store, until it is told to stop."""

from __future__ import annotations

import logging
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from onceward.cli.boundary.options import installed
from onceward.cli.exit import FAILED, MISUSED, fail

if TYPE_CHECKING:
    from onceward.boundary.server.config import Config
    from onceward.boundary.settings import BoundarySettings

_log = logging.getLogger("onceward.boundary")

LISTEN = "127.0.0.1:7700"
DATA = "boundary-data"


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Settings, TLS, peers and links, in TOML. Options win over it."),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", show_default=LISTEN, help="Where to listen; port 0 takes a free one."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default=DATA, help="Facts, cursors and objects. Made if it is not there."
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Keep them there: postgresql://…, nats://…, or a directory like --data."
        ),
    ] = None,
    consumer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A consumer that is known from now on; may be repeated."),
    ] = None,
    strict_consumers: Annotated[
        bool,
        typer.Option(
            "--strict-consumers", help="Do not make a name known by its first fetch; see --consumer."
        ),
    ] = False,
    require_artifacts: Annotated[
        bool, typer.Option("--require-artifacts", help="Refuse a fact whose object is not here.")
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(show_default="console on a terminal, json elsewhere", help="Of the log on stderr."),
    ] = None,
    log_level: Annotated[
        LogLevel, typer.Option(help="debug has a line for every fact and confirm.")
    ] = LogLevel.INFO,
) -> None:
    """Serve a boundary. Its URL is the one line on stdout; the log goes to stderr.

    One port answers gRPC, Connect, curl with JSON, and GET for /metrics, /stats, /livez and /readyz. The first SIGTERM
    or Ctrl-C lets running calls end, a second one cuts them off; what was acknowledged is durable either way. Peers,
    links and certificates are read again when their files change.

    Exit code: 0 when it was told to stop; 1 if a part of it broke, so that a supervisor starts it again; 130 or 143 if
    a second signal cut calls off; 2 for wrong arguments or a wrong configuration, an address or a store that cannot be
    used, or a directory that another server has.
    """
    from msgspec import structs

    with installed(as_json=False):
        from onceward.boundary.server.config import Config, read_config
        from onceward.boundary.server.process import start_logging
    from onceward.errors import ConfigurationError, OncewardError

    form = log_format or (LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON)
    start_logging(form, log_level)
    try:
        if data is not None and store is not None:
            raise ConfigurationError("--data and --store both say where facts are kept; give one of them")
        found = Config() if config is None else read_config(config)
        found = structs.replace(found, consumers=(*found.consumers, *(consumer or ())))
        settings = structs.replace(
            found,
            strict_consumers=strict_consumers or found.strict_consumers,
            require_artifacts=require_artifacts or found.require_artifacts,
        ).settings()
        kept_in = store or (None if data is None else str(data)) or _store_of(found, config) or DATA
        with installed(as_json=False):
            code = _run(found, config, listen or found.listen or LISTEN, kept_in, settings)
    except OncewardError as error:
        _refuse(str(error), form)
    raise typer.Exit(code)


def _run(config: Config, path: Path | None, listen: str, kept_in: str, settings: BoundarySettings) -> int:
    """Returns the exit code."""
    import asyncio
    import signal

    from onceward.boundary.boundary import Boundary
    from onceward.boundary.server.process import running
    from onceward.boundary.server.server import parse_address
    from onceward.boundary.stores import open_store
    from onceward.errors import ConfigurationError

    address = parse_address(listen)
    code = 0

    async def run() -> None:
        loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        assert task is not None

        def heard(number: int) -> None:
            nonlocal code
            if stop.is_set():
                code = 128 + number
                task.cancel()
            stop.set()

        def broken() -> None:
            nonlocal code
            code = FAILED
            stop.set()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, heard, int(each))
        try:
            store = await open_store(kept_in)
        except OSError as error:
            raise ConfigurationError(
                f"{without_password(kept_in)} cannot be used as a data directory: {error}"
            ) from error
        try:
            boundary = Boundary(store, settings)
            async with running(boundary, config, *address, path=path, broken=broken) as url:
                _log.info("serving %s from %s", url, without_password(kept_in))
                typer.echo(url)
                await stop.wait()
                _log.info("stopping: running calls may end, no new ones are taken")
        finally:
            await store.close()
        _log.info("stopped")

    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        _log.warning("stopped, with calls cut off")
    return code


def _store_of(config: Config, path: Path | None) -> str | None:
    """A directory is that beside the configuration, wherever the server is started."""
    if config.store is None or path is None or "://" in config.store:
        return config.store
    return str(path.parent / config.store)


def without_password(store: str) -> str:
    return re.sub(r"(?<=://)([^/@]*):[^/@]*@", r"\1:***@", store)


def _refuse(text: str, form: LogFormat) -> NoReturn:
    """Where logs are JSON, the last line is too."""
    if form is LogFormat.CONSOLE:
        fail(text, as_json=False, code=MISUSED)
    _log.critical(text)
    raise typer.Exit(MISUSED)
