"""A worker process: builds the consumers of an app, keeps them consuming, and reports their status every second.

    python -m onceward.run.worker ASSIGNMENT CONTROL REPORTS SCOREBOARD

The last three are file descriptors: two pipes and shared memory. Requests of the supervisor arrive on CONTROL; when it
closes, the supervisor is gone. Started by `worker_process`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec

from onceward._process.event_loop import run_in_loop
from onceward._process.rounds import Rounds
from onceward._process.stop import LAST_WAIT
from onceward.app.app import RELAY, Onceward
from onceward.app.lifespan import ServiceError, shared_services, shared_services_async
from onceward.app.lookup import load_app
from onceward.app.relay import all_consumers
from onceward.errors import ConfigurationError
from onceward.run.outages import AsyncKeeper, BlockingKeeper, SourceUnreachable, keeper_of
from onceward.run.protocol import (
    CUT_OFF,
    DRAIN,
    ENDED,
    FAILED,
    HURRY,
    MISUSED,
    RECYCLED,
    UNDELIVERED,
    UNREACHABLE,
    Assignment,
    WorkerStatus,
)
from onceward.run.scoreboard import Scoreboard
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.logs import start_logging

if TYPE_CHECKING:
    from sqlalchemy import URL

    from onceward.db.calls import AnswerWatch, DatabaseServer

_log = OwnLogger(logging.getLogger("onceward.run"))

LOOK_WHILE_STOPPING = 0.1
"""Seconds between two looks at whether something still answers."""
REPORT_EVERY = 1.0
LANDING = 2.0
"""Seconds for work that is cut off to end."""
LAST_ANSWER = 2.0
"""Seconds that a worker that stops waits for the answer of a database, if nothing is in flight."""
PARTING = 2.0
"""Seconds for the interpreter to shut down: a stuck thread could hold it up forever."""
TELEMETRY = ("OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_", "ONCEWARD_TRACE_FILE")

CHANGED = b""
GONE = b"gone"


class KeeperEnded(NamedTuple):
    keeper: BlockingKeeper | AsyncKeeper
    error: BaseException | None


class Worker:
    """The main thread waits for events; consumers run in threads and in one event loop."""

    def __init__(self, assignment: Assignment, reports: int, scoreboard: Scoreboard) -> None:
        self._assignment = assignment
        self._reports = reports
        self._scoreboard = scoreboard
        # A SimpleQueue, because signal handlers may put into it.
        self.events: queue.SimpleQueue[bytes | KeeperEnded] = queue.SimpleQueue()
        self._keepers: list[BlockingKeeper | AsyncKeeper] = []
        self._running: set[BlockingKeeper | AsyncKeeper] = set()
        self._services = ExitStack()
        self._loop: threading.Thread | None = None
        self._telemetry: Any = None
        self._app: Onceward | None = None
        self._databases: dict[DatabaseServer, AnswerWatch] = {}
        self._refused: str | None = None
        self._code = ENDED
        self._stopping = False
        self._hurry_at = inf
        self._leave_at = inf

    def run(self) -> int:
        """Run until all consumers have ended. Announces and returns the exit code."""
        code = self._run()
        self._report(code)
        return code

    def _run(self) -> int:
        try:
            app = self._load_app()
        except ConfigurationError as error:
            self._refuse(error)
            return self._code
        except Exception:  # noqa: BLE001  from the app's own code
            _log.critical("%s cannot be imported", self._assignment.target, exc_info=True)
            return FAILED
        try:
            self._start(app)
        except ConfigurationError as error:
            self._refuse(error)
            return self._code
        except ServiceError as error:
            _log.critical("%s; nothing is consumed", error, exc_info=error.__cause__)
            self._close_services(app)
            return FAILED
        while self._running and time.monotonic() < self._leave_at:
            self._handle_events()
            if time.monotonic() >= self._hurry_at:
                self._hurry()
            if self._stopping:
                self._leave_a_silent_database()
            elif any(keeper.stuck for keeper in self._keepers):
                _log.warning("a thread is stuck; this worker exits when the rest of its work is done")
                self._code = RECYCLED
                self._stop()
            self._report()
        self._close_services(app)
        if self._code or self._unsettled():
            return self._code or CUT_OFF
        return UNDELIVERED if any(keeper.has_undelivered for keeper in self._keepers) else ENDED

    def close(self) -> None:
        if self._telemetry is not None:
            self._telemetry.shutdown()

    def _load_app(self) -> Onceward:
        self._telemetry = _start_telemetry()
        self._app = app = load_app(self._assignment.target)
        given = self._assignment
        app.owner, app.only, app.run_only = given.owner, given.only, given.run_only
        app.override("command line", env=given.env, concurrency=given.concurrency, pool_size=given.pool_size)
        return app

    def _start(self, app: Onceward) -> None:
        only, drain = self._assignment.only, self._assignment.drain
        consumers = all_consumers(app, only)
        # What the relay publishes is work for the others, and what they send is work for the relay.
        rounds = Rounds(len(consumers)) if drain and RELAY in [each.name for each in consumers] else None
        for consumer in consumers:
            row = self._scoreboard.row(len(self._keepers))
            keeper = keeper_of(app, consumer, drain, lambda: self.events.put(CHANGED), row, rounds)
            self._keepers.append(keeper)
        self._databases = watch_database(app)
        self._report()  # before the first fetch: it says what the rows of the scoreboard are
        self._services.enter_context(shared_services(app, [keeper.consumer for keeper in self._keepers]))
        in_loop = [keeper for keeper in self._keepers if isinstance(keeper, AsyncKeeper)]
        if in_loop:
            ready: Future[None] = Future()
            self._loop = _daemon(lambda: run_in_loop(self._keep_in_loop(app, in_loop, ready)))
            ready.result()  # no consumer starts before all services are open
        self._running = set(self._keepers)
        for keeper in self._keepers:
            if isinstance(keeper, BlockingKeeper):
                _daemon(self._keep_in_thread, keeper)

    def _close_services(self, app: Onceward) -> None:
        if self._running:
            if app.opened:
                _log.warning("services were not closed: work that was cut off may still use them")
            return
        if self._loop is not None:
            self._loop.join(self._assignment.grace)  # it closes those of asyncio
        self._services.close()

    def _keep_in_thread(self, keeper: BlockingKeeper) -> None:
        try:
            keeper.keep()
        except BaseException as error:  # noqa: BLE001  the main thread decides
            self.events.put(KeeperEnded(keeper, error))
        else:
            self.events.put(KeeperEnded(keeper, None))

    async def _keep_in_loop(self, app: Onceward, keepers: Sequence[AsyncKeeper], ready: Future[None]) -> None:
        async def keep(keeper: AsyncKeeper) -> None:
            try:
                await keeper.keep()
            except BaseException as error:  # noqa: BLE001
                self.events.put(KeeperEnded(keeper, error))
            else:
                self.events.put(KeeperEnded(keeper, None))

        try:
            async with shared_services_async(app, [keeper.consumer for keeper in keepers]):
                ready.set_result(None)
                await asyncio.gather(*map(keep, keepers))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────

    def _handle_events(self) -> None:
        longest = LOOK_WHILE_STOPPING if self._stopping else REPORT_EVERY
        until = min(longest, max(min(self._hurry_at, self._leave_at) - time.monotonic(), 0.0))
        with suppress(queue.Empty):
            event = self.events.get(timeout=until)
            while True:
                self._handle(event)
                event = self.events.get_nowait()

    def _handle(self, event: bytes | KeeperEnded) -> None:
        if isinstance(event, KeeperEnded):
            self._running.discard(event.keeper)
            if event.error is not None:
                self._handle_failure(event.keeper, event.error)
        elif event == HURRY:
            self._hurry()
        elif event == GONE:
            _log.error("the supervisor is gone; this worker exits when its work is done")
            self._stop()
        elif event == DRAIN:
            self._stop()

    def _handle_failure(self, keeper: BlockingKeeper | AsyncKeeper, error: BaseException) -> None:
        """A consumer that cannot go on stops its worker: half a worker would look like a healthy one."""
        if isinstance(error, (ConfigurationError, ImportError)):
            self._refuse(error)
        elif isinstance(error, SourceUnreachable):
            _log.critical("%s", error)
            self._code = self._code or UNREACHABLE
        else:
            _log.critical("%s failed", keeper.consumer.name, exc_info=error)
            keeper.broken = True
            self._code = self._code or FAILED
        self._stop()

    def _refuse(self, error: Exception) -> None:
        self._refused = self._refused or str(error)
        self._code = MISUSED

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._hurry_at = time.monotonic() + self._assignment.grace
        for keeper in self._running:
            keeper.stop()

    def _hurry(self) -> None:
        self._stop()
        self._hurry_at = inf
        self._leave_at = min(self._leave_at, time.monotonic() + LANDING)
        for keeper in self._running:
            keeper.hurry()

    def _leave_a_silent_database(self) -> None:
        """Do not wait for a database that does not answer, if nothing is in flight.

        A consumer that has begun may just be taking messages. So its supervisor gives back what it holds.
        """
        has_begun = any(keeper.has_begun for keeper in self._running)
        if any(keeper.in_flight for keeper in self._running):
            return
        if not has_begun and self._problem() is not None:
            self._leave_at = min(self._leave_at, time.monotonic() + LAST_WAIT)
        if "onceward.db.calls" not in sys.modules:  # no database was asked anything
            return
        from onceward.db.calls import CALLS

        if (CALLS.connecting() or 0.0) >= LAST_WAIT:
            self._leave_at = time.monotonic()
        elif (CALLS.oldest() or 0.0) >= LAST_ANSWER:
            self._leave_at = time.monotonic()
            self._code = self._code or RECYCLED

    def _problem(self) -> str | None:
        """Why a database is not ready, if one is not."""
        return next((each.problem for each in self._databases.values() if each.problem is not None), None)

    def _watch_others(self) -> None:
        """Watch the servers of queues like the app's."""
        if self._app is None or "onceward.db.calls" not in sys.modules:
            return
        from onceward.db.calls import CALLS

        patience = self._app.settings.database_answers_within
        for server, url in CALLS.servers.items():
            if server not in self._databases:
                what = f"the PostgreSQL at {server.place} that has a queue"
                self._databases[server] = _watch(what, url, patience)

    def _unsettled(self) -> int:
        """How many deliveries are not settled."""
        return sum(
            keeper.status().in_flight if keeper in self._running else keeper.left for keeper in self._keepers
        )

    def _report(self, code: int | None = None) -> None:
        consumers = [keeper.status() for keeper in self._keepers]
        self._watch_others()
        for each in self._databases.values():
            each.look()
        pools = [] if self._app is None else self._app.engines.pools()
        status = WorkerStatus(
            consumers=consumers, refused=self._refused, database=self._problem(), pools=pools, exit_code=code
        )
        with suppress(BrokenPipeError):  # `GONE` handles it
            os.write(self._reports, msgspec.json.encode(status) + b"\n")


