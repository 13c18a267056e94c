"""`onceward boundary serve`: one server on one data directory, until it is told to stop."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from onceward.cli.boundary_calling import installed
from onceward.cli.database import MISUSED, fail

if TYPE_CHECKING:
    from onceward.boundary.service import Settings

_log = logging.getLogger("onceward.boundary")


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def serve(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
    ] = "127.0.0.1:7700",
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Facts, cursors and objects. Made if it is not there.")
    ] = Path("boundary-data"),
    strict_consumers: Annotated[
        bool, typer.Option("--strict-consumers", help="Do not make a name known by its first fetch.")
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
    or Ctrl-C lets running calls end, a second one cuts them off; what was acknowledged is durable either way.

    Exit code: 0 when it was told to stop; 130 or 143 if a second signal cut calls off; 2 for wrong arguments, an
    address or a directory that cannot be used, or a directory that another server has.
    """
    with installed(as_json=False):
        from onceward.boundary.logs import start_logging
        from onceward.boundary.server import parse_address
        from onceward.boundary.service import Settings
    from onceward.task.exceptions import ConfigurationError

    form = log_format or (LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON)
    start_logging(form, log_level)
    settings = Settings(strict_consumers=strict_consumers, require_artifacts=require_artifacts)
    try:
        cut_off_by = _run(*parse_address(listen), data, settings)
    except ConfigurationError as error:
        _refuse(str(error), form)
    raise typer.Exit(0 if cut_off_by is None else 128 + cut_off_by)


def _run(host: str, port: int, data: Path, settings: Settings) -> int | None:
    """Returns the signal that hurried it."""
    import asyncio
    import signal

    from onceward.boundary.server import serving
    from onceward.boundary.service import Boundary
    from onceward.boundary.stores.sqlite import SqliteStore
    from onceward.task.exceptions import ConfigurationError

    cut_off_by: int | None = None

    async def run() -> None:
        loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        assert task is not None

        def heard(number: int) -> None:
            nonlocal cut_off_by
            if stop.is_set():
                cut_off_by = number
                task.cancel()
            stop.set()

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, heard, int(each))
        try:
            store = SqliteStore(data)
        except OSError as error:
            raise ConfigurationError(f"{data} cannot be used as a data directory: {error}") from error
        try:
            async with serving(Boundary(store, settings), host, port) as url:
                _log.info("serving %s from %s", url, data)
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
    return cut_off_by


def _refuse(text: str, form: LogFormat) -> NoReturn:
    """Where logs are JSON, the last line is too."""
    if form is LogFormat.CONSOLE:
        fail(text, as_json=False, code=MISUSED)
    _log.critical(text)
    raise typer.Exit(MISUSED)
