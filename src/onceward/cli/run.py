"""`onceward run`: run the consumers of an app in supervised processes."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from onceward._imports import EndedBySignal
from onceward._text import driver_message
from onceward.cli.completion import envs
from onceward.cli.database import ELSEWHERE, database_option, default_database, open_engine
from onceward.cli.dlq.options import Operator, Reason, who
from onceward.cli.exit import App, AsJson, LogFormat, argument, fail, flag, option, refuse, refuse_mistakes
from onceward.cli.output import echo, print_json
from onceward.errors import ConfigurationError, OncewardError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from onceward.app import Onceward
    from onceward.run.run import Site

RUN_EXAMPLES = """
Examples:

- `onceward run shop:app` to run the object `app` in shop.py

- `onceward run shop:app --processes 4 --health 0.0.0.0:8080` in production, with probes and metrics

- `onceward run shop:app --console 127.0.0.1:8090` with the console for a browser on this machine

- `onceward run shop:app --only charge,refund` to run two of its consumers, here or on another machine

- `onceward run shop:app --drain` to process what is there and exit

- `onceward run shop:app --reload` during development
"""

RELAY_EXAMPLES = """
Examples:

- `onceward relay shop:app` next to a web service that sends messages

- `onceward relay shop:app --drain` to publish what waits and exit
"""


def run(
    target: App,
    processes: Annotated[int | None, option("N", "Worker processes.", min=1, show_default="1")] = None,
    concurrency: Annotated[
        int | None,
        option("N", "Messages in flight per consumer and process.", min=1, show_default="from each policy"),
    ] = None,
    only: Annotated[
        str | None,
        option("NAME[,NAME]", "Run only these consumers, separated by commas.", show_default="all"),
    ] = None,
    drain: Annotated[bool, flag("Exit when the sources and the outbox are empty.", "--drain")] = False,
    env: Annotated[
        str | None,
        option(
            "NAME",
            "In `production` a consumer with a contract runs only if it is proven; see onceward verify.",
            show_default="development",
            autocompletion=envs,
        ),
    ] = None,
    reload: Annotated[
        bool, flag("Restart the workers when a .py file below this directory changes.", "--reload")
    ] = False,
    log_format: Annotated[
        LogFormat | None, typer.Option(show_default="console", help="Format of the log on stderr.")
    ] = None,
    health: Annotated[
        str | None, option("HOST:PORT", "Serve /livez, /readyz, /progress and /metrics.", show_default="off")
    ] = None,
    console: Annotated[
        str | None,
        option(
            "HOST:PORT",
            "Serve the console, and the pages of --health with it; may be the same address.",
            show_default="off",
        ),
    ] = None,
    users: Annotated[
        Path | None,
        option("FILE", "Users of the console; see onceward console.", show_default="only this machine"),
    ] = None,
) -> None:
    """Run the consumers of an app until stopped.

    Options win over the app, ONCEWARD_… variables and onceward.toml; `onceward config` shows those. The first SIGTERM
    or Ctrl-C stops fetching and lets work in flight finish, the second cuts it off, the third kills.

    Exit code: 0 after a clean end, even if messages failed; 130 or 143 if work was cut off, to be redelivered; 1 if it
    failed, or with --drain if a source or database was unavailable for a minute, or messages still wait in the outbox
    because a target cannot be reached; 2 for wrong arguments, or an app that cannot run as configured.
    """
    options = {
        "processes": processes,
        "env": env,
        "log_format": log_format,
        "health": health,
        "console": console,
        "console_users": None if users is None else str(users),
    }
    start(target, only, drain=drain, reload=reload, concurrency=concurrency, **options)


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

    `onceward run` does this, too, next to the consumers. Any number of relays share the work and keep the order of
    keys.

    Exit code: 0 after a clean end, even if messages failed; 130 or 143 if work was cut off; 1 if it failed, or with
    --drain if the database was unavailable for a minute, or messages still wait because a target cannot be reached; 2
    for wrong arguments, or an app without a database.
    """
    from onceward.app.app import RELAY

    options = {"processes": processes, "env": None, "log_format": log_format, "health": health}
    start(target, RELAY, drain=drain, reload=False, concurrency=None, **options)


END_WORKER_EXAMPLES = """
Examples:

- `onceward end-worker 4711 --reason "charge waits for a provider that hangs"` for the pid of a log line

- `onceward end-worker 4711.5f0c1a2b3c4d --reason "…"` as a console on another machine shows it
"""


