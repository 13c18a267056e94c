"""Bounded work: at most `size` transactions in flight, refilled as they end; and at most one per id (`guards/ids.py`).

Workers (threads or tasks) run the script `work`. How they wait for an item, enter a life's context and start is up
to `SlotPorts`.
"""

from __future__ import annotations

import logging
import threading
from asyncio import CancelledError
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from onceward.task.attempts.brief_lives import Begun, is_brief
from onceward.task.exceptions import failure_category
from onceward.task.groups.pace import GroupPace
from onceward.task.groups.together import WAIT, Together, finish, work_together
from onceward.task.guards.ids import IdsInFlight
from onceward.task.lifecycle import LifePorts, live
from onceward.task.report import Report
from onceward.task.script import Exited, Failed, Script
from onceward.task.work import (
    ABANDONED,
    FAILED,
    NO_CONTEXT,
    POSTPONED,
    SUCCEEDED,
    CallPlan,
    Life,
    Outcome,
    Work,
)
from onceward.telemetry.context import current_attempt, working_on
from onceward.telemetry.logger import OwnLogger, do_soon
from onceward.telemetry.logs import current_fields
from onceward.transaction import Settlement, Transaction, Verdict

logger = OwnLogger(logging.getLogger("onceward.engine"))

DONE, NOT_DONE, RETURNED = Verdict.DONE, Verdict.FAILED, Verdict.RETURNED

Item = Transaction | Life | None
"""None ends a worker."""


def as_it_is(reply: Any) -> Any:
    """A port that has been called already: what it returned, for the driver to await if it has to be."""
    return reply


class Takeover(NamedTuple):
    """A life whose worker is stuck, and the reply its script is waiting for."""

    life: Life
    reply: Failed | None


