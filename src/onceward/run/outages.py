"""Keep one consumer of a worker consuming, through outages of its source or database, until it is asked to stop."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, MutableSequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

from onceward._process.rounds import Rounds
from onceward._sync import run_blocking
from onceward.app.app import RELAY, Consumer, Onceward
from onceward.app.build import open_task, open_task_async
from onceward.backoff import Backoff
from onceward.errors import ConfigurationError, OncewardError
from onceward.failures.board import hold_of
from onceward.failures.middleware import LOOK, DependencyDown
from onceward.run.flights import Seen, flights_of
from onceward.run.progress import Progress
from onceward.run.protocol import ConsumerStatus, WorkerState
from onceward.run.scoreboard import COUNTS
from onceward.run.tally import SharedTally
from onceward.task.exceptions import LoopError
from onceward.task.lifecycle import text_of
from onceward.task.mixins.policies import ConsumerPolicy
from onceward.task.report import Report
from onceward.telemetry.logger import OwnLogger
from onceward.telemetry.tallies import tally_with

_log = OwnLogger(logging.getLogger("onceward.run"))

OUTAGE = Backoff(0.25, cap=10.0)
"""Delay between two attempts during an outage."""
CALM = 15.0
"""Seconds without an outage after which the next one counts as the first."""
PATIENCE = 60.0
"""Seconds that a run with `--drain` waits for a source or a database."""


ROUND_LOOK = 0.02
"""Seconds between two looks at whether the other consumers of a run with `--drain` are done."""


class SourceUnreachable(Exception):
    """The source or database did not answer within `PATIENCE`."""


class Keeper:
    """Keeps one consumer running. Written for both modes; the subclasses define how to call and how to wait."""

    def __init__(
        self,
        app: Onceward,
        consumer: Consumer,
        drain: bool,
        on_change: Callable[[], None] = lambda: None,
        row: MutableSequence[int] | None = None,
        rounds: Rounds | None = None,
    ) -> None:
        self.app = app
        self.consumer = consumer
        self.state = WorkerState.STARTING
        self.left = 0
        """Deliveries not settled when the last call ended."""
        self.broken = False
        """Whether it failed and cannot go on."""
        self.has_undelivered = False
        """Whether it is a relay that has drained its outbox, except for targets that cannot be reached."""
        self._drain = drain
        self._rounds = rounds
        self._policy = policy_of_run(consumer.policy, streaming=not drain)
        self._on_change = on_change
        self._progress = self._count(row)
        self._attempts_seen: Seen = {}
        self._task: Any = None
        self._problem: str | None = None
        self._tries = 0
        self._away_since = 0.0
        self._failed_at = -inf
        self._stopping = False

    def _count(self, row: MutableSequence[int] | None) -> Progress:
        """Count in this row of the scoreboard. An inbox counts the attempts of a consumer with a contract."""
        if row is None:
            return Progress(self._on_answer)
        tally, contract = SharedTally(row[COUNTS:]), self.consumer.contract
        if contract is not None:
            tally_with(contract.consumer_id, tally)
        return Progress(self._on_answer, row[:COUNTS], tally if contract is None else None)

    async def _with_task(self) -> None:
        """Build the task and call `_consume` with it."""
        raise NotImplementedError

    async def _pause(self, seconds: float) -> None:
        """Sleep until the time is up or `stop` is called."""
        raise NotImplementedError

    async def _keep(self) -> None:
        await self._through_outages(self._with_task)
        self._change(WorkerState.ENDED)

    async def _consume(self, task: Any, call: Callable[[], Awaitable[Report]]) -> None:
        """Consume with one task through outages: its inbox may hold outcomes that the database did not accept."""
        self._task = task
        task.interruptible = True
        task.draining = self._drain
        if self.consumer.name == RELAY:
            task.connectors["source"].draining = self._drain
        if self._stopping:
            task.stop()  # was asked to while the task was being built

        async def consume() -> None:
            try:
                await call()
            finally:
                self.left = self._progress.call_ended()

        while True:
            before = self._progress.handled
            await self._through_outages(consume)
            if not await self._has_next_round(did_work=self._progress.handled > before):
                break
        if self._drain and not self._stopping and self.consumer.name == RELAY:
            await self._through_outages(self._note_undelivered)

    async def _has_next_round(self, *, did_work: bool) -> bool:
        """Wait until the other consumers have found their sources empty. Return whether to look again: one of them, or
        this one, has made work since."""
        rounds = self._rounds
        if rounds is None:
            return False
        source = self._progress.source
        while not self._stopping and getattr(source, "is_calling", False):
            await self._pause(ROUND_LOOK)
        number = rounds.finish(did_work=did_work or getattr(source, "is_making", False))
        while not self._stopping and not rounds.is_finished(number):
            await self._pause(ROUND_LOOK)
        return not self._stopping and not rounds.are_over

    async def _note_undelivered(self) -> None:
        for name, messages, why in self._progress.source.undelivered():
            self.has_undelivered = True
            _log.error("%d messages still wait for %s, which cannot be reached: %s", messages, name, why)

    async def _through_outages(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat the call until it ends by itself or the keeper is stopped."""
        while not self._stopping:
            try:
                await call()
            except Exception as error:
                if not is_outage(error):
                    raise
                await self._wait_out(error)
            else:
                return

    async def _wait_out(self, error: Exception) -> None:
        if self._stopping:
            _log.error("%s failed while stopping: %s", self.consumer.name, text_of(error))
            return
        self._problem = reason_of(error)
        if self._tries == 0:
            self._away_since = time.monotonic()
        elif self._drain and time.monotonic() - self._away_since >= PATIENCE:
            raise SourceUnreachable(
                f"{self.consumer.name} gave up after waiting {PATIENCE:.3g} s for its source or database: "
                f"{self._problem}"
            )
        wait = OUTAGE.delay(self._tries)
        if isinstance(error.__cause__, DependencyDown):  # the log has it, and a probe is due soon
            self._problem, wait = None, min(wait, LOOK)
        else:
            _log.warning(
                "%s is waiting for its source or database; next attempt in %.3g s: %s",
                self.consumer.name, wait, self._problem,
            )  # fmt: skip
        self._tries += 1
        self._failed_at = time.monotonic()
        self._change(WorkerState.WAITING)
        await self._pause(wait)

    def _on_answer(self) -> None:
        if time.monotonic() - self._failed_at >= CALM:
            self._tries = 0
        if self.state in (WorkerState.STARTING, WorkerState.WAITING):
            if self._problem is not None:
                _log.info("%s is consuming again", self.consumer.name)
            self._problem = None
            self._change(WorkerState.CONSUMING)

    def _change(self, state: WorkerState) -> None:
        self.state = state
        self._on_change()

    def stop(self) -> None:
        """Fetch nothing more; work in flight finishes and is settled."""
        self._stopping = True
        if self.state is not WorkerState.ENDED:
            self.state = WorkerState.STOPPING
        if self._task is not None:
            self._task.stop()

    def hurry(self) -> None:
        if self._task is not None:
            self._task.hurry()

    @property
    def has_begun(self) -> bool:
        """Whether its task was built, so there may be work in flight."""
        return self._task is not None

    @property
    def in_flight(self) -> int:
        return self._progress.in_flight()[0]

    @property
    def stuck(self) -> int:
        return 0 if self._task is None else self._task.stuck

    def status(self) -> ConsumerStatus:
        progress = self._progress
        in_flight, oldest = progress.in_flight()
        succeeded, failed, returned = progress.row[:3]
        hold = hold_of(
            self.app.board, self.app.name, self.consumer.identity, self.consumer.failures.depends_on
        )
        limiter = self.app.limiters.get(self.consumer.name)
        limited, limited_since = (0, None) if limiter is None else limiter.waiting_now()
        # Of a relay: the sinks that cannot be reached.
        away: dict[str, Any] = getattr(progress.source, "away", dict)()
        why = [] if hold.why is None else [hold.why]
        why += [f"waiting for {name}, which cannot be reached: {each.why}" for name, each in away.items()]
        answers = hold.why is not None and self.state is WorkerState.STARTING  # it does not ask its source
        return ConsumerStatus(
            name=self.consumer.name,
            state=WorkerState.CONSUMING if answers else self.state,
            succeeded=succeeded,
            failed=failed,
            returned=returned,
            in_flight=in_flight,
            oldest_since=oldest,
            asking_since=progress.asking_since,
            progress_at=progress.progress_at,
            stuck=self.stuck,
            problem=self._problem,
            flights=flights_of(
                self.consumer, self._task, progress.deliveries(), time.monotonic(), self._attempts_seen
            ),
            broken=self.broken,
            held="; ".join(why) or None,
            paused=hold.paused,
            down_since=min((each.since for each in away.values()), default=hold.down_since),
            limited=None if self.consumer.limit is None else limited,
            limited_since=limited_since,
        )


