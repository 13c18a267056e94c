"""Publishes the slots that are due: a row for each schedule says how far it has come, in the app's database.

    row locked ─► slots after the last one, up to now ─► a message for each in the outbox ─► row moved ─► commit

All of that is one transaction, so a slot is published once, whichever process does it and whatever crashes. A new
schedule begins with its next slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from math import inf

from sqlalchemy import Engine

from onceward._sync import run_blocking
from onceward._time import uptime
from onceward.db import LockTimeoutError
from onceward.db.transaction import DbTransaction
from onceward.outbox.connections import BlockingConnectionPort
from onceward.outbox.message import Message
from onceward.outbox.outbox import Outbox
from onceward.outbox.rows import write
from onceward.schedules.schedule import Schedule
from onceward.storage.database import BlockingStoragePorts, Sql
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.schedules"))

LOOK_EVERY = 30.0
"""Seconds between two looks at the database in any case: its clock may be set."""


class _PayloadFailed(Exception):
    """There is no message for a slot: the user's code raised, or returned what cannot be sent."""


class Timetable:
    """The schedules of an app. Every relay has one, and calls `publish` often."""

    def __init__(
        self,
        engine: Engine,
        app: str,
        schedules: Collection[Schedule],
        outbox: Outbox,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """With a `clock`, it says which slots are due, instead of the database's."""
        self._app = app
        self._schedules = sorted(schedules, key=lambda each: each.name)
        self._outbox = outbox
        self._ports = BlockingStoragePorts(engine)
        self._sql = Sql(engine.dialect.name)
        self._clock = clock
        self._look_at = 0.0 if schedules else inf

    def publish(self) -> float:
        """Publish the slots that are due. Return the seconds until the next look."""
        now = uptime()
        if now < self._look_at:
            return self._look_at - now
        wait = LOOK_EVERY
        try:
            wait = min(wait, run_blocking(self._ports.transact(self._publish_all)))
        except LockTimeoutError:  # another process is at it, or a handler's transaction is long
            wait = 1.0
        self._look_at = uptime() + wait
        return wait

    def _publish_all(self, transaction: DbTransaction) -> float:
        """Return the seconds until the next slot of any schedule. All processes go through them in the same order, so
        none waits for another that waits for it."""
        now = datetime.fromtimestamp(
            self._sql.now(transaction) if self._clock is None else self._clock(), UTC
        )
        wait = LOOK_EVERY
        for schedule in self._schedules:
            try:
                wait = min(wait, self._publish(transaction, schedule, now))
            except _PayloadFailed as failed:  # its slot is not lost, and other schedules and messages go on
                _log.error(
                    "the schedule %s has no message for its slot, which is tried again in %.3g s",
                    schedule.name, LOOK_EVERY, exc_info=failed.__cause__,
                )  # fmt: skip
        return wait

    def _publish(self, transaction: DbTransaction, schedule: Schedule, now: datetime) -> float:
        """Return the seconds until the next slot. Raises `_PayloadFailed` before it writes a message."""
        name = f"{self._app}:{schedule.name}"
        self._sql.run(transaction, _BEGIN, name=name, begin=now.timestamp())
        after = datetime.fromtimestamp(
            self._sql.run(transaction, _READ + self._sql.for_update, name=name).scalar_one(), UTC
        )
        slots, last = schedule.due(after, now)
        messages = [self._message(schedule, slot, f"{name}@{slot.isoformat()}") for slot in slots]
        port = BlockingConnectionPort(transaction.connection)
        for message in messages:
            run_blocking(write(port, message))
        if last > after:
            self._sql.run(transaction, _MOVE, name=name, slot=last.timestamp())
        following = schedule.next(max(last, after))
        return LOOK_EVERY if following is None else max((following - now).total_seconds(), 0.0)

    def _message(self, schedule: Schedule, slot: datetime, message_id: str) -> Message:
        try:
            payload = schedule.payload(slot)
            return self._outbox.message(
                schedule.target,
                payload,
                id=message_id,
                key=None,
                delay=None,
                at=slot,
                headers=schedule.headers,
            )
        except Exception as error:
            raise _PayloadFailed from error


_BEGIN = """
    INSERT INTO onceward_schedules (name, last_slot) VALUES (:name, :begin) ON CONFLICT (name) DO NOTHING
"""
_READ = "SELECT last_slot FROM onceward_schedules WHERE name = :name"
_MOVE = "UPDATE onceward_schedules SET last_slot = :slot WHERE name = :name"
