"""Lives whose first attempts are decided together: a worker runs them one after another, and one commit decides all.

A group takes only what is there, so a single transaction is decided at once. It ends with an attempt that fails, which
keeps the order: that life goes to its end before the worker takes anything new. If the group as a whole cannot be
decided, each of its first attempts is made again, by itself.

Handlers that would do more beside each other are not grouped: see `onceward.task.groups.pace`.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import zip_longest
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from onceward.task.lifecycle import early_outcome
from onceward.task.script import ENDING, Exited, Failed, Script
from onceward.task.work import Life, Outcome
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.slots import Slots

LONGEST: Final = 0.05
"""Seconds after which a group takes no more."""
WAIT: Final[Any] = object()
"""There is no item."""
STUCK: Final[Any] = object()
"""The reply of a first attempt that did not return in time: another worker has taken over its life."""
REPEAT: Final[Any] = object()
"""In place of the reply of a first attempt that is made again, alone."""


class Unit(Protocol):
    """What decides the first attempts of a group. The step's call finds it at the life: `current_work`."""

    size: int
    """Lives, at most."""
    closed: bool
    """It takes no more."""
    seconds: float
    """Spent in handlers."""

    def repeats(self, transaction: Transaction) -> bool:
        """Whether this attempt was not made, or undone with others, and has to be made alone. Asked once decided."""
        ...

    async def decide(self) -> None:
        """Make the results of the attempts permanent, or undo them."""
        ...

    async def abandon(self) -> None:
        """Undo all of them."""
        ...


class Grouping(Protocol):
    """How a step is decided in groups."""

    at_once: int
    """How many groups there may be at the same time."""
    batches: bool
    """Whether one call handles the whole group: see `live_batch`."""

    def unit(self) -> Unit: ...


