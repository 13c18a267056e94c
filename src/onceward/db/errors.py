"""What a session raises by itself; what the database raises comes as SQLAlchemy's error, unchanged.

OncewardError
├── SessionError                       the session cannot be used like this; the message says what to do
│   └── RetryRefusedError              an optimistic update after a conflict, in the same session
├── OptimisticConflict                 the row is not at the expected version
├── LockTimeoutError (TimeoutError)    somebody else kept the lock
└── RowError                           the rows do not fit what was asked for
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceward.errors import OncewardError


class SessionError(OncewardError):
    """A session was used outside its block, twice, or after its transaction was lost."""


class RetryRefusedError(SessionError):
    """A retry inside one session. Its transaction is as old as the first try; open a new session and read again."""


class OptimisticConflict(OncewardError):
    """The row has another version than expected, or is gone. Nothing was changed by this update."""

    def __init__(self, table: str, key: Mapping[str, Any], expected: Any) -> None:
        super().__init__(
            f"{table} {dict(key)} is not at version {expected!r} any more; "
            "end this session, open a new session and read again"
        )
        self.table = table
        self.key = dict(key)
        self.expected = expected


class LockTimeoutError(OncewardError, TimeoutError):
    """A lock was not free in time. The session can go on without it."""


class RowError(OncewardError):
    """More rows than asked for, or rows that cannot be told as a dict."""
