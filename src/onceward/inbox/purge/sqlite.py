"""A purge of SQLite: deletes a few rows at a time, with pauses in which others get the lock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine

from onceward.db import LockTimeoutError, transaction
from onceward.inbox.ports import InboxPorts
from onceward.inbox.purge.steps import (
    SHORTEST_PAUSE,
    Pace,
    Progress,
    PurgePlan,
    PurgeReport,
    Removal,
    Script,
    Target,
)
from onceward.inbox.stores.sqlite import SqliteStore
from onceward.inbox.stores.types import Overtaken, Records, StepTimes

T = TypeVar("T")

PAUSE = 2
"""The pause after a step, as a multiple of its length. Waiting connections poll the lock only from time to time, and
should usually find it free."""
PROBE_PAUSE = 0.001
"""Seconds between two tries to get SQLite's lock. SQLite itself tries less and less often, and a busy consumer leaves
the lock free only for moments: a purge would hardly ever get it."""
LOCK_PATIENCE = 60.0
"""Seconds after which a purge of SQLite stops trying to get the lock."""


class RowRemoval(Removal):
    store: SqliteStore

    def __init__(
        self, store: SqliteStore, ports: InboxPorts, report: PurgeReport, progress: Progress
    ) -> None:
        super().__init__(store, report, progress)
        self._ports = ports
        self._engine = _plain(ports)

    async def run(self, plan: PurgePlan) -> None:
        days = {target: (await self._step(partial(self._days_below, target)))[0] for target in plan.targets}
        self.report.days = sum(map(len, days.values()))
        for target in plan.targets:
            try:
                for day in days[target]:
                    await self._drive(self.walk(Records("onceward_dedup", *target, day=day), by_age=True))
                    self.report.days_done += 1
                for records in self.ledgers(target):
                    await self._drive(self.walk(records))
            except Overtaken:
                self.skip_overtaken(target.consumer_id)
        await self._give_back_space()

    def _days_below(self, target: Target, connection: Connection) -> list[int]:
        return self.store.days_below(connection, target.consumer_id, target.floor_day)

    async def _drive(self, script: Script) -> None:
        operation = next(script)
        while True:
            step, times = await self._step(operation)
            self.count(step, times)
            try:
                operation = script.send(step)
            except StopIteration:
                return

    async def _step(self, operation: Callable[[Connection], T]) -> tuple[T, StepTimes]:
        """Run one transaction, then pause. The returned times are those during which no other connection can write."""
        until = time.monotonic() + LOCK_PATIENCE
        while (done := await self._if_free(operation)) is None:
            if time.monotonic() > until:
                raise LockTimeoutError(
                    f"other connections kept the database locked for {LOCK_PATIENCE:g} s; removed records stay "
                    "removed, and the next purge continues with the rest"
                )
            await self._ports.sleep(PROBE_PAUSE)
        await self._ports.sleep(max(SHORTEST_PAUSE, PAUSE * done[1].total))
        return done

    async def _if_free(self, operation: Callable[[Connection], T]) -> tuple[T, StepTimes] | None:
        with transaction.reserved(self._engine):
            return await self._ports.outside(self.store.if_free, operation)

    async def _give_back_space(self) -> None:
        pace, before = Pace(), -1
        while True:
            give_back = partial(self.store.give_back_space, pages=pace.size)
            left, times = await self._step(give_back)
            if left in (0, before):
                return
            before = left
            pace.learn(times.work, is_full=True)
            self.count_time(times.total)


def _plain(ports: Any) -> Engine:
    """Return the blocking engine of either kind of ports; an AsyncEngine wraps one."""
    engine: Engine = getattr(ports.engine, "sync_engine", ports.engine)
    return engine
