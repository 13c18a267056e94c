"""The errors of this package, as a tree.

    OncewardError
    ├── ConfigurationError            (ValueError)   an invalid task, policy or connector
    ├── TransactionException                         one transaction failed; has a category
    ├── Postponed                                    not now: raise it to have the transaction redelivered later
    ├── IOGuardError                                 a task itself opened a socket, file or process
    ├── UnawaitedError                               a handler created a coroutine and did not await it
    ├── UnrecordedError                              middleware returned, and the inbox has recorded nothing
    ├── QueueError, ConnectorClosedError, PayloadError, SessionError, …   in `queue`, `connectors`, `db`
    └── LoopError                                    a consume or produce call ended early; has a report
        ├── FetchException                           the source failed permanently
        │   └── FetchTimeoutException (TimeoutError)
        ├── SettlementException                      the source did not accept an outcome
        ├── InputException                           the caller's iterable failed
        ├── NotSentException                         an app's producer could not send all of its messages
        ├── ConsumerLoopTimeoutException (TimeoutError)
        └── ProducerLoopTimeoutException (TimeoutError)

    AttemptInterrupted (BaseException)               raised inside an attempt that ran out of time

Every error can be pickled, and keeps its cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from onceward.errors import ConfigurationError as ConfigurationError
from onceward.errors import OncewardError as OncewardError

if TYPE_CHECKING:
    from onceward.task.report import Report


OF_ITS_CLASS: Any = object()
"""No category was given: the one of the class applies."""
DEEPEST_GROUP = 20
"""Groups inside of each other that are looked into."""
LEAST_POSTPONEMENT = 0.1
"""Seconds. A transaction that is always postponed without a delay would keep a CPU busy."""
LONGEST_POSTPONEMENT = 86400.0
"""Seconds. Anything that must wait longer belongs in a schedule, not in a queue."""


class ExceptionCategory(StrEnum):
    """Why a transaction failed. There are no other reasons."""

    BUSINESS = "BUSINESS"
    """The task rejected it: another attempt would fail the same way. Never retried."""
    SYSTEM = "SYSTEM"
    """Something unexpected: a bug, a network, a service. Retried under the policy."""
    TIMEOUT = "TIMEOUT"
    """An attempt or a lifecycle ran out of time. Attempts are retried under the policy."""


class IOGuardError(OncewardError):
    """A task did its own I/O instead of using an injected service or connector. Never retried."""


class UnawaitedError(OncewardError):
    """A handler created a coroutine and did not await it, so some of its code has not run. Never retried."""


class UnrecordedError(OncewardError):
    """A middleware returned as if the transaction were done, but the inbox has recorded nothing: it caught an error."""


def unawaited_error(coroutines: Sequence[str]) -> UnawaitedError:
    was = "was" if len(set(coroutines)) == 1 else "were"
    return UnawaitedError(
        f"{' and '.join(dict.fromkeys(coroutines))} {was} never awaited, so that code has not run; write `await` "
        "before the call"
    )


class TransactionException(OncewardError):
    """One transaction failed.

    Raise it from a task to say why: `TransactionException("card expired", category=ExceptionCategory.BUSINESS)`.
    A subclass may set `category` as a class attribute instead. Any other error of a task reaches handlers and callers
    as a TransactionException with the original as `cause`.
    """

    # For subclasses that forget to call this class's __init__.
    message: str = ""
    category: ExceptionCategory = ExceptionCategory.SYSTEM
    transaction_id: str | None = None
    redelivery: Any = None
    """What a failure rule says about further deliveries; None leaves them to the source."""

    def __init__(
        self,
        message: str = "",
        category: ExceptionCategory | str = OF_ITS_CLASS,
        transaction_id: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if category is not OF_ITS_CLASS:
            self.category = ExceptionCategory(category)
        self.transaction_id = transaction_id
        if cause is not None:
            self.__cause__ = cause

    @property
    def cause(self) -> BaseException | None:
        """The original error, if this wraps one."""
        return self.__cause__

    def __str__(self) -> str:
        where = f" [{self.transaction_id}]" if self.transaction_id else ""
        return f"{failure_category(self)}{where}: {self.message}"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.message!r}, category={failure_category(self)}, "
            f"transaction_id={self.transaction_id!r})"
        )


def failure_category(error: BaseException | str | None) -> ExceptionCategory:
    """The category of a failure. SYSTEM if it has none of the three, or is not ours: then its attribute means
    something else."""
    if isinstance(error, TransactionException):
        try:
            return ExceptionCategory(error.category)
        except Exception:  # noqa: BLE001  a property of user code
            return ExceptionCategory.SYSTEM
    return ExceptionCategory.SYSTEM


class Postponed(OncewardError):
    """Not now. Raise it from `process_transaction` to have the transaction redelivered after `delay` seconds.

    This is not a failure: it counts neither as an attempt nor as a delivery, and the exception handler is not called.
    If the source cannot take the transaction back, it waits in its slot until the call is stopped. The shortest delay
    is a tenth of a second.
    """

    category: None = None
    """Not a failure, so it has no category."""
    delay: float = 1.0
    quiet: ClassVar[bool] = False
    """Whether the log has the reason already, so it does not repeat it for every message."""

    def __init__(self, message: str = "", delay: float = 1.0) -> None:
        super().__init__(message)
        if not 0 <= delay <= LONGEST_POSTPONEMENT:
            raise ValueError(
                f"delay must be a number of seconds from 0 to {LONGEST_POSTPONEMENT:g}, not {delay!r}"
            )
        self.delay = delay


def delay_of(error: Postponed) -> float:
    """Its delay, within bounds; the usual one if user code has set something that is not a number."""
    try:
        delay = float(error.delay)
    except Exception:  # noqa: BLE001  an attribute of user code
        delay = Postponed.delay
    return min(max(LEAST_POSTPONEMENT, delay), LONGEST_POSTPONEMENT)  # in this order because of NaN


def postponement_of(error: BaseException) -> Postponed | None:
    """The postponement that an error asks for: itself, or the longest in a group, such as `asyncio.TaskGroup` raises,
    if nothing else is in it. None if it is a failure."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, Postponed) else None
    asked = _postponements_in(error, DEEPEST_GROUP)
    longest = max(asked, key=delay_of, default=None)
    return None if longest is None else Postponed(str(longest), delay_of(longest))


