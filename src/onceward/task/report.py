"""What a consume or produce call did, and why it ended."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from onceward.task.exceptions import ExceptionCategory


class StopReason(StrEnum):
    """Why a loop ended. Decided in `Loop.ending` (`task/source.py`) and the scripts in `task/loops.py`."""

    EMPTY = "empty"
    """The source is empty, and the policy does not stream."""
    DONE = "done"
    """All of the caller's transactions have been produced."""
    LIMIT = "limit"
    """`loop.limit` transactions were started."""
    STOPPED = "stopped"
    """`task.stop()` was called."""
    TIMEOUT = "timeout"
    """`loop.timeout` ran out."""
    FETCH_ERROR = "fetch_error"
    SETTLE_ERROR = "settle_error"
    INPUT_ERROR = "input_error"
    """The caller's iterable failed."""
    INTERRUPTED = "interrupted"
    """A KeyboardInterrupt, SystemExit or cancellation ended the call."""


class Report(msgspec.Struct, kw_only=True):
    """Totals of one call. A loop that fails raises an error that carries the report so far."""

    succeeded: int = 0
    duplicates: int = 0
    """How many of the succeeded had been done before."""
    failed: int = 0
    failed_by_category: dict[ExceptionCategory, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(ExceptionCategory, 0)
    )
    postponed: int = 0
    """Transactions that raised `Postponed` and went back to their source. If it cannot take them: those that still
    waited when the call was stopped."""
    timed_out: int = 0
    """Attempts and lifecycles that timed out, whatever the outcome of their transactions."""
    stuck: int = 0
    """Attempts that were asked to stop, did not end within `stuck_grace`, and were given up on."""
    abandoned: int = 0
    """Transactions cut off without an outcome, as by a crash. A source that settles redelivers them."""
    unstarted: int = 0
    """Transactions fetched but not started, because the loop ended. A source that settles gets them back."""
    retries: int = 0
    fetches: int = 0
    empty_fetches: int = 0
    duration: float = 0.0
    """Seconds."""
    stop_reason: StopReason | None = None

    @property
    def processed(self) -> int:
        """Transactions that succeeded or failed."""
        return self.succeeded + self.failed
