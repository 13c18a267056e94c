"""Two different events at the same time in one process, on one instance, as in a worker: what a handler keeps on self,
on its class or in a module is there for both.

The first stops at a step of its handler, and the second goes past it. The rows must be those of one event after the
other, in either order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from onceward._sync import as_coroutine, as_function
from onceward._text import quantity
from onceward.inbox import Event
from onceward.inbox.commits.group import commit_of
from onceward.transaction import Transaction
from onceward.verify.plan import VerificationPlan
from onceward.verify.report import Finding
from onceward.verify.scenarios.lost_updates import (
    IN_LINE,
    PATIENCE,
    STEP,
    LockMonitor,
    Outcome,
    Pair,
    in_turn,
    like,
    outcome_of,
)
from onceward.verify.scenarios.order import deliver_in_rounds
from onceward.verify.stage import Delivery, Stage
from onceward.verify.trial import Assessment, NotApplicable, Run, Trial

MOST_TYPES = 3
MOST_STEPS = 5
MOMENT = 0.3
"""Seconds in which a second event comes as far as the lock of SQLite."""
_is_first: ContextVar[bool] = ContextVar("onceward_is_first", default=False)


def side_by_side(trial: Trial) -> Assessment:
    is_alone = _is_alone(trial.plan, trial.databases.backend)
    if is_alone and not _begins_beside_others(trial.plan):
        raise NotApplicable("SQLite runs one transaction after another; verify on the database of production")
    most = 1 if is_alone else MOST_STEPS
    stops = 0
    pairs = [each for each in _pairs(trial.plan) if trial.plan.may_meet(*each)]
    if not pairs:
        raise NotApplicable(IN_LINE)
    for pair in pairs:
        expected = in_turn(trial, pair, None)
        step, steps = 1, 1
        while step <= min(steps, most):
            together, steps = _overtake(trial, pair, step)
            if together != expected and together != in_turn(trial, pair[::-1], None):
                return Assessment([_finding(trial, pair, together, expected)])
            step += 1
        stops += min(steps, most)
    return Assessment([], f"overtaken at {quantity(stops, 'step')}")


def _is_alone(plan: VerificationPlan, backend: str) -> bool:
    """Whether no other event gets to its handler while one is in its own: SQLite has one transaction at a time."""
    return backend == "sqlite" and plan.contract.mode == "transactional"


def _begins_beside_others(plan: VerificationPlan) -> bool:
    """Whether what comes before the transaction runs beside another event's handler: middleware, upcasters, the model.
    Events of a group run one after another as a whole."""
    has_middleware = bool(getattr(plan.consumer, "middleware", ()))
    return has_middleware or commit_of(plan.consumer, plan.contract, "sqlite") == "each"


def _pairs(plan: VerificationPlan) -> list[Pair]:
    """An event of each type, and another with another payload, of its type if there is one."""
    firsts = {Event.of(each).event_type: each for each in reversed(plan.events)}
    return [(each, _other(each, kind, plan)) for kind, each in [*firsts.items()][::-1][:MOST_TYPES]]


def _other(first: Transaction, kind: str, plan: VerificationPlan) -> Transaction:
    others = [each for each in plan.events if each.payload != first.payload and plan.may_meet(first, each)]
    others.sort(key=lambda each: Event.of(each).event_type != kind)
    return others[0] if others else like(first)


def _finding(trial: Trial, pair: Pair, together: Outcome, expected: Outcome) -> Finding:
    one, other = (each.id for each in pair)
    failed = [f"event {name!r} failed" for name, succeeded in together[1].items() if not succeeded]
    return Finding(
        f"events {one!r} and {other!r} at the same time in one process leave rows that neither order of the two "
        "leaves: the second ran while the first was between two steps. Keep what belongs to an event in local "
        "variables, not on self, on a class or in a module, and lock what you read and write back",
        (*trial.differences(together[0], expected[0], references=True), *failed),
    )


def _overtake(trial: Trial, pair: Pair, step: int) -> tuple[Outcome, int]:
    """The outcome if the second event overtakes the first at this step, and how many steps the first has."""

    def act(stage: Stage) -> tuple[list[Delivery], int]:
        overtaking = Overtaking(stage, step)
        with overtaking.watching():
            overtaking.run(pair)
        return deliver_in_rounds(stage, events=pair), overtaking.steps

    run = trial.perform(act)
    deliveries, steps = run.value
    return outcome_of(Run(deliveries, run.rows)), steps


class Overtaking:
    """Stops the handler of the first event at one of its steps: before it begins, before a call of its session, or in
    an effect.

    It goes on when the second has ended, waits for a lock, or seems to wait for something else of the first.
    """

    def __init__(self, stage: Stage, step: int) -> None:
        self._stage = stage
        self._step = step
        self._on_sqlite = stage.engine.dialect.name == "sqlite"
        self._is_alone = _is_alone(stage.plan, stage.engine.dialect.name)
        self._patience = MOMENT if self._is_alone else min(PATIENCE, stage.plan.options.timeout / 3)
        self._locks: LockMonitor | None = None
        self._is_stopped = self._is_overtaken = False
        self.steps = 0
        """Those of the first handler."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self._on_sqlite:
            engine: Any = self._stage.engine
            self._locks = LockMonitor(engine.sync_engine if self._stage.plan.asynchronous else engine)
        try:
            yield
        finally:
            if self._locks is not None:
                self._locks.close()

    def run(self, pair: Pair) -> None:
        task = self._stage.instance()
        self._follow(task)
        if self._is_alone:  # their starts are recorded together, as those of a batch
            self._stage.settle_together(task, pair, None, at_once=2)
            return
        self._stage.settle_side_by_side(
            task, pair, self._lead, may_begin=lambda: self._is_stopped, at_the_end=self._end
        )

    def _lead(self) -> None:
        _is_first.set(True)

    def _end(self, number: int) -> None:
        """One of the two has ended."""
        if number == 0:
            self._is_stopped = True
        else:
            self._is_overtaken = True

    def _follow(self, task: Any) -> None:
        asynchronous = self._stage.plan.asynchronous
        inner, outer = (_as_it_is, _as_it_is) if asynchronous else (as_coroutine, as_function)
        process = inner(task.process_transaction)

        async def walk(transaction: Any, session: Any) -> Any:
            if self._is_alone:
                await self._stop()  # the one that comes first
            if not _is_first.get():
                return await process(transaction, session)
            run, effect = inner(session.run), inner(session.effect)

            async def running(operation: Any, *args: Any, **more: Any) -> Any:
                if not self._on_sqlite:  # there a transaction is alone from its beginning
                    await self._stop()
                return await run(operation, *args, **more)

            async def effecting(name: str, call: Any, **more: Any) -> Any:
                async def called(key: str) -> Any:
                    await self._stop()
                    return await inner(call)(key)

                return await effect(name, outer(called), **more)

            session.run, session.effect = outer(running), outer(effecting)
            try:
                if not self._on_sqlite:
                    await self._stop()
                return await process(transaction, session)
            finally:
                self._is_stopped = True
                session.run = outer(run)

        task.process_transaction = outer(walk)

    async def _stop(self) -> None:
        self.steps += 1
        if self.steps != self._step:
            return
        self._is_stopped = True
        until = time.monotonic() + self._patience
        while not self._is_overtaken and time.monotonic() < until:
            if self._locks is not None and self._locks.is_somebody_waiting():
                return
            await self._stage.sleep(STEP)


def _as_it_is(function: Any) -> Any:
    return function
