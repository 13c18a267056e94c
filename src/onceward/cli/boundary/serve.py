"""`onceward boundary serve`: one server on one store, until stopped."""

from __future__ import annotations

import asyncio
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onceward._secrets import mask_url
from onceward.cli.boundary.options import require_extra
from onceward.cli.exit import LogFormat, flag, option, refuse
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from onceward.boundary.server.config import Config

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
    ends_with_stdin: Annotated[bool, typer.Option("--ends-with-stdin", hidden=True)] = False,
) -> None:
    """Serve a boundary. It prints its URL as the only line on stdout, and logs to stderr.

    One port answers gRPC, Connect, curl with JSON, and GET for /metrics, /stats, /details, /livez and /readyz. The
    first SIGTERM or Ctrl-C lets running calls finish, a second one cuts them off; acknowledged facts are durable either
    way. Peers, links and certificates are reloaded when their files change. Connections, calls, messages, memory and
    the time to stop have limits: [limits] in --config changes them.

    Exit code: 0 when stopped; 1 if a part of it failed, so a supervisor restarts it; 130 or 143 if a second signal cut
    calls off; 2 for wrong arguments or a wrong configuration, an address or a store that cannot be used, or a directory
    that another server uses.
    """
    with require_extra(as_json=False):
        from onceward.boundary.model import check_consumer
        from onceward.boundary.server.address import parse_address
        from onceward.boundary.server.config import Config, read_config
        from onceward.boundary.server.launch import Launch, become_server
        from onceward.boundary.server.process import start_logging

    form = log_format or (LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON)
    start_logging(form, log_level)
    try:
        if data is not None and store is not None:
            raise ConfigurationError("--data and --store exclude each other; pass one of them")
        if store == "":
            raise ConfigurationError("--store is empty; name a directory, postgresql://… or nats://…")
        if listen == "":
            raise ConfigurationError(f"--listen is empty; write HOST:PORT, as in {LISTEN}")
        found = Config() if config is None else read_config(config)
        host, port = parse_address(listen or found.listen or LISTEN)
        for name in (*found.consumers, *(consumer or ())):
            check_consumer(name)
        kept_in = store or (None if data is None else str(data)) or _store_of(found, config) or DATA
        with require_extra(as_json=False):
            asyncio.run(_check_store(kept_in))
            become_server(
                Launch(
                    config=found,
                    path=None if config is None else str(config),
                    kept_in=kept_in,
                    shown=mask_url(kept_in),
                    host=host,
                    port=port,
                    consumers=tuple(consumer or ()),
                    strict_consumers=strict_consumers,
                    require_artifacts=require_artifacts,
                    limits=found.limits.read(),
                    log_format=str(form),
                    log_level=str(log_level),
                    ends_with_stdin=ends_with_stdin,
                )
            )
    except OncewardError as error:
        refuse(str(error), form, _log)


async def _check_store(kept_in: str) -> None:
    """Raise `ConfigurationError` if it cannot be used: a problem is easier to see before the server starts."""
    from onceward.boundary.stores import open_store

    try:
        store = await open_store(kept_in)
    except OSError as error:
        raise ConfigurationError(f"cannot use {mask_url(kept_in)} as a data directory: {error}") from error
    await store.close()


def _store_of(config: Config, path: Path | None) -> str | None:
    """The store that the configuration names; a directory is relative to the configuration file."""
    if config.store is None or path is None or "://" in config.store:
        return config.store
    return str(path.parent / config.store)
