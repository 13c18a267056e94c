"""Work in flight: what all lifecycles of a call share, the state of one lifecycle, and its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import Context
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Any, Final

import msgspec

from onceward.task.exceptions import TransactionException
from onceward.task.script import Failed, Script, TimeLimit
from onceward.telemetry.logger import Tracebacks
from onceward.transaction import Transaction

if TYPE_CHECKING:
    from onceward.task.groups.together import Grouping, Together, Unit
    from onceward.task.lifecycle import Step


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What all lifecycles of one call share."""

    task: str
    main: Step
    success: Step
    exception: Step
    transaction_timeout: float | None
    loop_deadline: float
    limited: bool
    """Whether the loop or a transaction has a time limit."""
    plain: bool
    """Neither limited nor watched."""
    postpones: bool
    """Whether postponed transactions go back to the source; if not, they wait in their slot."""
    afterwards: str
    """What becomes of a transaction that fails, for the log; empty where nobody but the caller decides."""
    grouping: Grouping | None
    """How first attempts are decided in groups; None if each is by itself."""
    token_of: Callable[[Life], Any]
    """Makes the token of a first attempt: see `Life.marks`."""
    watch: Any
    """Spans and per-step metrics; None without an SDK."""
    unseen: Outcome | None
    """The outcome of each first attempt that succeeds, if nobody looks at what is in it."""
    tracebacks: Tracebacks
    generation: int
    """Of the process that makes the call: a child that user code forks has another."""


class OutcomeStatus(StrEnum):
    """How a transaction ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    POSTPONED = "postponed"
    ABANDONED = "abandoned"


# On the hot path, looking up a member of an enum is too slow.
SUCCEEDED, FAILED = OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED
POSTPONED, ABANDONED = OutcomeStatus.POSTPONED, OutcomeStatus.ABANDONED
LOOP = TimeLimit.LOOP


class Outcome(msgspec.Struct, frozen=True):
    """How one transaction ended. `attempt` is the number, from 0, of the last attempt of `step`."""

    transaction: Transaction
    status: OutcomeStatus
    result: Any = None
    error: TransactionException | None = None
    step: str = ""
    attempt: int = 0
    duplicate: bool = False
    """A success that had been done before; nothing was done now."""
    delay: float = 0.0
    """Seconds until a postponed transaction is due again."""


UNSEEN = Outcome(Transaction(id="unseen"), SUCCEEDED)
"""Of every transaction that succeeds at once, where nobody looks at what is in its outcome."""


class DuplicateType:
    """A main step returns this instead of a result for a transaction that had been done before."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "DUPLICATE"


DUPLICATE = DuplicateType()

ENDED: Final = "ended"
"""In the marks of a life: its first attempt is over, and nobody has needed a token."""

NO_CONTEXT: Final = Context()
"""Of a life that has ended."""

_drivers_lock = threading.Lock()


class Work:
    """A script that another driver can take over, with its context and time limits.

    Log lines are stamped with its task, step, attempt and transaction id. Attributes that rarely change are class
    defaults, so creating one is cheap.
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
    handling = False
    """It is in its exception handler."""
    stuck = False
    """A driver has not returned; another one has taken over `script`."""
    _drivers = 1

    def __init__(self, context: Context) -> None:
        self.context = context
        self.step = ""

    def count_drivers(self, change: int) -> int:
        """Add `change` and return how many drivers there are; if more than one, all but the last are stuck."""
        with _drivers_lock:
            self._drivers += change
            return self._drivers

    def resume(self, reply: Failed) -> None:
        """The driver is stuck: let another one continue the script with this reply."""
        raise NotImplementedError


class Life(Work):
    """The work of one transaction."""

    __slots__ = ("driver", "hand_over", "marks", "plan", "transaction")

    driver: Any
    """The thread or task of an attempt with `marks`."""
    marks: list[Any] | None
    """While a first attempt runs that has no time limit but can be cut off: empty, until somebody needs its token or it
    ends. What comes first counts, the token or `ENDED`; appending to a list is atomic."""
    retries = 0
    timeouts = 0
    unawaited: Sequence[str] = ()
    """Coroutines that the running attempt has dropped without awaiting them."""
    group: Together | None = None
    """The lives whose first attempts are decided together with this one's."""
    unit: Unit | None = None
    """What decides the first attempt that is being made."""
    in_turn = False
    again = False
    """The first attempt was undone together with others, and is made again."""
    blocked = False
    """An attempt at the same id is stuck, so this one cannot start."""
    spans: Any = None
    stuck_fields: dict[str, Any]
    """The log fields of its stuck attempt, if it has one."""

    def __init__(
        self,
        transaction: Transaction,
        plan: CallPlan,
        context: Context,
        hand_over: Callable[[Life, Failed], None],
    ) -> None:
        self.context = context
        self.transaction = transaction
        self.plan = plan
        self.hand_over = hand_over
        self.marks = None
        self.step = ""  # operators may look before its first step

    @property
    def task(self) -> str:  # type: ignore[override]
        return self.plan.task

    @property
    def transaction_id(self) -> str:  # type: ignore[override]
        return self.transaction.id

    @property
    def token(self) -> Any:
        """Of the first attempt, if that has one and nothing else was set: see `current_attempt`."""
        return None if self.marks is None else self.plan.token_of(self)

    def resume(self, reply: Failed) -> None:
        self.hand_over(self, reply)
