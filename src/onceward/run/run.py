"""`onceward run`, without its command line: put together supervisor, signals and health, and run until the end."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from onceward.app.app import Onceward
from onceward.errors import ConfigurationError
from onceward.run.health import Pages, health_served, parse_address
from onceward.run.protocol import Assignment
from onceward.run.reload import PythonFiles
from onceward.run.supervisor import Stage, Supervisor

_log = logging.getLogger("onceward.run")

LOOK_EVERY = 5.0
"""Seconds between two looks for workers that stand still."""


def check(app: Onceward) -> None:
    """Raises what can be said before anything is started."""
    app.check()
    if not app.consumers:
        raise ConfigurationError(
            f"{app.name} has no consumers, so that there is nothing to run; decorate a function with "
            "@app.consumer('sqlite:///orders.db')"
        )
    local = [consumer for consumer in app.consumers.values() if consumer.source.in_process]
    if local:
        raise ConfigurationError(
            f"{', '.join(each.name for each in local)} of {app.name} consumes from {local[0].source.scheme}://, which "
            "is within one process and for tests: no other process could send to a worker; use sqlite:///orders.db"
        )
    if app.settings.health is not None:
        parse_address(app.settings.health)


def run_app(app: Onceward, assignment: Assignment, *, reload: bool = False) -> int:
    """Supervise the workers of an app until they end. Returns the exit code."""
    return asyncio.run(_run(app, assignment, reload))


async def _run(app: Onceward, assignment: Assignment, reload: bool) -> int:
    settings = app.settings
    changes = PythonFiles(Path.cwd()) if reload else None
    supervisor = Supervisor(assignment, settings.processes, changes)
    pages = Pages(supervisor, settings.stalled_after)
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, supervisor.heard, int(each))
    async with AsyncExitStack() as around:
        if settings.health is not None:
            url = await around.enter_async_context(health_served(pages, *parse_address(settings.health)))
            _log.info("health at %s/livez, /readyz, /progress and /metrics", url)
        watching = asyncio.ensure_future(_tell_of_stalls(supervisor, pages))
        around.callback(watching.cancel)
        _log.info(
            "running %s of %s in %d process%s, as %s",
            ", ".join(app.consumers), app.name, settings.processes, "es" * (settings.processes > 1), settings.env,
        )  # fmt: skip
        code = await supervisor.run()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(each)
        signal.signal(each, signal.SIG_IGN)  # all is over: one more Ctrl-C does not change how it ended
    return code


async def _tell_of_stalls(supervisor: Supervisor, pages: Pages) -> None:
    """Once for each: somebody who asks no health page shall know, too."""
    told: set[int] = set()
    while supervisor.stage is Stage.RUNNING:
        await asyncio.sleep(LOOK_EVERY)
        for place in supervisor.places:
            stalls = pages.stalls(place)
            if stalls and place.number not in told:
                _log.error("%s; kill -USR1 shows where its threads are", "; ".join(stalls))
            (told.add if stalls else told.discard)(place.number)
