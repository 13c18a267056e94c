"""`onceward relay`: relay the outbox of an app, without its consumers."""

from __future__ import annotations

from typing import Annotated

import typer

from onceward.cli.exit import App, LogFormat, flag, option
from onceward.cli.run import start

RELAY_EXAMPLES = """
Examples:

- `onceward relay shop:app` beside a web service, whose requests send

- `onceward relay shop:app --drain` to publish what waits and exit
"""


def relay(
    target: App,
    processes: Annotated[int | None, option("N", "Worker processes.", min=1, show_default="1")] = None,
    drain: Annotated[bool, flag("Exit when no message waits.", "--drain")] = False,
    log_format: Annotated[
        LogFormat | None, typer.Option(show_default="console", help="Format of the log on stderr.")
    ] = None,
    health: Annotated[
        str | None, option("HOST:PORT", "Serve /livez, /readyz, /progress and /metrics.", show_default="off")
    ] = None,
) -> None:
    """Relay the outbox of an app until stopped.

    `onceward run` does this, too, beside the consumers. Any number of relays share the work, and the order of
    keys is kept.

    Exit code: as that of `onceward run`.
    """
    from onceward.app.app import RELAY

    options = {"processes": processes, "env": None, "log_format": log_format, "health": health}
    start(target, RELAY, drain=drain, reload=False, concurrency=None, **options)