def end_worker(
    process: Annotated[
        str, argument("PID[.NAME]", "The process; the console adds a name that is unique to it.")
    ],
    reason: Reason,
    grace: Annotated[
        float, option("SECONDS", "How long messages in flight may take to finish.", min=0.0, max=3600.0)
    ] = 5.0,
    database: Annotated[
        str | None, database_option("The app's database, which has the audit log.", ELSEWHERE)
    ] = None,
    operator: Operator = None,
    as_json: AsJson = False,
) -> None:
    """End a worker process of a run on this machine; its supervisor starts another one.

    Use it for an attempt that is stuck and has no time limit. Messages in flight in the process have --grace seconds
    to finish. Then the process is killed with all that its handlers started, and the messages it held are delivered
    again and count one more start. In the browser, the console of `onceward run --console` does the same.

    Exit code: 0 if it has ended; 1 if it cannot be ended, or has ended and the audit cannot be written; 2 for a process
    that is not a worker, or is another one now, a database without an audit, and wrong arguments.
    """
    from onceward.run.end import ForeignWorker
    from onceward.storage.audit import check_reason

    with refuse_mistakes(as_json), ExitStack() as opened:
        why, by = check_reason(reason, "end a process"), who(operator)
        url = database or default_database()
        worker = opened.enter_context(ForeignWorker(process))
        number, pid = worker.assignment.number, worker.pid
        engine = None if url is None else opened.enter_context(open_engine(url, as_json))
        try:
            killed = worker.end(grace)
        except OSError as error:  # a TimeoutError, too
            fail(f"process {pid} cannot be ended: {error.strerror or error}", as_json)
        if engine is not None:
            details = {
                "worker": number,
                "pid": pid,
                "host": socket.gethostname(),
                "killed": killed,
                "reason": why,
            }
            note_end(engine, by, details, as_json)
    if as_json:
        print_json({"worker": number, "pid": pid, "killed": killed, "audited": url is not None})
        return
    how = "was killed after its grace" if killed else "has finished and ended"
    echo(f"Worker {number}, pid {pid}, {how}; its run starts another one.")
    if url is None:
        echo("No database is named, so no audit has it; name the one of the app with --database.")


NOTE_PATIENCE = 30.0
"""Seconds to try again to note who ended a process: a handler of another one may have locked the database."""
NOTE_RETRY = 0.5


def note_end(engine: Engine, by: str, details: dict[str, Any], as_json: bool) -> None:
    """Write the audit. The process has ended, so no failure may sound as if nothing had happened."""
    from sqlalchemy.exc import SQLAlchemyError

    from onceward._sync import run_blocking
    from onceward.storage import audit
    from onceward.storage.database import BlockingStoragePorts, Sql

    ports = BlockingStoragePorts(engine)
    give_up = time.monotonic() + NOTE_PATIENCE
    while True:
        try:
            return run_blocking(
                ports.transact(audit.note, Sql(ports.dialect.name), by, "end_worker", details)
            )
        except (OncewardError, SQLAlchemyError) as error:
            if time.monotonic() >= give_up:
                why = driver_message(error)
                fail(f"process {details['pid']} was ended, but the audit does not have it: {why}", as_json)
        time.sleep(NOTE_RETRY)


def start(
    target: str, only: str | None, *, drain: bool, reload: bool, concurrency: int | None, **options: Any
) -> NoReturn:
    """Run the consumers of an app, or those that `only` names, until stopped. Exits with the code of the run."""
    log_format, env = options["log_format"], options["env"]
    form = log_format or LogFormat.CONSOLE
    try:
        with _exit_on_signal():
            from onceward.app.relay import with_relay
            from onceward.run.protocol import Assignment
            from onceward.run.run import check, run_app
            from onceward.telemetry.logs import start_logging

            app = _load(target)
            app.override("command line", concurrency=concurrency, **options)
            form = LogFormat(app.settings.log_format)
            names = tuple(dict.fromkeys(name.strip() for name in (only or "").split(",") if name.strip()))
            if only is not None and not names:
                raise ConfigurationError(
                    f"--only names no consumer; {app.name} has {', '.join(app.consumers)}"
                )
            check(app, names)
            names = with_relay(app, names)
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
                only=names,
            )
        code = run_app(app, assignment, reload=reload, site=_console(app))
    except ConfigurationError as error:
        if form is LogFormat.JSON:
            from onceward.telemetry.logs import start_logging

            start_logging(form, "info")
        refuse(str(error), form, logging.getLogger("onceward.run"))
    raise typer.Exit(code)


def _console(app: Onceward) -> Site | None:
    """Return what serves the console beside the workers, if it was asked for."""
    if app.settings.console is None:
        return None
    from onceward.cli.console import access_of
    from onceward.console.backstage import Backstage
    from onceward.console.site import check_address, create, serve
    from onceward.run.health.pages import Pages, parse_address
    from onceward.run.run import shares_address
    from onceward.run.samples import Samples

    settings, loaded_at = app.settings, time.time()
    host, port = parse_address(settings.console or "", "--console")
    access = access_of(
        None if settings.console_users is None else Path(settings.console_users), None, None, None
    )
    check_address(host, access)

    def site(pages: Pages, samples: Samples) -> AbstractAsyncContextManager[str]:
        backstage = Backstage(
            app,
            samples=samples,
            state=pages.state,
            end_worker=pages.supervisor.end_worker,
            redact=settings.console_redact,
            trace_url=settings.console_trace_url,
            loaded_at=loaded_at,
        )
        made = create(
            app,
            access=access,
            backstage=backstage,
            probes=pages.by_path,
            open_probes=shares_address(settings),
        )
        return serve(made, host, port, "--console")

    return site


@contextmanager
def _exit_on_signal() -> Iterator[None]:
    """Imports take a while; a signal during them ends the command cleanly, because it cuts nothing off."""

    def leave(*_: object) -> NoReturn:
        raise EndedBySignal(0)

    before = {each: signal.signal(each, leave) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _load(target: str) -> Onceward:
    from onceward.app.lookup import load_app

    try:
        return load_app(target)
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001  from the app's own code
        from onceward._imports import blames_import
        from onceward.cli.failure import fail_in_your_code

        blames_import(error)
        fail_in_your_code(error, f"{target} cannot be imported: see above", as_json=False)
