"""Calls of the app's code for the slots of schedules: outside of every transaction, and beside the relay.

Such code may write to the database of the app, take long, never return, or exit. So each call has a thread, and at most
one call of a schedule is under way. A process that ends does not wait for it: the slot is there for the next one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import datetime

from onceward.outbox.message import Message
from onceward.schedules.schedule import Schedule
from onceward.task.exceptions import AttemptInterrupted


class SlotCall:
    """A call for one slot."""

    def __init__(self, schedule: Schedule, after: datetime, slot: datetime) -> None:
        self.schedule = schedule
        self.after = after
        """The last slot before it that was dealt with. If that has changed meanwhile, another process was first."""
        self.slot = slot
        self.message: Message | None = None
        """What it has made; None if nothing is to be sent."""
        self.error: BaseException | None = None


class SlotCalls:
    """Those of one timetable. Only its thread uses this."""

    def __init__(
        self,
        make: Callable[[Schedule, datetime], Message | None],
        *,
        in_place: bool,
        on_end: Callable[[], None],
    ) -> None:
        """With `in_place`, a call has ended when `begin` returns. `on_end` is called by its thread otherwise."""
        self.ended: deque[SlotCall] = deque()
        """Waiting to be recorded, oldest first."""
        self._under_way: set[str] = set()
        """Schedules with a call that is not recorded."""
        self._make = make
        self._in_place = in_place
        self._on_end = on_end

    def __contains__(self, schedule: Schedule) -> bool:
        return schedule.name in self._under_way

    def __len__(self) -> int:
        """How many are not recorded."""
        return len(self._under_way)

    def begin(self, call: SlotCall) -> None:
        name = call.schedule.name
        if self._in_place:
            self._call(call)
        else:
            threading.Thread(target=self._call, args=(call,), name=f"schedule-{name}", daemon=True).start()
        self._under_way.add(name)

    def forget(self, call: SlotCall) -> None:
        """It is recorded."""
        self.ended.remove(call)
        self._under_way.discard(call.schedule.name)

    def _call(self, call: SlotCall) -> None:
        try:
            call.message = self._make(call.schedule, call.slot)
        except AttemptInterrupted:
            raise  # it is not the code's: a test that calls in place is asked to end
        except BaseException as error:  # noqa: BLE001  code that exits has failed, too
            call.error = error
        self.ended.append(call)
        self._on_end()
