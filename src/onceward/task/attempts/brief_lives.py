"""Lives that need no more than a first attempt that returns None: what a worker does with quick handlers.

The general way, from `Slots.begin` over `enter` to `Slots.end`, is nine calls for each message, and makes a token for
each attempt. Here the same steps are written out in one place. They are the same because this is used only if nothing
could tell the difference, and leaves to the general way whatever turns out to need more:

* No time limit, no telemetry, no groups, nobody who looks at outcomes, no success handler: see `is_brief`.
* Each life has its own context and holds its id, as always.
* An attempt that can be cut off is listed among the attempts by its life. Its token is made when it is needed, by the
  handler, the watchdog or an operator: see `Life.marks`.
* An item that is not a new transaction, a slot that is closed, an id in use, a hurried call: `poll` returns the item.
* A life that is done ends as in `Slots.end`, with the outcome `UNSEEN`.
* A reply that is not a result, an error, a fork, a coroutine that nobody awaited, an attempt that waits in asyncio: it
  returns the life as `Begun`, with what the general way makes of it.

`tests/unit/task/test_brief_lives.py` compares both ways.
"""

from __future__ import annotations

import threading
from asyncio import current_task
from collections.abc import Callable, Collection
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from onceward._functions import has_run
from onceward._process.forks import forks
from onceward.task.attempts.first_attempts import Opened
from onceward.task.deadlines import Deadlines, TaskTry
from onceward.task.script import DISOWNED, Exited, Failed, await_checked, failure_reply
from onceward.task.work import DUPLICATE, ENDED, NO_CONTEXT, Life
from onceward.telemetry.context import current_work
from onceward.transaction import Settlement, Transaction, Verdict

if TYPE_CHECKING:
    from onceward.task.ports_asyncio import AsyncPorts
    from onceward.task.ports_threads import BlockingPorts
    from onceward.task.slots import Slots


DONE = Verdict.DONE


class Begun(NamedTuple):
    """A life whose first attempt has begun, and what `enter` returns for it."""

    life: Life
    outcome: Any


def is_brief(slots: Slots) -> bool:
    """Whether lives of this call may be brief."""
    plan = slots.plan
    return (
        plan.plain
        and plan.unseen is not None
        and plan.grouping is None
        and plan.success.silent
        and plan.main.timeout is None
    )


class BriefPorts(Protocol):
    """What brief lives need of the ports."""

    alone: bool
    """Whether all workers are in one thread, so they need no lock."""
    deadlines: Deadlines

    @property
    def soiled(self) -> Collection[Any]:
        """Workers that user code has canceled: see `AsyncPorts`."""
        ...

    def poll(self) -> Any: ...
    def wake(self) -> None: ...
    def go_on_from(self, life: Life, reply: Any) -> Any:
        """Go on from the reply to a first attempt that needs more. Replies as `enter`."""
        ...


def brief_poll(slots: Slots, ports: BriefPorts, attempt: Callable[[Life], Any]) -> Callable[[], Any]:
    """A `poll` for one worker. It lives what is brief, and returns what is not. `attempt` makes a first attempt, in the
    context of its life."""
    plan, generation, hand_over = slots.plan, slots.plan.generation, slots.hand_over
    take, copy, soiled, deadlines = ports.poll, slots.base.copy, ports.soiled, ports.deadlines
    ids, holders, waiting, setdefault = (
        slots.ids, slots.ids.holders, slots.ids.waiting, slots.ids.holders.setdefault,
    )  # fmt: skip
    alone, lock, tally = ports.alone, slots.lock, slots.tally
    settle = None if slots.settled is None else slots.settled.append

    def poll() -> Any:
        while True:
            item = take()
            if type(item) is not Transaction or slots.closed or soiled or deadlines.hurried:
                return item
            life = Life(item, plan, copy(), hand_over)
            if setdefault(item.id, life) is not life:
                return item
            try:
                reply = life.context.run(attempt, life)
            except BaseException as error:  # noqa: BLE001  reported as an exit; the loop raises it
                return Begun(life, Exited(error))
            if (
                (reply is not None and not _is_result(reply))
                or life.unawaited
                or forks.generation != generation
            ):
                return Begun(life, ports.go_on_from(life, reply))
            if waiting:
                ids.release(life)
            else:  # as `release`, without its call
                del holders[item.id]
                if waiting:
                    ids.pass_on(life)
            life.context = NO_CONTEXT
            if settle is not None:
                settle(Settlement(item, DONE))
            if alone:
                tally.succeeded += 1
                slots.pending = left = slots.pending - 1
            else:
                with lock:
                    tally.succeeded += 1
                    slots.pending = left = slots.pending - 1
            if left == slots.wake_at:
                ports.wake()

    return poll


def blocking_attempt(slots: Slots, ports: BlockingPorts) -> Callable[[Life], Any]:
    """What makes a first attempt in the thread that calls this."""
    deadlines, tries, ident = ports.deadlines, ports.deadlines.tries, threading.get_ident()
    call, name, set_work = slots.plan.main.call, slots.plan.main.name, current_work.set

    def attempt(life: Life) -> Any:
        set_work(life)
        life.step = name
        reply: Any = None
        error: BaseException | None = None
        marks: list[Any] | None = None
        if ports.interruptible:
            life.driver = ident
            life.marks = marks = []
            tries[ident] = life
            if deadlines.hurried:
                ports.poke()
        try:
            reply = call(life.transaction)
        except BaseException as raised:  # noqa: BLE001  an error of user code is a reply
            error = raised
        if marks is not None:
            marks.append(ENDED)
            del tries[ident]
            if marks[0] is not ENDED:
                return ports.conclude(marks[0], reply, error)
        return reply if error is None else failure_reply(error)

    return attempt


def async_attempt(slots: Slots, ports: AsyncPorts) -> Callable[[Life], Any]:
    """What makes a first attempt in the task that calls this, as far as it goes without waiting."""
    deadlines, tries, task = ports.deadlines, ports.deadlines.tries, current_task()
    call, name, set_work = slots.plan.main.call, slots.plan.main.name, current_work.set

    def attempt(life: Life) -> Any:
        set_work(life)
        life.step = name
        reply: Any = None
        error: BaseException | None = None
        marks: list[Any] | None = None
        if ports.interruptible:
            life.driver = task
            life.marks = marks = []
            tries[task] = life
        try:
            given: Any = call(life.transaction)
        except BaseException as raised:  # noqa: BLE001  an error of user code is a reply
            given, error = None, raised
        else:
            if type(given) is not CoroutineType:
                given = await_checked(given, call)
            try:
                awaited = given.send(None)
            except StopIteration as end:
                reply = end.value
            except BaseException as raised:  # noqa: BLE001
                error = raised
            else:
                if marks is None:
                    return Opened(given, awaited)
                this = cast(TaskTry, deadlines.token_of(life))  # it has not ended
                tries[task], this.awaited = this, given
                return Opened(ports.follow(this, given), awaited)
        ports.in_a_row = True
        if marks is not None:
            marks.append(ENDED)
            if marks[0] is not ENDED:
                return ports.conclude(marks[0], reply, error)
            del tries[task]
        return reply if error is None else ports.failure_reply(error)

    return attempt


def _is_result(reply: Any) -> bool:
    """Whether an attempt has returned this, and nothing follows."""
    return (
        type(reply) not in (Failed, Opened)
        and reply is not DUPLICATE
        and reply is not DISOWNED
        and has_run(reply)
    )
