"""Publishes the slots that are due: a row for each schedule says how far it has come, in the app's database.

    row locked ─► slots after the last one, up to now ─► a message for each in the outbox ─► row moved ─► commit

All of that is one transaction, so a slot is published once, whichever process does it and whatever crashes. If code of
the app makes the message, it is called between two transactions, and the second one checks that no other process was
first:

    slot found ─► commit ─► code called ─► row locked, not moved meanwhile ─► message ─► row moved ─► commit

A new schedule begins with its next slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from math import inf
from typing import Any

from sqlalchemy import Engine

from onceward._functions import check_result
from onceward._sync import run_blocking
from onceward._time import uptime
from onceward.db import LockTimeoutError
from onceward.db.transaction import DbTransaction
from onceward.outbox.connections import BlockingConnectionPort
from onceward.outbox.delay import Delayed
from onceward.outbox.errors import OutboxError
from onceward.outbox.message import NO_LINEAGE, Lineage, Message
from onceward.outbox.outbox import Outbox
from onceward.outbox.rows import write
from onceward.schedules.calls import SlotCall, SlotCalls
from onceward.schedules.schedule import Schedule
from onceward.storage.database import BlockingStoragePorts, Sql, read_committed
from onceward.telemetry.logger import OwnLogger
from onceward.transaction import Transaction

_log = OwnLogger(logging.getLogger("onceward.schedules"))

LOOK_EVERY = 30.0
"""Seconds between two looks at the database in any case: its clock may be set."""
AGAIN = 30.0
"""Seconds until a slot without a message is tried again."""


class Timetable:
    """The schedules of an app. Every relay has one, and calls `publish` often."""

    def __init__(
        self,
        engine: Engine,
        app: str,
        schedules: Collection[Schedule],
        outbox: Outbox,
        clock: Callable[[], float] | None = None,
        *,
        in_place: bool = False,
        on_made: Callable[[], None] = lambda: None,
    ) -> None:
        """With a `clock`, it says which slots are due, instead of the database's. `on_made` is called from any thread
        when `publish` has something to do sooner than it has said; with `in_place`, it does all of it at once."""
        self._app = app
        self._schedules = sorted(schedules, key=lambda each: each.name)
        self._outbox = outbox
        self._ports = BlockingStoragePorts(read_committed(engine))
        self._sql = Sql(engine.dialect.name)
        self._clock = clock
        self._calls = SlotCalls(self._make, in_place=in_place, on_end=on_made)
        self._in_place = in_place
        self._again_at: dict[str, float] = {}
        """When a schedule whose slot has failed is tried again, by `uptime`."""
        self._tried: dict[str, datetime] = {}
        """The slots that have failed."""
        self._look_at = 0.0 if schedules else inf
        self._first_look: datetime | None = None
        self._is_draining = False

    @property
    def is_making(self) -> bool:
        """Whether messages are made that `publish` has not written yet."""
        return len(self._calls) > 0

    @property
    def is_calling(self) -> bool:
        """Whether code of the app is running, so `publish` cannot write all of them yet."""
        return len(self._calls) > len(self._calls.ended)

    def publish(self, *, draining: bool = False) -> float:
        """Publish the slots that are due. Return the seconds until the next look. A run that ends when nothing waits
        has only the slots that are due at its first look: there is always a next one."""
        self._is_draining = draining
        now = uptime()
        if now < self._look_at and not self._calls.ended:
            return self._look_at - now
        try:
            wait = self._look()
        except LockTimeoutError:  # another process is at it, or a handler's transaction is long
            wait = 1.0
        self._look_at = uptime() + wait
        return wait

    def _look(self) -> float:
        while True:
            while self._calls.ended:
                self._record(self._calls.ended[0])
            wait, due = run_blocking(self._ports.transact(self._publish_all))
            for call in due:
                self._calls.begin(call)
            if not (due and self._in_place):
                return wait

    def _publish_all(self, transaction: DbTransaction) -> tuple[float, list[SlotCall]]:
        """Return the seconds until the next slot of any schedule, and the calls that are due. All processes go through
        them in the same order, so none waits for another that waits for it."""
        now = datetime.fromtimestamp(
            self._sql.now(transaction) if self._clock is None else self._clock(), UTC
        )
        self._first_look = self._first_look or now
        if self._is_draining:
            now = self._first_look
        wait = LOOK_EVERY
        calls: list[SlotCall] = []
        for schedule in self._schedules:
            if schedule in self._calls:
                continue
            again = self._again_at.get(schedule.name, 0.0) - uptime()
            if again > 0:
                wait = min(wait, again)
                continue
            after = self._last_slot(transaction, schedule, now)
            slots, last = schedule.due(after, now, self._tried.get(schedule.name))
            if slots and schedule.runs_code:
                calls.append(SlotCall(schedule, after, slots[0]))
                continue
            try:
                for slot in slots:
                    self._write(transaction, self._message(schedule, slot, schedule.payload(slot)))
            except OutboxError as error:
                self._fail(schedule, slots[-1], error)
                continue
            self._move(transaction, schedule, after, last)
            following = schedule.next(max(last, after))
            if following is not None:
                wait = min(wait, max((following - now).total_seconds(), 0.0))
        return wait, calls

    def _record(self, call: SlotCall) -> None:
        """Publish what was made for a slot, unless another process was first."""
        if call.error is None:
            try:
                run_blocking(self._ports.transact(self._publish_made, call))
            except OutboxError as error:
                call.error = error
        if call.error is not None:
            self._fail(call.schedule, call.slot, call.error)
        self._calls.forget(call)

    def _publish_made(self, transaction: DbTransaction, call: SlotCall) -> None:
        if self._last_slot(transaction, call.schedule, call.after) != call.after:
            return
        if call.message is not None:
            self._write(transaction, call.message)
        self._move(transaction, call.schedule, call.after, call.slot)

    def _fail(self, schedule: Schedule, slot: datetime, error: BaseException) -> None:
        """Its slot is not lost, and other schedules and messages go on."""
        self._again_at[schedule.name] = uptime() + AGAIN
        self._tried[schedule.name] = slot
        _log.error(
            "the schedule %s has no message for its slot, which is tried again in %.3g s",
            schedule.name, AGAIN, exc_info=error,
        )  # fmt: skip

    # ── inside a transaction ────────────────────────────────────────────────────────────────────────────

    def _last_slot(self, transaction: DbTransaction, schedule: Schedule, begin: datetime) -> datetime:
        """Return the last slot that is dealt with, and lock the row that says so. A new schedule begins after
        `begin`."""
        name = self._name(schedule)
        self._sql.run(transaction, _BEGIN, name=name, begin=begin.timestamp())
        found = self._sql.run(transaction, _READ + self._sql.for_update, name=name).scalar_one()
        return datetime.fromtimestamp(found, UTC)

    def _write(self, transaction: DbTransaction, message: Message) -> None:
        run_blocking(write(BlockingConnectionPort(transaction.connection), message))

    def _move(self, transaction: DbTransaction, schedule: Schedule, after: datetime, last: datetime) -> None:
        if last > after:
            self._sql.run(transaction, _MOVE, name=self._name(schedule), slot=last.timestamp())

    # ── without the database ────────────────────────────────────────────────────────────────────────────

    def _make(self, schedule: Schedule, slot: datetime) -> Message | None:
        """Call the code of a schedule. None if it returns None: then its slot has no message."""
        value = check_result(schedule.payload(slot), schedule.target)
        return None if value is None else self._message(schedule, slot, value)

    def _message(self, schedule: Schedule, slot: datetime, value: Any) -> Message:
        """Return what a producer may return as well: a payload, a transaction, or one of them that is due later."""
        due: dict[str, Any] = {"key": None, "delay": None, "at": slot}
        if schedule.runs_code and isinstance(value, Delayed):
            due = {"key": value.key, "delay": value.delay, "at": value.at}
            value = value.payload
        headers, lineage = schedule.headers, NO_LINEAGE
        if schedule.runs_code and isinstance(value, Transaction):
            headers = {**headers, **value.metadata}
            lineage = Lineage(value.parent_id, value.correlation_id)
            value = value.payload
        own = f"{self._name(schedule)}@{slot.isoformat()}"
        return self._outbox.message(schedule.target, value, id=own, headers=headers, lineage=lineage, **due)

    def _name(self, schedule: Schedule) -> str:
        return f"{self._app}:{schedule.name}"


_BEGIN = """
    INSERT INTO onceward_schedules (name, last_slot) VALUES (:name, :begin) ON CONFLICT (name) DO NOTHING
"""
_READ = "SELECT last_slot FROM onceward_schedules WHERE name = :name"
_MOVE = "UPDATE onceward_schedules SET last_slot = :slot WHERE name = :name"