class BlockingKeeper(Keeper):
    """For `def` consumers. Runs in its own thread."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._stopped = threading.Event()

    def keep(self) -> None:
        run_blocking(self._keep())

    async def _with_task(self) -> None:
        async def call() -> Report:
            return task.consume_transactions(self._policy)

        with open_task(self.app, self.consumer, self._progress) as task:
            await self._consume(task, call)

    async def _pause(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def stop(self) -> None:
        super().stop()
        self._stopped.set()


class AsyncKeeper(Keeper):
    """For `async def` consumers. All of them run in one event loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pausing: Callable[[], object] | None = None

    async def keep(self) -> None:
        await self._keep()

    async def _with_task(self) -> None:
        async with open_task_async(self.app, self.consumer, self._progress) as task:
            await self._consume(task, lambda: task.consume_transactions(self._policy))

    async def _pause(self, seconds: float) -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        self._pausing = partial(loop.call_soon_threadsafe, over.set)
        with suppress(TimeoutError):
            if not self._stopping:
                await asyncio.wait_for(over.wait(), seconds)
        self._pausing = None

    def stop(self) -> None:
        super().stop()
        wake = self._pausing
        if wake is not None:
            wake()


def keeper_of(app: Onceward, consumer: Consumer, *more: Any) -> BlockingKeeper | AsyncKeeper:
    return (AsyncKeeper if consumer.asynchronous else BlockingKeeper)(app, consumer, *more)


def policy_of_run(policy: ConsumerPolicy, *, streaming: bool) -> ConsumerPolicy:
    """A run ends on request or when nothing is left, so the limits of a single call do not apply."""
    changes = {"streaming": streaming, "limit": None, "timeout": None}
    return policy.model_copy(update={"loop": policy.loop.model_copy(update=changes)})


def reason_of(error: Exception) -> str:
    """The reason in one line: the cause of a failed fetch, and the driver's own words without SQLAlchemy's page."""
    from sqlalchemy.exc import DBAPIError

    cause = error.__cause__ if isinstance(error, LoopError) and error.__cause__ is not None else error
    if isinstance(cause, DBAPIError) and cause.orig is not None:
        cause = cause.orig
    return text_of(cause).partition("\n")[0]


def is_outage(error: Exception) -> bool:
    """Whether a retry may work: the fault is outside, not in the program or its configuration."""
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.exc import TimeoutError as PoolTimeout

    if isinstance(error, ConfigurationError):
        return False
    return isinstance(error, (OncewardError, OSError, sqlite3.Error, DBAPIError, PoolTimeout))