def _postponements_in(group: BaseExceptionGroup[Any], depth: int) -> list[Postponed]:
    """All that it consists of; nothing if anything else is in it."""
    found: list[Postponed] = []
    for each in group.exceptions:
        more = [each] if isinstance(each, Postponed) else []
        if isinstance(each, BaseExceptionGroup) and depth:
            more = _postponements_in(each, depth - 1)
        if not more:
            return []
        found += more
    return found


class LoopError(OncewardError):
    """A consume or produce call ended early. `report` says how far it got."""

    category = ExceptionCategory.SYSTEM
    report: Report | None = None

    @property
    def cause(self) -> BaseException | None:
        """The original error, if this wraps one."""
        return self.__cause__


class FetchException(LoopError):
    """The source failed, and the fetch policy allows no more attempts."""


class FetchTimeoutException(FetchException, TimeoutError):
    """The source did not answer in time, and the fetch policy allows no more attempts."""

    category = ExceptionCategory.TIMEOUT


class SettlementException(LoopError):
    """The source did not accept some outcomes. Their transactions are redelivered."""


class InputException(LoopError):
    """The iterable passed to `produce_transactions` raised, or yielded something other than a Transaction."""


class NotSentException(LoopError):
    """An app's producer could not send some messages to its sink. `report` counts those and the sent ones."""


class ConsumerLoopTimeoutException(LoopError, TimeoutError):
    """`loop.timeout` of a consumer policy ran out."""

    category = ExceptionCategory.TIMEOUT


class ProducerLoopTimeoutException(LoopError, TimeoutError):
    """`loop.timeout` of a producer policy ran out."""

    category = ExceptionCategory.TIMEOUT


class AttemptInterrupted(BaseException):
    """Raised by onceward's own calls (sessions, effects, nested calls) in a thread whose attempt has run out of time.

    Not an `Exception`, so `except Exception` in a task does not swallow it. A task may catch it to clean up, and
    should re-raise it. Only with `EngineSettings(interrupt="raise")` can it arrive anywhere else.
    """
