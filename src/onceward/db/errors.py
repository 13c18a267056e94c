"""The errors of a session. Errors of the database pass through as SQLAlchemy raises them.

OncewardError
├── SessionError                       the session cannot be used like this; the message says what to do
│   └── RetryRefusedError              an optimistic update after a conflict, in the same session
├── OptimisticConflict                 the row is not at the expected version
├── LockTimeoutError (TimeoutError)    another transaction kept the lock
└── RowError                           the rows do not match the request
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceward.errors import OncewardError


class SessionError(OncewardError):
    """A session was used outside its block, twice, or after its transaction was lost."""


class RetryRefusedError(SessionError):
    """A retry inside one session, whose transaction still sees the old data. Open a new session and read again."""


class OptimisticConflict(OncewardError):
    """The row has a different version than expected, or is gone. This update changed nothing."""

    def __init__(self, table: str, key: Mapping[str, Any], expected: Any) -> None:
        super().__init__(
            f"the row of {table} with this {', '.join(key)} is not at version {expected!r} anymore; "
            "end this session, open a new session and read again"
        )
        self.table = table
        self.key = dict(key)
        self.expected = expected


class LockTimeoutError(OncewardError, TimeoutError):
    """A lock was not released in time. The session can continue without it."""


class RowError(OncewardError):
    """More rows than requested, or rows that cannot be returned as dicts."""


ENDED_WITHIN = (
    "the transaction has ended before its session: code that ran in it has committed it or rolled it back; let the "
    "session do that"
)
FAILED_WITHIN = (
    "a statement failed in this session, and the database will not commit what came before it; nothing was committed. "
    "Let the error propagate instead of catching it inside the block"
)
