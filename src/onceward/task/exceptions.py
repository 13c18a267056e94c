"""What can go wrong, as one short tree.

    OncewardError
    ├── ConfigurationError            (ValueError)   a task, policy or connector that cannot work
    ├── TransactionException                         one transaction failed; has a category
    ├── Postponed                                    not now: raise it, and the transaction comes again later
    ├── IOGuardError                                 a task opened a socket, file or process itself
    ├── QueueError, ConnectorClosedError, PayloadError, SessionError, …   in `queue`, `connectors`, `db`
    └── LoopError                                    a consume or produce call ended early; has a report
        ├── FetchException                           the source failed for good
        │   └── FetchTimeoutException (TimeoutError)
        ├── SettlementException                      the source would not take an outcome
        ├── InputException                           the caller's iterable failed
        ├── NotSentException                         a producer of an app could not send all of its messages
        ├── ConsumerLoopTimeoutException (TimeoutError)
        └── ProducerLoopTimeoutException (TimeoutError)

    AttemptInterrupted (BaseException)               raised inside an attempt that ran out of time

Every error pickles, and keeps its cause across pickling.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from onceward.errors import ConfigurationError as ConfigurationError
from onceward.errors import OncewardError as OncewardError

if TYPE_CHECKING:
    from onceward.task.report import Report


LONGEST_POSTPONEMENT = 86400.0
"""Seconds. What has to wait longer belongs into a schedule, not into a queue."""


class ExceptionCategory(StrEnum):
    """Why a transaction failed. These three are the only reasons."""

    BUSINESS = "BUSINESS"
    """The task said so: trying again would give the same answer. Never retried."""
    SYSTEM = "SYSTEM"
    """Something unexpected: a bug, a network, a service. Retried within the policy."""
    TIMEOUT = "TIMEOUT"
    """An attempt or a lifecycle ran out of time. Attempts are retried within the policy."""


class IOGuardError(OncewardError):
    """A task did I/O of its own instead of going through an injected service or connector. Never retried."""


class TransactionException(OncewardError):
    """One transaction failed.

    Raise it from a task to say why: `TransactionException("card expired", category=ExceptionCategory.BUSINESS)`.
    Whatever else a task raises reaches handlers and callers as one of these, with the original as `cause`.
    """

    # For subclasses that forget to call this class's __init__.
    message: str = ""
    category: ExceptionCategory = ExceptionCategory.SYSTEM
    transaction_id: str | None = None

    def __init__(
        self,
        message: str = "",
        category: ExceptionCategory | str = ExceptionCategory.SYSTEM,
        transaction_id: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.category = ExceptionCategory(category)
        self.transaction_id = transaction_id
        if cause is not None:
            self.__cause__ = cause

    @property
    def cause(self) -> BaseException | None:
        """What was raised in the first place, if this wraps something."""
        return self.__cause__

    def __str__(self) -> str:
        where = f" [{self.transaction_id}]" if self.transaction_id else ""
        return f"{self.category}{where}: {self.message}"

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.message!r}, category={self.category}, "
            f"transaction_id={self.transaction_id!r})"
        )


class Postponed(OncewardError):
    """Not now. Raise it from `process_transaction`, and the transaction is delivered again after `delay` seconds.

    It is no failure: no attempt is spent, no delivery is counted, and the exception handler is not called. A source
    that cannot take anything back has its transaction wait in the slot instead.
    """

    category: None = None
    """It is none of the three kinds of failure."""
    delay: float = 1.0

    def __init__(self, message: str = "", delay: float = 1.0) -> None:
        super().__init__(message)
        if not 0 <= delay <= LONGEST_POSTPONEMENT:
            raise ValueError(
                f"delay must be a number of seconds from 0 to {LONGEST_POSTPONEMENT:g}, not {delay!r}"
            )
        self.delay = delay


class LoopError(OncewardError):
    """A consume or produce call ended before its work did. `report` says how far it came."""

    category = ExceptionCategory.SYSTEM
    report: Report | None = None

    @property
    def cause(self) -> BaseException | None:
        """What was raised in the first place, if this wraps something."""
        return self.__cause__


class FetchException(LoopError):
    """The source failed, and the fetch policy allows no further attempt."""


class FetchTimeoutException(FetchException, TimeoutError):
    """The source did not answer in time, and the fetch policy allows no further attempt."""

    category = ExceptionCategory.TIMEOUT


class SettlementException(LoopError):
    """The source would not take an outcome. What it was not told is delivered again."""


class InputException(LoopError):
    """The iterable given to `produce_transactions` raised, or yielded something else than transactions."""


class NotSentException(LoopError):
    """Some messages of an app's producer did not get to its sink. The others did; `report` counts both."""


class ConsumerLoopTimeoutException(LoopError, TimeoutError):
    """`loop.timeout` of a consumer policy ran out."""

    category = ExceptionCategory.TIMEOUT


class ProducerLoopTimeoutException(LoopError, TimeoutError):
    """`loop.timeout` of a producer policy ran out."""

    category = ExceptionCategory.TIMEOUT


class AttemptInterrupted(BaseException):
    """Raised by the engine inside a thread whose attempt ran out of time.

    Not an `Exception`, so that `except Exception` in a task does not swallow it. A task may catch it to
    clean up, and should let it go on.
    """
