"""Runs all consumers of an app in memory, under a clock that the test moves.

Sources and sinks are queues in memory, and the database is a new SQLite file. Everything else is real: the engine, the
inbox, retries, dead letters, the outbox and schedules.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, text

from onceward import _time
from onceward._functions import is_async
from onceward.app.app import RELAY, Consumer, Onceward
from onceward.app.build import open_task, open_task_async
from onceward.app.lifespan import lifespans_of, open_services_async, taken_by
from onceward.app.relay import RelayConsumer
from onceward.durations import parse_seconds
from onceward.errors import ConfigurationError
from onceward.failures.board import Board, subjects_of
from onceward.outbox.claims import OutboxRows
from onceward.task.deadlines import Clock
from onceward.task.report import Report, StopReason
from onceward.testing.queues import Published, Queues
from onceward.testing.recorder import EffectRecorder, RecordedEffect

if TYPE_CHECKING:
    from onceward.deadletters import DeadLetter

MOST_ROUNDS = 1000
"""Rounds of a drain: consumers that send to each other without end must not hang a test."""

MOST_MESSAGES = 50_000
"""Messages of a consumer in a round: one that sends to itself without end must not hang a test."""

MOST_PROBES = 500
"""Probes of an outage while a test advances. They are a second or two apart, and an outage may last for days."""


class TestTime(Clock):
    """The engine's clock: the test moves it between calls, and pauses between attempts take no time."""

    __test__ = False
    stands_still = True
    now = staticmethod(_time.uptime)

    def sleeping(self, seconds: float) -> float:
        return 0.0


