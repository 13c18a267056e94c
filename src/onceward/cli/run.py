"""`onceward run`: the consumers of an app, in supervised processes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from onceward.cli.completion import envs
from onceward.cli.exit import FAILED, MISUSED, fail

if TYPE_CHECKING:
    from onceward.app import Onceward

RUN_EXAMPLES = """
Examples:

- `onceward run shop:app` for the object `app` in shop.py

- `onceward run shop:app --processes 4 --health 0.0.0.0:8080` in production, with probes and metrics

- `onceward run shop:app --drain` to work off what is there, and end

- `onceward run shop:app --reload` while you write it
"""


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


def run(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The app, as in shop:app.")],
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default="1", help="Worker processes.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="as each policy says",
            help="Messages in flight, for each consumer of each process.",
        ),
    ] = None,
    drain: Annotated[bool, typer.Option("--drain", help="End when the sources are empty.")] = False,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="development",
            autocompletion=envs,
            help="`production`: a consumer with a contract runs only if it is proven; see onceward verify.",
        ),
    ] = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Start the workers anew when a .py file below this directory changes."),
    ] = False,
    log_format: Annotated[
        LogFormat | None, typer.Option(show_default="console", help="Of the log on stderr.")
    ] = None,
    health: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            show_default="no port",
            help="Answer GET for /livez, /readyz, /progress and /metrics.",
        ),
    ] = None,
) -> None:
    """Run the consumers of an app, until told to stop.

    Options win over what the app, ONCEWARD_… variables and onceward.toml say; `onceward config` shows that. The first
    SIGTERM or Ctrl-C takes no new work and lets what is in flight end, the second cuts it off, the third kills.

    Exit code: 0 when it ended in good order, also if messages failed; 130 or 143 if work was cut off, which comes
    again; 1 if it failed, or if with --drain a source or database was away for a minute; 2 for wrong arguments, or an
    app that cannot run as it is configured.
    """
    from onceward.errors import ConfigurationError

    options = {"processes": processes, "env": env, "log_format": log_format, "health": health}
    form = log_format or LogFormat.CONSOLE
    try:
        with _nothing_begun():
            from onceward.run.protocol import Assignment
            from onceward.run.run import check, run_app
            from onceward.telemetry.logs import start_logging

            app = _loaded(target)
            app.override("command line", concurrency=concurrency, **options)
            form = LogFormat(app.settings.log_format)
            check(app)
            start_logging(form, app.settings.log_level)
            assignment = Assignment(
                target=target,
                number=0,
                drain=drain,
                grace=app.settings.grace,
                log_format=form,
                log_level=app.settings.log_level,
                env=env,
                concurrency=concurrency,
            )
        code = run_app(app, assignment, reload=reload)
    except ConfigurationError as error:
        _refuse(str(error), form)
    raise typer.Exit(code)


@contextmanager
def _nothing_begun() -> Iterator[None]:
    """Imports take a while. A signal that comes meanwhile ends the command in good order: it cuts nothing off."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(0)

    before = {each: signal.signal(each, leave) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _loaded(target: str) -> Onceward:
    from onceward.app.lookup import load_app
    from onceward.errors import ConfigurationError

    try:
        return load_app(target)
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001  of the app's own code
        import traceback

        shown = "".join(traceback.format_exception(error))
        fail(f"{shown}{target} cannot be imported: see above", as_json=False, code=FAILED)


def _refuse(text: str, form: LogFormat) -> NoReturn:
    """Where logs are JSON, the last line is too."""
    if form is LogFormat.CONSOLE:
        fail(text, as_json=False, code=MISUSED)
    from onceward.telemetry.logs import start_logging

    start_logging(form, "info")
    logging.getLogger("onceward.run").critical(text)
    raise typer.Exit(MISUSED)
