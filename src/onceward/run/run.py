"""`onceward run` without its command line: connect supervisor, signals and health, and run until the end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from onceward._environment import names_production
from onceward.app.app import RELAY, Onceward
from onceward.app.relay import all_consumers
from onceward.app.settings import AppSettings
from onceward.errors import ConfigurationError
from onceward.run.connections import pool_size_that_fits
from onceward.run.health.pages import Pages, parse_address
from onceward.run.health.probes import Probes
from onceward.run.protocol import Assignment
from onceward.run.release import Releases
from onceward.run.reload import PythonFiles
from onceward.run.samples import Samples
from onceward.run.supervisor import RunStage, Supervisor
from onceward.telemetry.logger import OwnLogger

if TYPE_CHECKING:
    from sqlalchemy import URL

_log = OwnLogger(logging.getLogger("onceward.run"))

Site = Callable[[Pages, Samples], AbstractAsyncContextManager[str]]
"""Serves a console inside the block, and yields its URL."""

HEALTH_AT = "health at %s/livez, /readyz, /progress and /metrics"
STALL_CHECK_EVERY = 5.0
"""Seconds between two checks for stalled workers."""


def check(app: Onceward, only: Sequence[str] = ()) -> None:
    """Raise ConfigurationError for problems that are visible before anything starts. `only`: the consumers to run."""
    app.check()
    _check_database(app)
    _check_schedules(app)
    if tuple(only) == (RELAY,):
        app.database  # noqa: B018  raises if there is none
        if app.settings.health is not None:
            parse_address(app.settings.health)
        return
    if not app.consumers:
        raise ConfigurationError(
            f"{app.name} has no consumers, so there is nothing to run; decorate a function with "
            "@app.consumer('sqlite:///orders.db')"
        )
    for name in only:
        if name not in app.consumers:
            close = get_close_matches(name, app.consumers, 1)
            raise ConfigurationError(
                f"--only: {app.name} has no consumer {name!r}; "
                + (f"did you mean {close[0]!r}?" if close else f"it has {', '.join(app.consumers)}")
            )
    local = [
        consumer
        for consumer in app.consumers.values()
        if consumer.source.in_process and (not only or consumer.name in only)
    ]
    if local:
        raise ConfigurationError(
            f"{', '.join(each.name for each in local)} of {app.name} consumes from {local[0].source.scheme}://, which "
            "exists within one process only, for tests: no other process could send to a worker; use sqlite:///orders.db"
        )
    if app.settings.health is not None:
        parse_address(app.settings.health)
    if names_production(app.settings.env):
        _check_proven(app, only)


def _check_database(app: Onceward) -> None:
    """Refuse a database that no worker can use, however long it waits."""
    if app.settings.database is None:
        return
    from onceward.app.build import database_url

    url = database_url(app.settings.database, asynchronous=False)
    name = url.database or ""
    if url.get_backend_name() != "sqlite":
        _check_options(app, url)
    elif name in ("", ":memory:") or (name.startswith("file:") and "memory" in str(url)):
        raise ConfigurationError(
            f"the database of {app.name} is in memory, so it would end with each process; name a file, as in "
            "sqlite:///shop.db"
        )
    elif Path(name).is_dir():
        raise ConfigurationError(
            f"the database of {app.name} is a directory: {Path(name).absolute()}; name a file in it"
        )


def _check_options(app: Onceward, url: URL) -> None:
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import make_conninfo
    except ModuleNotFoundError:
        raise ConfigurationError("PostgreSQL needs psycopg: pip install 'onceward[postgres]'") from None

    for name in url.query:
        try:
            make_conninfo(**{name: "1"})
        except ProgrammingError:
            raise ConfigurationError(
                f"the URL of the database of {app.name} has an option that PostgreSQL does not have: {name!r}"
            ) from None


def _check_schedules(app: Onceward) -> None:
    targets = app.outbox.targets
    for each in app.schedules.values():
        try:
            targets.check(targets.address_of(targets.name_of(each.target)))
        except ConfigurationError as error:
            raise ConfigurationError(f"the schedule {each.name!r} ({each.text}): {error}") from None


def _check_proven(app: Onceward, only: Sequence[str]) -> None:
    """Name all unproven consumers at once; each would refuse to run by itself."""
    from onceward.inbox.errors import UnprovenConsumerError
    from onceward.inspection.proofs import refusals

    found = refusals(app, [each for each in app.consumers.values() if not only or each.name in only])
    if found:
        raise UnprovenConsumerError("\n".join(found))


def run_app(app: Onceward, assignment: Assignment, *, reload: bool = False, site: Site | None = None) -> int:
    """Supervise the workers of an app until they end. Returns the exit code. `site` serves a console meanwhile."""
    return asyncio.run(_run(app, assignment, reload, site))


async def _run(app: Onceward, assignment: Assignment, reload: bool, site: Site | None) -> int:
    settings = app.settings
    app.only = app.run_only = assignment.only
    size = await asyncio.to_thread(pool_size_that_fits, app)
    assignment = msgspec.structs.replace(assignment, run_only=assignment.only, pool_size=size)
    changes = PythonFiles(Path.cwd()) if reload else None
    supervisor = Supervisor(assignment, settings.processes, changes, Releases(app, assignment.only))
    samples = Samples(app, all_consumers(app, assignment.only), settings.sample_every)
    pages = Pages(supervisor, settings.stalled_after, samples)
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, supervisor.on_signal, int(each))
    async with AsyncExitStack() as around:
        if settings.health is not None and not shares_address(settings):
            from onceward.run.health.server import serve

            where = parse_address(settings.health)
            url = await around.enter_async_context(serve(Probes(pages.by_path), *where, "--health"))
            _log.info(HEALTH_AT, url)
        if site is not None:
            url = await around.enter_async_context(site(pages, samples))
            _log.info("console at %s/", url)
            if shares_address(settings):
                _log.info(HEALTH_AT, url)
        if settings.health is not None or site is not None:
            samples.start()
            around.callback(samples.stop)
        watching = asyncio.ensure_future(_log_stalls(supervisor, pages))
        around.callback(watching.cancel)
        running = [each.name for each in all_consumers(app, assignment.only)]
        names = ", ".join([name for name in running if name != RELAY] or running)
        processes = settings.processes
        plural = "es" * (processes > 1)
        _log.info("running %s of %s in %d process%s, as %s", names, app.name, processes, plural, settings.env)
        code = await supervisor.run()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(each)
        signal.signal(each, signal.SIG_IGN)  # it is over: one more Ctrl-C must not change the exit code
    return code


def shares_address(settings: AppSettings) -> bool:
    """Whether the console serves the health pages, too, because both have one address."""
    if settings.health is None or settings.console is None:
        return False
    return parse_address(settings.health) == parse_address(settings.console, "--console")


async def _log_stalls(supervisor: Supervisor, pages: Pages) -> None:
    """Log each stall once, for runs without a health page."""
    logged: set[int] = set()
    while supervisor.stage is RunStage.RUNNING:
        await asyncio.sleep(STALL_CHECK_EVERY)
        for place in supervisor.places:
            stalls = pages.stalls(place)
            if stalls and place.number not in logged:
                _log.error("%s; send it SIGUSR1 to see where its threads are", "; ".join(stalls))
            (logged.add if stalls else logged.discard)(place.number)