class Harness:
    """What both kinds of test have. Its methods are coroutines."""

    def __init__(
        self,
        app: Onceward,
        services: Mapping[Any, Any] | None,
        setup: Callable[[Any], object] | None,
    ) -> None:
        self.app = app
        self.effects: list[RecordedEffect] = []
        self.engine: Engine
        self._services = services or {}
        self._setup = setup
        self._queues = Queues(app)
        self._tasks: dict[str, Any] = {}
        self._ahead = 0.0
        self._probe_pause = 0.0
        """Seconds between two probes, at least."""
        self._probed_at: dict[str, float] = {}
        self._stack = AsyncExitStack()
        self._closed = False

    @property
    def published(self) -> list[Published]:
        return self._queues.published

    async def open(self) -> None:
        app = self.app
        if getattr(app, "_under_test", False):
            raise ConfigurationError(
                f"{app.name} is under test already; leave the other `testing.app(…)` first"
            )
        for each in app.consumers.values():
            _check(each)
        try:
            await self._open(app)
        except BaseException:
            await self._stack.aclose()
            raise

    async def _open(self, app: Onceward) -> None:
        stack = self._stack
        vars(app)["_under_test"] = True
        stack.callback(vars(app).pop, "_under_test")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="onceward-test-"))
        stack.callback(app.restore, app.resolved, app.opened)
        app.override("the test", database=f"sqlite:///{Path(folder, 'test.db')}", env="development")
        self._queues.install()
        stack.callback(self._queues.remove)
        stack.callback(self._restore_time)
        stack.callback(setattr, app, "board", app.board)
        app.board = Board()  # an outage of another test is not one of this
        self.engine = app.create_engine()
        stack.callback(self.engine.dispose)
        self._outbox = OutboxRows(self.engine)
        if self._setup is not None:
            await self._set_up(self._setup)
        replaced = app.services.replace(self._services)
        consumers = [*app.consumers.values()]
        wanted = [*lifespans_of(app, consumers), *taken_by(consumers)]
        opening = open_services_async(replaced.services, wanted, replaced.objects)
        app.opened = await stack.enter_async_context(opening)
        for consumer in [*consumers, RelayConsumer(app, in_place=True)]:
            await self._open_task(consumer)
        await self.drain()  # schedules begin now

    async def _set_up(self, setup: Callable[[Any], object]) -> None:
        if is_async(setup):
            engine = self.app.create_async_engine()
            try:
                await setup(engine)  # type: ignore[misc]
            finally:
                await engine.dispose()
        else:
            await asyncio.to_thread(setup, self.engine)

    def _restore_time(self) -> None:
        _time.move_ahead(-self._ahead)

    async def _open_task(self, consumer: Consumer) -> None:
        recorder = EffectRecorder(consumer.name, self.effects)
        if consumer.asynchronous:
            task: Any = await self._stack.enter_async_context(open_task_async(self.app, consumer, recorder))
        else:
            task = self._stack.enter_context(open_task(self.app, consumer, recorder))
        task.clock = TestTime()
        self._tasks[consumer.name] = (consumer, task)

    async def close(self) -> None:
        self._closed = True
        await self._stack.aclose()

    def check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(
                f"the test of {self.app.name} is over; use it inside of its `with` block"
            )

    async def send(self, target: Any, message: Any, *, id: str | None = None) -> str:
        self.check_open()
        return await self._consumer(target).send_async(message, id=id)

    def _consumer(self, target: Any) -> Consumer:
        known = self.app.consumers
        found = [each for each in known.values() if target in (each.name, each) or each.function == target]
        if len(found) == 1:
            return found[0]
        name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
        problem = "is several consumers; use the name of one" if found else "is not a consumer of the app"
        raise ConfigurationError(f"{name} {problem}; its consumers are {', '.join(known) or 'none'}")

    async def drain(self) -> Report:
        self.check_open()
        total = Report()
        for _ in range(MOST_ROUNDS):
            reports = [await self._consume(*each) for each in list(self._tasks.values())]
            is_due = any(self._until_turn(each) <= 0 for each in self.app.consumers.values())
            if not is_due and not any(each.succeeded + each.failed + each.postponed for each in reports):
                return total
            for each, (consumer, _) in zip(reports, self._tasks.values(), strict=True):
                if not isinstance(consumer, RelayConsumer):
                    _add(total, each)
        raise AssertionError(
            f"messages are still arriving after {MOST_ROUNDS} rounds: do consumers send to each other without end?"
        )

    async def _consume(self, consumer: Consumer, task: Any) -> Report:
        if consumer.name != RELAY and self._until_turn(consumer):
            return Report()
        changes = {"streaming": False, "limit": MOST_MESSAGES, "timeout": None}
        if self._outages(consumer):
            self._probed_at[consumer.name] = _time.uptime()
        loop = consumer.policy.loop.model_copy(update=changes)
        policy = consumer.policy.model_copy(update={"loop": loop})
        report: Report
        if consumer.asynchronous:
            report = await task.consume_transactions(policy)
        else:
            report = await asyncio.to_thread(task.consume_transactions, policy)
        if report.stop_reason is StopReason.LIMIT:
            raise AssertionError(
                f"{consumer.name} consumed {MOST_MESSAGES} messages, and there may be more: does it send to itself "
                "without end?"
            )
        return report

    async def advance(self, duration: str | float | timedelta) -> Report:
        self.check_open()
        seconds = parse_seconds(duration, "advance")
        total = await self.drain()
        end = _time.uptime() + seconds
        self._probe_pause = seconds / MOST_PROBES
        while (left := end - _time.uptime()) > 0:
            step = min(self._until_due(), left)
            if step == left:
                self._probe_pause = 0.0  # the last word on an outage is as late as can be
            _time.move_ahead(step)
            self._ahead += step
            _add(total, await self.drain())
        self._probe_pause = 0.0
        return total

    def _until_due(self) -> float:
        """Seconds until something happens: a delayed or failed message is due, or the slot of a schedule."""
        now = datetime.fromtimestamp(_time.wall(), UTC)
        slots = [each.next(now) for each in self.app.schedules.values()]
        slot = min(((each - now).total_seconds() for each in slots if each is not None), default=inf)
        turn = min(map(self._until_turn, self.app.consumers.values()), default=inf)
        return max(min(turn, self._outbox.look().wait, slot) + 0.001, 0.001)

    def _until_turn(self, consumer: Consumer) -> float:
        """Seconds until a message of the consumer is due, and the next probe of what it waits for."""
        board = self.app.board
        if consumer.identity in board.paused:
            return inf
        now, outages = _time.uptime(), self._outages(consumer)
        probes = [board.down[each].due_in - (now - board.read_at) for each in outages]
        if outages and consumer.name in self._probed_at:
            probes.append(self._probed_at[consumer.name] + self._probe_pause - now)
        return max(self._queues.seconds_until_due(consumer.name), *probes, 0.0)

    def _outages(self, consumer: Consumer) -> list[str]:
        subjects = subjects_of(self.app.name, consumer.identity, consumer.failures.depends_on)
        return [each for each in subjects if each in self.app.board.down]

    def dead_letters(self) -> list[DeadLetter]:
        from onceward.deadletters import DeadLetters

        self.check_open()
        return DeadLetters(self.engine).find(limit=10_000)

    def rows(self, query: str, **values: Any) -> list[dict[str, Any]]:
        self.check_open()
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(query), values).mappings()]


def _check(consumer: Consumer) -> None:
    for parameter, kind in consumer.signature.guests.items():
        if kind.family == "psycopg":
            raise ConfigurationError(
                f"{consumer.name} takes {parameter}: {kind.name}, and testing.app runs on SQLite; test it with "
                "open_task on a PostgreSQL from onceward.testing.servers"
            )


def _add(total: Report, more: Report) -> None:
    for name in ("succeeded", "duplicates", "failed", "postponed", "retries"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
