"""Work in hand: what all lifecycles of a call share, one lifecycle's own state, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from onceward.task.exceptions import TransactionException
from onceward.task.failure_log import Tracebacks
from onceward.task.script import Failed, Limit, Script
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.lifecycle import Step


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What all lifecycles of one call share."""

    task: str
    main: Step
    success: Step
    exception: Step
    transaction_timeout: float | None
    loop_deadline: float
    limited: bool
    """Whether any time limit but a step's applies."""
    plain: bool
    """Neither limits nor a watch."""
    postpones: bool
    """Whether what is postponed has somewhere to go back to; if not, it waits in its slot."""
    watch: Any
    """Spans and per-step metrics, or None when there is no SDK."""
    tracebacks: Tracebacks


class Status(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    POSTPONED = "postponed"
    ABANDONED = "abandoned"


# Looking up an enum's member costs more than a step of the hot path.
SUCCEEDED, FAILED, ABANDONED = Status.SUCCEEDED, Status.FAILED, Status.ABANDONED
POSTPONED = Status.POSTPONED
LOOP = Limit.LOOP


class Outcome(msgspec.Struct, frozen=True):
    """How one transaction ended. `attempt` is the number, from 0, of the last attempt of `step`."""

    transaction: Transaction
    status: Status
    result: Any = None
    error: TransactionException | None = None
    step: str = ""
    attempt: int = 0
    duplicate: bool = False
    """It had been done before: a success, without anything done now."""
    delay: float = 0.0
    """Seconds until something postponed shall come again."""


class DuplicateType:
    """What a main step returns, instead of a result, for a transaction that had been done before."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DUPLICATE"


DUPLICATE = DuplicateType()


_drivers_lock = threading.Lock()


class Work:
    """A script that can change hands, with the context and the time limits it runs in.

    It is also what log lines are stamped with: task, step, attempt and transaction id. What rarely changes
    is a default of the class, so that making one costs little.
    """

    __slots__ = ("__dict__", "context", "step")

    context: Context
    step: str
    script: Script[Any] | None = None
    task: str
    transaction_id: str | None = None
    attempt = 0
    deadline = inf
    limit = LOOP
    stuck = False
    """An earlier driver has not come back; `script` is in other hands."""
    _drivers = 1

    def __init__(self, context: Context) -> None:
        self.context = context
        self.step = ""

    def count_drivers(self, change: int) -> int:
        """How many are still in it: more than one when all but the last are stuck."""
        with _drivers_lock:
            self._drivers += change
            return self._drivers

    def resume(self, reply: Failed) -> None:
        """The driver is stuck: let another go on with the script, beginning with this reply."""
        raise NotImplementedError


class Life(Work):
    """The work of one transaction."""

    __slots__ = ("hand_over", "plan", "transaction")

    retries = 0
    timeouts = 0
    blocked = False
    """Another attempt at the same id is stuck; this one cannot start."""
    spans: Any = None

    def __init__(
        self,
        transaction: Transaction,
        plan: Plan,
        context: Context,
        hand_over: Callable[[Life, Failed], None],
    ) -> None:
        self.context = context
        self.transaction = transaction
        self.plan = plan
        self.hand_over = hand_over

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.plan.task

    @property
    def transaction_id(self) -> str:  # type: ignore[override]
        return self.transaction.id

    def resume(self, reply: Failed) -> None:
        self.hand_over(self, reply)