class SlotPorts(LifePorts, Protocol):
    """The I/O slots need, in addition to that of lives."""

    def poll(self) -> Any:
        """Return an item, or `WAIT` if that needs an await."""
        ...

    def brief_poll(self, slots: Slots) -> Callable[[], Any]:
        """`poll` for one worker, called by it: see `onceward.task.attempts.brief_lives`."""
        ...

    def glance(self) -> Any:
        """Return an item, or `WAIT` if there is none."""
        ...

    def begin(self, life: Life) -> Any:
        """Make the first attempt in the life's context. Replies as `invoke`, `STUCK` if taken over, or `Exited`."""
        ...

    def finish(self, life: Life, reply: Any) -> Any:
        """Go on in the life's context from the reply of its first attempt. Replies as `enter`."""
        ...

    def decide(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run this for a group. Replies what it returned, `Failed` or `Exited`."""
        ...

    def turns(self, number: int) -> Any:
        """Let this many workers at once take work."""
        ...

    def take(self) -> Any:
        """Wait for an item."""
        ...

    def enter(self, life: Life) -> Any:
        """Run a life in its context. Replies `Outcome`, `Exited`, or None if it was taken over."""
        ...

    def enter_script(self, work: Work, reply: Failed | None) -> Any:
        """Continue a script in its context with this reply."""
        ...

    def put(self, *items: Item) -> None: ...
    def drain(self) -> list[Transaction | Life]:
        """Remove and return the items that no worker has taken."""
        ...

    def spawn(self, script: Script[None]) -> None:
        """Start a worker."""
        ...

    def enlist(self, script: Script[None]) -> None:
        """Start a worker as soon as there is an item that no other worker takes."""
        ...

    def dismiss(self, count: int) -> None:
        """End this many workers, once they have nothing to do."""
        ...

    def wake(self) -> None:
        """Wake the loop to check what has changed."""
        ...


class Slots:
    """The slots of one call."""

    def __init__(self, plan: CallPlan, ids: IdsInFlight, ports: SlotPorts, size: int, base: Context) -> None:
        self.plan = plan
        self.size = size
        self.tally = Report()
        self.settled: deque[Settlement] | None = None
        """Outcomes to settle with the source; None if it cannot settle."""
        self.deferred: dict[int, Settlement] = {}
        """Outcomes of transactions whose stuck attempt is still running."""
        self.on_outcome: Callable[[Outcome], None] | None = None
        self.unstarted: list[Transaction] = []
        self.exited: BaseException | None = None
        self.pending = 0
        """Transactions submitted and not ended."""
        self.stuck_now = 0
        self.wake_at = 0
        """The loop is woken when this many are pending."""
        self.ids = ids
        self._holders = ids.holders
        self.ports = ports
        self.base = base
        self._watch = plan.watch
        self.grouping = plan.grouping
        self.pace = GroupPace(0 if plan.grouping is None else plan.grouping.at_once)
        self.turns = None if plan.grouping is None else ports.turns(plan.grouping.at_once)
        self._deadline = plan.loop_deadline
        self.hand_over = self._take_over
        self._workers = 0
        self.closed = False
        """Start nothing more."""
        self.lock = threading.Lock()

    # ── the loop's side ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, transactions: Sequence[Transaction]) -> None:
        """Queue these, in order."""
        with self.lock:
            self.pending += len(transactions)
            newcomers = min(self.size - self._workers, self.pending - self._workers)
            self._workers += max(newcomers, 0)
        self.ports.put(*transactions)
        for _ in range(newcomers):
            self.ports.enlist(self.work())

    def close(self) -> None:
        """Start nothing more; transactions waiting for a slot become `unstarted`."""
        self.closed = True
        for item in self.ports.drain():
            self._turn_away(item)
        for life in self.ids.withdraw(self):
            self._turn_away(life)

    def take_unstarted(self) -> list[Transaction]:
        """Return and count the transactions turned away since the last call."""
        with self.lock:
            taken, self.unstarted = self.unstarted, []
            self.tally.unstarted += len(taken)
        return taken

    def break_off(self, error: BaseException) -> None:
        """The engine itself failed: abandon what is pending. What still ends makes `pending` negative."""
        with self.lock:
            self.exited = error
            self.tally.abandoned += self.pending
            self.pending = 0
        self.ports.wake()

    def dismiss(self) -> None:
        """End the workers."""
        self.ports.dismiss(self._workers)

    # ── the workers' side ───────────────────────────────────────────────────────────────────────────────

    def work(self, first: Takeover | None = None) -> Script[None]:
        """Run one worker: take an item, live it, end it, until dismissed or stuck."""
        enter, unseen = self.ports.enter, self.plan.unseen
        if first is not None:
            outcome = yield self.ports.enter_script, first
            if self.is_over(first.life, outcome):
                return
            self.end(first.life, outcome)
        if self.grouping is not None:
            return (yield from work_together(self))
        poll = self.ports.brief_poll(self) if is_brief(self) else self.ports.poll
        life: Life | None
        while True:
            item = poll()
            while item is WAIT:
                yield self.ports.take, ()
                item = poll()
            if item is None:
                return
            if type(item) is Begun:
                life, outcome = item
            else:
                life = self.begin(item)
                if life is None:
                    continue
                outcome = enter(life)
            if outcome is unseen and unseen is not None:
                self._end_unseen(life)
                continue
            outcome = yield as_it_is, (outcome,)
            if type(outcome) is not Outcome and self.is_over(life, outcome):
                return
            self.end(life, outcome)

    def begin(self, item: Any) -> Life | None:
        if self.closed or (self._deadline != inf and self.ports.now() >= self._deadline):
            self._turn_away(item)
            return None
        if type(item) is Life:
            return item
        life = Life(item, self.plan, self.base.copy(), self.hand_over)
        if self._holders.setdefault(item.id, life) is life or self.ids.wait(life, self):
            return life
        return None

    def begin_next(self) -> Life | None:
        """Begin the next item, if there is one right now."""
        while (item := self.ports.glance()) is not WAIT:
            if item is None:
                self.ports.put(None)  # for a worker that has nothing else to do
                return None
            life = self.begin(item)
            if life is not None:
                return life
        return None

    def call_up(self, life: Life) -> None:
        """Queue a life whose id is free now, or that is blocked."""
        self.ports.put(life)

    def is_over(self, life: Life, outcome: Outcome | Exited | None) -> bool:
        """Whether this worker ends: another took over its life, or the call must end."""
        if outcome is None:
            self._unstick(life)
            return True
        if type(outcome) is Exited:
            self._exit(life, outcome.error)
            return True
        return False

    def end(self, life: Life, outcome: Outcome) -> None:
        if not life.stuck:
            self.ids.release(life)
        # The context refers to the life: break the cycle, or only the garbage collector could free them.
        life.context = NO_CONTEXT
        status = outcome.status
        if self._watch is not None:
            self._watch.life_ends(life, outcome)
        if self.settled is not None and status is not ABANDONED:
            verdict = DONE if status is SUCCEEDED else NOT_DONE if status is FAILED else RETURNED
            settlement = Settlement(life.transaction, verdict, outcome.error, outcome.delay)
            if life.stuck:
                # Settled when the stuck attempt has ended: a redelivery now would run beside it.
                self.deferred[id(life)] = settlement
            else:
                self.settled.append(settlement)
        if life.stuck:
            self._leave(life)
        if self.on_outcome is not None:
            self.on_outcome(outcome)
        tally = self.tally
        with self.lock:
            if status is SUCCEEDED:
                tally.succeeded += 1
                if outcome.duplicate:
                    tally.duplicates += 1
            elif status is FAILED:
                tally.failed += 1
                tally.failed_by_category[failure_category(outcome.error)] += 1
            elif status is POSTPONED:
                tally.postponed += 1
            else:
                tally.abandoned += 1
            if life.retries:
                tally.retries += life.retries
            if life.timeouts:
                tally.timed_out += life.timeouts
            self.pending = left = self.pending - 1
        if left == self.wake_at:
            self.ports.wake()

    def _end_unseen(self, life: Life) -> None:
        """`end` for a life that needed no more than a successful first attempt, if nobody looks at its outcome."""
        self.ids.release(life)
        life.context = NO_CONTEXT
        if self.settled is not None:
            self.settled.append(Settlement(life.transaction, DONE))
        with self.lock:
            self.tally.succeeded += 1
            self.pending = left = self.pending - 1
        if left == self.wake_at:
            self.ports.wake()

    def end_all(self, ended: Sequence[tuple[Life, Outcome]]) -> None:
        """`end` for lives that need no more than a successful first attempt: see `early_outcome`."""
        if not ended:
            return
        for life, outcome in ended:
            self.ids.release(life)
            life.context = NO_CONTEXT
            if self.on_outcome is not None:
                self.on_outcome(outcome)
        if self.settled is not None:
            self.settled.extend([Settlement(life.transaction, DONE) for life, _ in ended])
        with self.lock:
            self.tally.succeeded += len(ended)
            before, self.pending = self.pending, self.pending - len(ended)
            left = self.pending
        if left <= self.wake_at < before:
            self.ports.wake()

    def _exit(self, life: Life, error: BaseException) -> None:
        if life.script is not None:
            life.script.close()
        if self._watch is not None:
            self._watch.life_ends(life, None)
        self._leave(life)
        with working_on(life):
            how = "was cut off" if isinstance(error, CancelledError) else f"raised {error!r}"
            logger.warning("%s %s; transaction %s is abandoned", life.step, how, life.transaction_id)
        with self.lock:
            self.tally.abandoned += 1
            self.exited = self.exited or error
            self.pending -= 1
        self.ports.wake()

    def _turn_away(self, item: Transaction | Life) -> None:
        if isinstance(item, Life):
            self.ids.release(item)
            item = item.transaction
        with self.lock:
            self.unstarted.append(item)
            self.pending = left = self.pending - 1
        if left == self.wake_at:
            self.ports.wake()

    # ── stuck workers ───────────────────────────────────────────────────────────────────────────────────

    def _take_over(self, life: Life, reply: Failed) -> None:
        with self.lock:
            self.tally.stuck += 1
            self.stuck_now += 1
        if self._watch is not None:
            do_soon(partial(self._watch.change_stuck, +1))
        group = life.group
        if group is not None and group.claim():
            self.take_over_group(group, life)
        elif group is not None and group.rest:
            self.ports.spawn(self._finish(group))
        life.context = life.context.copy()
        life.stuck_fields = life.context.run(current_fields)
        life.context.run(current_attempt.set, None)
        waiting_for: Failed | None = reply
        if life.script is None:
            # Stuck in its first attempt: start the script with the reply instead of sending it.
            life.script, waiting_for = live(life, self.ports, reply), None
        self.ids.block(life)
        self.ports.spawn(self.work(Takeover(life, waiting_for)))

    def take_over_group(self, group: Together, stuck: Life) -> None:
        """The worker of an undecided group is stuck with one of its lives. The others begin again, without it."""
        group.repeat_all_but(stuck)
        if stuck.in_turn and self.turns is not None:
            self.turns.give()
        self.ports.spawn(self._finish(group))

    def _finish(self, group: Together) -> Script[None]:
        yield from finish(self, group)

    def _unstick(self, life: Life) -> None:
        """A stuck attempt has ended after all. Its result is discarded."""
        text = "a stuck attempt at transaction %s has ended; its result is discarded"
        logger.post(logging.WARNING, text, life.transaction_id, context=self.base, fields=life.stuck_fields)
        with self.lock:
            self.stuck_now -= 1
        if self._watch is not None:
            do_soon(partial(self._watch.change_stuck, -1))
        self._leave(life)

    def _leave(self, life: Life) -> None:
        """When the last worker leaves the life, release the id and settle the deferred outcome."""
        if life.count_drivers(-1) == 0:
            self.ids.release(life)
            settlement = self.deferred.pop(id(life), None)
            if self.settled is not None and settlement is not None:
                self.settled.append(settlement)
