"""A purge of PostgreSQL: drops whole days that no consumer needs anymore, and deletes rows from the others, and of ids
that contain no day."""

from __future__ import annotations

import time

from sqlalchemy import Connection

from onceward.inbox.purge.steps import SHORTEST_PAUSE, Progress, PurgePlan, PurgeReport, Removal
from onceward.inbox.stores import partitions
from onceward.inbox.stores.base import Store
from onceward.inbox.stores.partitions import Blocked, Partition, PartitionState
from onceward.inbox.stores.types import Overtaken, Records, StepTimes, begun

MADE_AHEAD = 7
"""Coming days for which partitions are created in advance."""


class DayRemoval(Removal):
    def __init__(self, store: Store, plan: PurgePlan, report: PurgeReport, progress: Progress) -> None:
        super().__init__(store, report, progress)
        self._plan = plan
        self._floor = max((target.floor_day for target in plan.targets), default=0)

    def run(self, connection: Connection) -> None:
        with partitions.only_purger(connection):
            try:
                with partitions.or_blocked(connection, "the purge did not finish"):
                    self._run(connection)
            except Blocked as blocked:
                self.report.unfinished.append(str(blocked))

    def _run(self, connection: Connection) -> None:
        self._make_days(connection)
        partitions.await_old_snapshots(connection)
        self._remove_days(connection)
        for target in self._plan.targets:
            self._walk(connection, Records("onceward_dedup", *target), by_age=True)
            for records in self.ledgers(target):
                self._walk(connection, records)

    def _make_days(self, connection: Connection) -> None:
        every = partitions.partitions(connection)
        there = [each for each in every if each.state is not PartitionState.DETACHED]
        for day in range(self._plan.today, self._plan.today + MADE_AHEAD + 1):
            if not any(each.day <= day <= each.last for each in there):
                partitions.make(connection, day)

    def _remove_days(self, connection: Connection) -> None:
        """Remove old days, beginning with those that an earlier purge began: only one can be detaching at a time."""
        floor = self._floor
        every = partitions.partitions(connection)
        begun_before = [each for each in every if each.state is not PartitionState.ATTACHED]
        old = begun_before + [
            each for each in every if each.state is PartitionState.ATTACHED and each.day < floor
        ]
        self.report.days = len(old)
        try:
            for partition in old:
                self._remove_day(connection, partition)
                self.report.days_done += 1
                self.progress(self.report)
        except Blocked as blocked:
            self.report.unfinished.append(str(blocked))

    def _remove_day(self, connection: Connection, partition: Partition) -> None:
        is_needed = self._is_needed(connection, partition)
        if partition.state is PartitionState.ATTACHED and is_needed:
            self._remove_rows(connection, partition)
            return
        if not is_needed:
            # Before the partition is detached: rows on hold must be visible at all times.
            with begun(connection, partitions.READ_COMMITTED):
                partitions.keep_held(connection, partition)
        if partition.state is not PartitionState.DETACHED:
            partitions.detach(connection, partition)
        dropped = partitions.drop(
            connection,
            partition,
            self.store.freeze_holds,
            lambda each: self._is_needed(connection, each),
        )
        if dropped is None:
            self._remove_rows(connection, partition)
            return
        self.report.dropped.append(partition.name)
        self.report.rows += dropped.rows - dropped.kept
        self.report.kept += dropped.kept
        self.count_time(dropped.seconds)

    def _is_needed(self, connection: Connection, partition: Partition) -> bool:
        """Whether it is for days that events can still have, or has rows of a consumer that still needs their day, or
        may need it."""
        if partition.last >= self._floor:
            return True
        for consumer_id in partitions.consumers_in(connection, partition):
            past = self._plan.past(consumer_id, partition.last)
            if past is None or not self.store.may_purge(connection, consumer_id, past.contract):
                return True
        return False

    def _remove_rows(self, connection: Connection, partition: Partition) -> None:
        there = partitions.consumers_in(connection, partition)
        for target in self._plan.targets:
            if target.consumer_id not in there:
                continue
            for day in partitions.days_in(connection, partition):
                if day < target.floor_day:
                    self._walk(connection, Records("onceward_dedup", *target, day=day))

    def _walk(self, connection: Connection, records: Records, by_age: bool = False) -> None:
        script = self.walk(records, by_age)
        operation = next(script)
        try:
            while True:
                began = time.perf_counter()
                with begun(connection, partitions.READ_COMMITTED):
                    step = operation(connection)
                    worked = time.perf_counter()
                total = time.perf_counter() - began
                self.count(step, StepTimes(worked - began, total))
                operation = script.send(step)
                # No transaction waits for our locks, but a purge should leave most of the machine to others.
                connection.exec_driver_sql(f"SELECT pg_sleep({max(SHORTEST_PAUSE, total):.3f})")
        except StopIteration:
            return
        except Overtaken:
            self.skip_overtaken(records.consumer_id)
