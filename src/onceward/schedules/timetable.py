"""Publishes the slots that are due: a row for each schedule says how far it has come, in the app's database.

    row locked ─► slots after the last one, up to now ─► a message for each in the outbox ─► row moved ─► commit

All of that is one transaction, so a slot is published once, whichever process does it and whatever crashes. A new
schedule begins with its next slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from datetime import UTC, datetime
from math import inf

from sqlalchemy import Engine

from onceward._sync import run_blocking
from onceward.db import LockTimeoutError
from onceward.db.transaction import DbTransaction
from onceward.outbox.connections import BlockingConnectionPort
from onceward.outbox.outbox import Outbox
from onceward.outbox.rows import write
from onceward.schedules.schedule import Schedule
from onceward.storage.database import BlockingStoragePorts, Sql
from onceward.telemetry.logger import OwnLogger

_log = OwnLogger(logging.getLogger("onceward.schedules"))

LOOK_EVERY = 30.0
"""Seconds between two looks at the database in any case: its clock may be set."""


class Timetable:
    """The schedules of an app. Every relay has one, and calls `publish` often."""

    def __init__(self, engine: Engine, app: str, schedules: Collection[Schedule], outbox: Outbox) -> None:
        self._app = app
        self._schedules = list(schedules)
        self._outbox = outbox
        self._ports = BlockingStoragePorts(engine)
        self._sql = Sql(engine.dialect.name, None)
        self._look_at = 0.0 if schedules else inf

    def publish(self) -> float:
        """Publish the slots that are due. Return the seconds until the next look."""
        now = time.monotonic()
        if now < self._look_at:
            return self._look_at - now
        wait = LOOK_EVERY
        for schedule in self._schedules:
            try:
                wait = min(wait, run_blocking(self._ports.transact(self._publish, schedule)))
            except LockTimeoutError:  # another process is at it, or a handler's transaction is long
                wait = min(wait, 1.0)
        self._look_at = time.monotonic() + wait
        return wait

    def _publish(self, transaction: DbTransaction, schedule: Schedule) -> float:
        """Return the seconds until the next slot."""
        name = f"{self._app}:{schedule.name}"
        self._sql.run(transaction, _BEGIN, name=name)
        row = self._sql.run(transaction, _READ + self._sql.for_update, name=name).one()
        now, after = datetime.fromtimestamp(row.now, UTC), datetime.fromtimestamp(row.last_slot, UTC)
        slots, last = schedule.due(after, now)
        port = BlockingConnectionPort(transaction.connection)
        for slot in slots:
            made = self._outbox.message(
                schedule.target,
                schedule.payload(slot),
                id=f"{name}@{slot.isoformat()}",
                key=None,
                delay=None,
                at=slot,
                headers=schedule.headers,
            )
            run_blocking(write(port, made))
        if last > after:
            self._sql.run(transaction, _MOVE, name=name, slot=last.timestamp())
        following = schedule.next(max(last, after))
        return LOOK_EVERY if following is None else max(following.timestamp() - row.now, 0.0)


_BEGIN = """
    INSERT INTO onceward_schedules (name, last_slot) VALUES (:name, {now}) ON CONFLICT (name) DO NOTHING
"""
_READ = "SELECT last_slot, {now} AS now FROM onceward_schedules WHERE name = :name"
_MOVE = "UPDATE onceward_schedules SET last_slot = :slot WHERE name = :name"
