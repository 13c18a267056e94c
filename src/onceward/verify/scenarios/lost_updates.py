"""Two different events at the same time, in two processes: a lock in memory must not hide what production shows.

Neither handler writes before the other is about to, nor goes on before it has. The rows must be those of one event
after the other, in either order. Where the database runs one writer after another, only a consumer whose effects split
its transaction can lose an update.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import Any
from uuid import UUID, uuid5

import msgspec
from sqlalchemy import NullPool, create_engine, event
from sqlalchemy.util import await_only

from onceward._sync import as_coroutine, as_function
from onceward._text import quantity
from onceward.db.engines import connect_arguments
from onceward.db.guests.connection import LentConnection
from onceward.db.poolers import expect_poolers
from onceward.inbox import Event
from onceward.transaction import Transaction
from onceward.verify.report import Finding
from onceward.verify.rows import tables
from onceward.verify.scenarios.order import deliver_in_rounds
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, NotApplicable, Run, SharedDatabase, Trial
from onceward.verify.watch.statements import only_reads

MOST_PAIRS = 4
FEW_PAIRS = 2
"""If each needs copies of the database."""
PATIENCE = 3.0
"""Seconds, at most, that one handler waits for the other, if that comes neither to a write nor to a lock."""
STEP = 0.002
"""Seconds between two looks at the other."""
_BLOCKED = (
    "SELECT count(*) > 0 FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'"
)
IN_LINE = "order_by runs these events one after another: they have one key; pass some of another"

Pair = tuple[Transaction, Transaction]
Outcome = tuple[tables.Rows, dict[str, bool]]
"""The rows, and whether each event succeeded."""


def lost_updates(trial: Trial) -> Assessment:
    if trial.databases.backend == "sqlite" and trial.plan.contract.mode == "transactional":
        raise NotApplicable("SQLite runs one transaction after another; verify on the database of production")
    pairs = [each for each in _pairs(trial.plan.events) if trial.plan.may_meet(*each)]
    if not pairs:
        raise NotApplicable(IN_LINE)
    pairs = pairs[: MOST_PAIRS if trial.databases.renewing_is_cheap else FEW_PAIRS]
    for pair in pairs:
        for earlier in (None, _earlier(pair, trial.plan.events)):
            together, expected = _at_the_same_time(trial, pair, earlier), in_turn(trial, pair, earlier)
            if together != expected and together != in_turn(trial, pair[::-1], earlier):
                return Assessment([_finding(trial, pair, earlier, together, expected)])
    return Assessment([], f"{quantity(len(pairs), 'pair')} of events, each alone and after another event")


def _finding(
    trial: Trial, pair: Pair, earlier: Transaction | None, together: Outcome, in_turn: Outcome
) -> Finding:
    one, other = (each.id for each in pair)
    failed = [f"event {name!r} failed" for name, succeeded in together[1].items() if not succeeded]
    after = "" if earlier is None else f"after event {earlier.id!r}, "
    return Finding(
        f"{after}events {one!r} and {other!r} at the same time leave rows that neither order of the two leaves: each "
        "read before the other wrote, and one update was lost. Compute in the statement (SET total = total + :amount), "
        "lock what you read (SELECT … FOR UPDATE, session.lock_row), or use session.occ_update",
        (*trial.differences(together[0], in_turn[0], references=True), *failed),
    )


# ── pairs ───────────────────────────────────────────────────────────────────────────────────────────────


def _pairs(events: tuple[Transaction, ...]) -> list[Pair]:
    """The likeliest first: two events of one aggregate, an event of each type and its like, any other two."""
    views = {each.id: Event.of(each) for each in events}
    firsts = {views[each.id].event_type: each for each in reversed(events)}
    every = list(combinations(events, 2))
    related = [
        (one, other)
        for one, other in every
        if views[one.id].aggregate_id is not None
        and views[one.id].aggregate_id == views[other.id].aggregate_id
    ]
    alike = [(each, like(each)) for each in firsts.values()]
    ordered = [*related[:1], *alike, *related[1:], *every]
    return [pair for number, pair in enumerate(ordered) if pair not in ordered[:number]]


def _earlier(pair: Pair, events: tuple[Transaction, ...]) -> Transaction:
    """An event to deliver before the pair: the first of an account inserts its row, and the key keeps two such inserts
    apart; only those that follow read, change and write back."""
    one, other = pair
    kind = Event.of(one).event_type
    siblings = (each for each in events if each not in pair and Event.of(each).event_type == kind)
    return (next(siblings, None) if other in events else None) or like(other)


def like(event: Transaction, number: int = 1) -> Transaction:
    """Another event with the same payload; with another number, yet another."""
    head = {name: value for name, value in event.metadata.items() if name != "tracking_id"}
    return msgspec.structs.replace(event, id=_like_id(Event.of(event).tracking_id, number), metadata=head)


def _like_id(tracking_id: str, number: int) -> str:
    """Another id of the same form, in case the handler reads it."""
    if tracking_id.isdecimal():
        return str(int(tracking_id) + number * 1_000_000)
    suffix = "like" if number == 1 else f"like-{number}"
    try:
        return str(uuid5(UUID(tracking_id), suffix))
    except ValueError:
        return f"{tracking_id}-{suffix}"


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────


def in_turn(trial: Trial, pair: Pair, earlier: Transaction | None) -> Outcome:
    return outcome_of(trial.perform(partial(deliver_in_rounds, events=pair), database_after(trial, earlier)))


def database_after(trial: Trial, earlier: Transaction | None) -> SharedDatabase:
    """A new database, after an earlier event if there is one."""
    database = trial.new_database()
    if earlier is not None:
        trial.perform(partial(deliver_in_rounds, events=(earlier,)), database)
    return database


def _at_the_same_time(trial: Trial, pair: Pair, earlier: Transaction | None) -> Outcome:
    """Then again what failed, as a source does: a conflict that the handler notices is right."""
    database = database_after(trial, earlier)
    walkers = Walkers()
    trial.perform_at_once(
        [partial(walkers.walk, role=role, event=each) for role, each in enumerate(pair)], database
    )
    return outcome_of(trial.perform(partial(deliver_in_rounds, events=pair), database))


def outcome_of(run: Run) -> Outcome:
    return run.rows, {each.event: each.succeeded for each in run.value}


class Walkers:
    """Two handlers in two processes. Each counts its steps in memory that both see."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("i")

    def walk(self, stage: Stage, role: int, event: Transaction) -> Delivery:
        lockstep = Lockstep(stage, self._cells[role * 3 :][:3], self._cells[(1 - role) * 3 :][:3])
        try:
            with lockstep.listening():
                return stage.deliver(lockstep.follow(stage.instance()), event)
        finally:
            lockstep.end()


