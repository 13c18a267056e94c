"""What a consume or produce call did."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from onceward.task.exceptions import ExceptionCategory


class StopReason(StrEnum):
    """Why a loop ended."""

    EMPTY = "empty"
    """The source had nothing more, and the policy does not stream."""
    DONE = "done"
    """Everything the caller gave has been produced."""
    LIMIT = "limit"
    STOPPED = "stopped"
    """`task.stop()` was called."""
    TIMEOUT = "timeout"
    FETCH_ERROR = "fetch_error"
    SETTLE_ERROR = "settle_error"
    INPUT_ERROR = "input_error"
    INTERRUPTED = "interrupted"
    """A KeyboardInterrupt, SystemExit or cancellation went through the call."""


class Report(msgspec.Struct, kw_only=True):
    """The sum of one call. A loop that fails raises, and its error carries the report so far."""

    succeeded: int = 0
    duplicates: int = 0
    """Of those, how many had been done before."""
    failed: int = 0
    failed_by_category: dict[ExceptionCategory, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(ExceptionCategory, 0)
    )
    postponed: int = 0
    """Transactions that said `Postponed` and went back to their source."""
    timed_out: int = 0
    """Attempts and lifecycles that ran out of time, whatever became of their transactions."""
    stuck: int = 0
    """Attempts that were asked to stop, did not within `stuck_grace`, and were given up on."""
    abandoned: int = 0
    """Transactions cut off without an outcome, as by a crash. A source that settles delivers them again."""
    unstarted: int = 0
    """Transactions taken in but not started, because the loop ended. A source that settles has them back."""
    retries: int = 0
    fetches: int = 0
    empty_fetches: int = 0
    duration: float = 0.0
    """Seconds."""
    stop_reason: StopReason | None = None

    @property
    def processed(self) -> int:
        """Transactions that came to an outcome."""
        return self.succeeded + self.failed