class Together:
    """One group."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.lives: list[Life] = []
        self.rest: deque[tuple[Life, Any]] = deque()
        """Lives with the reply of their first attempt, or `REPEAT`. If the worker gets stuck with one, another goes on
        with the rest."""
        self._undecided = [True]

    def claim(self) -> bool:
        """Whether this is the first to decide it: the worker, or what takes over from a worker that is stuck."""
        with suppress(IndexError):
            return self._undecided.pop()
        return False

    def repeat_all_but(self, stuck: Life) -> None:
        for life in self.lives:
            if life is not stuck:
                self.rest.append((life, REPEAT))


def work_together(slots: Slots) -> Script[None]:
    """Run one worker, until dismissed or stuck."""
    ports, pace, turns = slots.ports, slots.pace, slots.turns
    assert turns is not None
    while True:
        in_turn = pace.groups
        if in_turn:
            yield turns.take, ()
        item = ports.poll()
        while item is WAIT:
            yield ports.take, ()
            item = ports.poll()
        life = None if item is None else slots.begin(item)
        if life is None:
            if in_turn:
                turns.give()
            if item is None:
                return
            continue
        live = live_batch if slots.grouping is not None and slots.grouping.batches else live_together
        if (yield from live(slots, life, in_turn=in_turn)):
            return


def live_together(slots: Slots, life: Life, *, in_turn: bool) -> Script[bool]:
    """Live this and, in its turn, what else there is. Returns whether the worker has to end."""
    ports = slots.ports
    assert slots.grouping is not None
    unit = slots.grouping.unit()
    group = Together(unit)
    replies: list[Any] = []
    until = 0.0
    next_one: Life | None = life
    slots.pace.begin(unit)
    began = monotonic()
    while next_one is not None:
        life = next_one
        life.group, life.unit = group, unit
        life.in_turn = in_turn
        group.lives.append(life)
        reply = yield ports.begin, (life,)
        if reply is STUCK:
            slots.pace.give_up(unit)
            yield ports.decide, (unit.abandon,)
            if group.claim():
                slots.take_over_group(group, life)
            slots.is_over(life, None)
            return True
        replies.append(reply)
        until = until or monotonic() + LONGEST - unit.seconds
        full = unit.closed or len(replies) >= unit.size or not in_turn or monotonic() >= until
        next_one = None if full or type(reply) in (Failed, Exited) else slots.begin_next()
    group.claim()
    exited = reply if type(reply) is Exited else None
    decided = yield ports.decide, (unit.decide if exited is None else unit.abandon,)
    slots.pace.end(
        unit, grouped=in_turn, events=len(replies), handlers=unit.seconds, whole=monotonic() - began
    )
    if type(decided) is Exited:
        exited = decided
    for each, reply in zip(group.lives, replies, strict=True):
        each.unit = None
        if exited is not None:
            slots.is_over(each, exited)
        else:
            repeats = type(decided) is Failed or unit.repeats(each.transaction)
            group.rest.append((each, REPEAT if repeats else reply))
    # In its turn: two workers that do not wait for anything would only disturb each other.
    left = end_quick(slots, group)
    if left is not None:
        group.rest.appendleft(left)
    if in_turn:
        assert slots.turns is not None
        slots.turns.give()
    return (yield from finish(slots, group)) or exited is not None


def live_batch(slots: Slots, first: Life, *, in_turn: bool) -> Script[bool]:
    """Live this and what else there is with one call; if it fails, with two calls for the halves, and so on."""
    ports, grouping = slots.ports, slots.grouping
    assert grouping is not None
    lives = [first]
    size = grouping.unit().size
    while len(lives) < size and (more := slots.begin_next()) is not None:
        lives.append(more)
    waiting = [lives]
    rest: deque[tuple[Life, Any]] = deque()
    while waiting:
        batch = waiting.pop(0)
        unit: Any = grouping.unit()
        group = Together(unit)
        group.rest = rest
        group.lives = [each for part in (batch, *waiting) for each in part]
        unit.transactions = [each.transaction for each in batch]
        replies: list[Any] = []
        failed: Failed | None = None
        for life in batch:
            life.group, life.unit, life.in_turn = group, unit if len(batch) > 1 else None, in_turn
            reply = yield ports.begin, (life,)
            life.again = True
            if reply is STUCK:
                if group.claim():
                    slots.take_over_group(group, life)
                slots.is_over(life, None)
                return True
            replies.append(reply)
            if type(reply) is Failed and not unit.postponed and reply.limit not in ENDING:
                failed = reply
                break
        group.claim()
        for life in batch:
            life.unit = None
        if failed is not None and len(batch) > 1 and not failed.exits:
            half = (len(batch) + 1) // 2
            waiting[:0] = [batch[:half], batch[half:]]
            continue
        for life, reply in zip_longest(batch, replies, fillvalue=REPEAT):
            rest.append((life, REPEAT if unit.repeats(life.transaction) else reply))
    if in_turn and slots.turns is not None:
        slots.turns.give()
    return (yield from finish(slots, group))


def finish(slots: Slots, group: Together) -> Script[bool]:
    """Take what is left of a group from the first attempts to their outcomes."""
    ports, over = slots.ports, False
    while True:
        left = end_quick(slots, group)
        if left is None:
            return over
        life, reply = left
        if reply is REPEAT:
            life.unit, life.again = None, True
            outcome = yield ports.enter, (life,)
        else:
            outcome = yield ports.finish, (life, reply)
        if type(outcome) is not Outcome and slots.is_over(life, outcome):
            over = True
        else:
            slots.end(life, outcome)


def end_quick(slots: Slots, group: Together) -> tuple[Life, Any] | None:
    """End the next lives of a group that need no more than their first attempt, all at once. Returns the first that
    does; it is no longer among the rest."""
    ended: list[tuple[Life, Outcome]] = []
    left: tuple[Life, Any] | None = None
    with suppress(IndexError):
        while left is None:
            life, reply = group.rest.popleft()
            outcome = None if reply is REPEAT else early_outcome(life, reply)
            if outcome is None:
                left = life, reply
            else:
                ended.append((life, outcome))
    slots.end_all(ended)
    return left