def watch_database(app: Onceward) -> dict[DatabaseServer, AnswerWatch]:
    """Return what notices that the app's PostgreSQL is frozen or out of reach; nothing if it has no server."""
    from onceward.app.build import database_url

    database = app.settings.database
    if database is None or database_url(database, asynchronous=False).get_backend_name() == "sqlite":
        return {}
    from onceward.db.calls import server_of

    url = database_url(database, asynchronous=False)
    return {server_of(url): _watch("the database", url, app.settings.database_answers_within)}


def _watch(what: str, url: URL, patience: float) -> AnswerWatch:
    from onceward.db.calls import AnswerWatch

    conninfo = url.set(drivername="postgresql").render_as_string(hide_password=False)

    def ask() -> None:
        import psycopg

        psycopg.connect(conninfo, connect_timeout=max(ceil(patience), 2), application_name="onceward").close()

    return AnswerWatch(ask, patience, what=what)


def _daemon(target: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True, name="onceward-run")
    thread.start()
    return thread


def _listen(control: int, events: queue.SimpleQueue[Any]) -> None:
    with os.fdopen(control, "rb", buffering=0) as pipe:
        for line in pipe:
            events.put(line)
    events.put(GONE)


def _start_telemetry() -> Any:
    """Set up telemetry if the environment asks for it."""
    if not any(name.startswith(TELEMETRY) for name in os.environ):
        return None
    from onceward.telemetry.setup import setup

    try:
        return setup()
    except (ImportError, ValueError, OSError) as error:
        more = ""
        if isinstance(error, OSError):
            more = "; an exporter that opens a port works for one process only: use otlp, or /metrics of --health"
        raise ConfigurationError(f"telemetry cannot start: {error}{more}") from error


def main() -> NoReturn:
    assignment = msgspec.json.decode(sys.argv[1], type=Assignment)
    worker = Worker(assignment, int(sys.argv[3]), Scoreboard(int(sys.argv[4])))
    for each in (signal.SIGTERM, signal.SIGINT):  # from outside: the supervisor uses its pipe
        signal.signal(each, lambda *_: worker.events.put(DRAIN))
    faulthandler.register(signal.SIGUSR1)  # to see where it hangs
    _daemon(_listen, int(sys.argv[2]), worker.events)
    start_logging(assignment.log_format, assignment.log_level, assignment.number)
    code = worker.run()
    _daemon(_force_exit, code)
    worker.close()
    sys.exit(code)


def _force_exit(code: int) -> None:
    time.sleep(PARTING)
    os._exit(code)


if __name__ == "__main__":
    main()