BEGUN, DONE, ENDED = range(3)
"""What is in the cells of a handler: the writes that it has come to, those that the database has done, whether it has
ended."""


class Lockstep:
    """Keeps a handler at the same write as the other, unless one of them has ended or waits for a lock.

    It waits before the write, so both have read, and after it, so neither commits before the other's statement begins.
    Neither commits before the other's handler has ended, so none sees what the other wrote before.
    """

    def __init__(self, stage: Stage, own: memoryview[int], other: memoryview[int]) -> None:
        self._own = own
        self._other = other
        self._patience = min(PATIENCE, stage.plan.options.timeout / 3)
        self._asynchronous = stage.plan.asynchronous
        self._engine: Any = stage.engine.sync_engine if self._asynchronous else stage.engine
        self._locks: LockMonitor | None = None
        self._in_handler = False

    def follow(self, task: Any) -> Any:
        inner, outer = (_as_it_is, _as_it_is) if self._asynchronous else (as_coroutine, as_function)
        process = inner(task.process_transaction)

        async def walk(transaction: Any, session: Any) -> Any:
            self._in_handler = not self._own[ENDED]
            try:
                result = await process(transaction, session)
            finally:
                self.end()
            await self._wait_to_commit()
            return result

        task.process_transaction = outer(walk)
        return task

    def end(self) -> None:
        self._in_handler = False
        self._own[ENDED] = 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        if self._engine.dialect.name == "sqlite":  # there a transaction is alone from its beginning
            listeners: dict[str, Any] = {"begin": self._begin}
        else:
            listeners = {"before_cursor_execute": self._before, "after_cursor_execute": self._after}
            self._locks = LockMonitor(self._engine)
        for name, listener in listeners.items():
            event.listen(self._engine, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners.items():
                event.remove(self._engine, name, listener)
            if self._locks is not None:
                self._locks.close()

    def _before(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if "onceward_" not in statement and not only_reads(statement):
            self._begin()

    def _begin(self, connection: Any = None) -> None:
        if self._in_handler and not isinstance(connection, LentConnection):  # which begins nothing
            self._own[BEGUN] += 1
            self._wait(lambda: self._other[BEGUN] >= self._own[BEGUN])

    def _after(self, *_: Any) -> None:
        if self._in_handler and self._own[DONE] < self._own[BEGUN]:
            self._own[DONE] = self._own[BEGUN]
            self._wait(lambda: self._other[DONE] >= self._own[DONE])

    def _wait(self, is_there: Callable[[], bool]) -> None:
        until = time.monotonic() + self._patience
        while not (self._other[ENDED] or is_there() or self._is_blocked()):
            if time.monotonic() > until:
                self._in_handler = False  # it waits for something else: let both go
                return
            if self._asynchronous:
                await_only(asyncio.sleep(STEP))
            else:
                time.sleep(STEP)

    async def _wait_to_commit(self) -> None:
        until = time.monotonic() + self._patience
        while self._locks is not None and not self._other[ENDED] and not self._is_blocked():
            if time.monotonic() > until:
                return
            await (asyncio.sleep if self._asynchronous else as_coroutine(time.sleep))(STEP)

    def _is_blocked(self) -> bool:
        """Whether the other waits for a lock."""
        return self._locks is not None and self._locks.is_somebody_waiting()


class LockMonitor:
    """Whether somebody in a database of PostgreSQL waits for a lock."""

    def __init__(self, engine: Any) -> None:
        arguments = connect_arguments(engine.url)
        watching = create_engine(
            engine.url, poolclass=NullPool, isolation_level="AUTOCOMMIT", connect_args=arguments
        )
        self._connection = expect_poolers(watching).connect()

    def is_somebody_waiting(self) -> bool:
        return bool(self._connection.exec_driver_sql(_BLOCKED).scalar())

    def close(self) -> None:
        self._connection.close()


def _as_it_is(function: Any) -> Any:
    return function
