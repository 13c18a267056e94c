"""Where a consumer is put to the test, inside a child: an inbox on a database, instances of it, deliveries.

Deliveries go through the engine, as one transaction each. In asyncio every call is run to its end on the stage's own
event loop, so that scenarios read the same for both.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from sqlalchemy import URL, text

from onceward.connectors.memory import AsyncMemoryConnector, MemoryConnector
from onceward.inbox import AsyncInbox, Inbox
from onceward.task.work import Outcome, OutcomeStatus
from onceward.transaction import Transaction
from onceward.verify import intrusions, tables
from onceward.verify.children import Watchdog
from onceward.verify.databases import async_engine_at, engine_at
from onceward.verify.faults import Boundary, Fault, Probe
from onceward.verify.intrusions import Outside, Phase, during
from onceward.verify.plan import Plan

LONGEST_WAIT = 0.02
"""Seconds between two deliveries of what was postponed."""


class Delivery(msgspec.Struct, frozen=True):
    """One delivery of an event, and what came of it."""

    event: str
    status: OutcomeStatus
    duplicate: bool = False
    called: bool = False
    """Whether the handler was."""
    writes: int = 0
    effects: int = 0
    error: str = ""
    swallowed: bool = False
    """The handler returned, although something it called had raised."""
    returned: str = ""
    """What it returned, if that was an exception."""

    @property
    def succeeded(self) -> bool:
        return self.status is OutcomeStatus.SUCCEEDED


class Stage:
    """One process's side of the consumer's world."""

    def __init__(self, plan: Plan, place: URL, watchdog: Watchdog) -> None:
        self.plan = plan
        self.watchdog = watchdog
        self._runner = asyncio.Runner() if plan.asynchronous else None
        make_engine: Any = async_engine_at if plan.asynchronous else engine_at
        self.engine = make_engine(place)
        # Production's gate is not for those who are being proven.
        self.inbox: Any = (AsyncInbox if plan.asynchronous else Inbox)(self.engine, env="verification")
        given = plan.services(self.engine)
        self._reads = [given[name] for name in plan.asked.reads if name in given]
        for name in plan.asked.outside:
            given[name] = Outside(name, given[name])
        self.services = {**given, "inbox": self.inbox}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()
        if self._runner is not None:
            self._runner.close()

    def let_go(self) -> None:
        """Close what is open to the database; it is opened again when it is needed."""
        self._await(self.engine.dispose())

    def watch(self) -> None:
        """From now on, note what is done at the wrong time."""
        intrusions.install(self._reads)

    # ── the consumer ────────────────────────────────────────────────────────────────────────────────────

    def instance(self) -> Any:
        """A new one, with a probe."""
        connector = AsyncMemoryConnector() if self.plan.asynchronous else MemoryConnector()
        self.watchdog.pet("the consumer's __init__")
        with during(Phase.EARLY):
            task = self.plan.make({"source": connector}, dict(self.services))
        task.probe_of_verification = probe = Probe(self.watchdog)
        probe.attach(task)
        return task

    def adopt(self, task: Any) -> None:
        """Put an instance that was elsewhere before onto this stage."""
        task.services = dict(self.services)

    # ── deliveries ──────────────────────────────────────────────────────────────────────────────────────

    def deliver(self, task: Any, event: Transaction, fault: Fault | None = None) -> Delivery:
        """Once."""
        return self._told(task, event, fault, lambda: self._await(task.start_processing(event)))

    def settle(self, task: Any, event: Transaction, fault: Fault | None = None) -> list[Delivery]:
        """Until it succeeds, as a source does; or until it fails without a fault of ours."""
        return self._settle(lambda given: self.deliver(task, event, given), fault)

    def settle_at_once(self, events: Sequence[Transaction], copies: int) -> list[Delivery]:
        """Copies of each event, at the same time, each to an instance of its own."""
        found: list[Delivery] = []
        instances = [self.instance() for _ in range(copies)]
        for event in events:
            self.watchdog.pet(f"{copies} copies of {event.id!r} at once")
            works = [self._settling(task, event) for task in instances]
            for deliveries in self._at_once(works):
                found += deliveries
        return found

    def _settling(self, task: Any, event: Transaction) -> Callable[[], Any]:
        if not self.plan.asynchronous:
            return lambda: self._settle(
                lambda _: self._told(task, event, None, lambda: task.start_processing(event)), None
            )

        async def settle() -> list[Delivery]:
            found: list[Delivery] = []
            until = time.monotonic() + self.plan.asked.timeout
            while time.monotonic() < until:
                probe: Probe = task.probe_of_verification
                probe.begin(None)
                outcome = await task.start_processing(event)
                found.append(_delivery(event, outcome, probe))
                if outcome.status is not OutcomeStatus.POSTPONED:
                    break
                await asyncio.sleep(LONGEST_WAIT)
            return found

        return settle

    def _at_once(self, works: list[Callable[[], Any]]) -> list[list[Delivery]]:
        if self._runner is not None:

            async def all_of_them() -> list[list[Delivery]]:
                return list(await asyncio.gather(*(work() for work in works)))

            return self._runner.run(all_of_them())
        found: list[list[Delivery]] = []
        together = threading.Barrier(len(works))

        def run(work: Callable[[], Any]) -> None:
            together.wait()
            found.append(work())

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _settle(self, deliver: Callable[[Fault | None], Delivery], fault: Fault | None) -> list[Delivery]:
        found: list[Delivery] = []
        until = time.monotonic() + self.plan.asked.timeout
        while True:
            found.append(deliver(fault))
            if found[-1].succeeded or time.monotonic() > until:
                return found
            if found[-1].status is OutcomeStatus.POSTPONED:
                time.sleep(LONGEST_WAIT)
            elif fault is None:
                return found
            else:
                fault = None

    def _told(
        self, task: Any, event: Transaction, fault: Fault | None, deliver: Callable[[], Outcome]
    ) -> Delivery:
        probe: Probe = task.probe_of_verification
        probe.begin(fault)
        if fault is not None and fault.boundary is Boundary.BEFORE_DEDUP:
            self._arm_the_store(probe)
        self.watchdog.pet(f"the handler with event {event.id!r}")
        try:
            with during(Phase.EARLY):
                outcome = deliver()
        except (Exception, SystemExit) as error:  # noqa: BLE001  an exit of user code is no end of the kit
            return Delivery(event.id, OutcomeStatus.ABANDONED, error=_text(error))
        return _delivery(event, outcome, probe)

    def _arm_the_store(self, probe: Probe) -> None:
        """Have the fault happen at the first question whether the event is new."""
        store = self.inbox.processor.store
        for name in ("admit", "look_up"):
            real = getattr(store, name)

            def asked(*args: Any, real: Callable[..., Any] = real) -> Any:
                probe.reached(Boundary.BEFORE_DEDUP)
                return real(*args)

            setattr(store, name, asked)

    def let_leases_run_out(self) -> None:
        """As if time had passed since a crash, and as if an operator had looked into it."""
        self.execute("UPDATE onceward_attempts SET locked_until = NULL, ends = starts")

    # ── the database ────────────────────────────────────────────────────────────────────────────────────

    def rows(self, found: Sequence[tables.Table]) -> tables.Rows:
        exclude = self.plan.asked.exclude
        read: tables.Rows = self._on_connection(lambda connection: tables.read(connection, found, exclude))
        return read

    def execute(self, sql: str) -> None:
        self._on_connection(lambda connection: connection.execute(text(sql)))

    def _on_connection(self, act: Callable[[Any], Any]) -> Any:
        if self._runner is None:
            with self.engine.begin() as connection:
                return act(connection)

        async def acting() -> Any:
            async with self.engine.begin() as connection:
                return await connection.run_sync(act)

        return self._runner.run(acting())

    def _await(self, result: Any) -> Any:
        if self._runner is None:
            return result

        async def awaited() -> Any:
            return await result

        return self._runner.run(awaited())


def _delivery(event: Transaction, outcome: Outcome, probe: Probe) -> Delivery:
    error = outcome.error
    return Delivery(
        event.id,
        outcome.status,
        outcome.duplicate,
        probe.called,
        probe.writes,
        probe.effects,
        "" if error is None else _text(error.__cause__ or error),
        probe.swallowed,
        _text(probe.result) if isinstance(probe.result, BaseException) else "",
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
