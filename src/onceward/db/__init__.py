"""One database transaction: `DbSession` for threads, `AsyncDbSession` for asyncio.

`operations.py` has the functions over a SQLAlchemy connection and `transaction.py` begins and ends the transaction;
the two session classes only say how to call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onceward.db.errors import LockTimeoutError, OptimisticConflict, RetryRefusedError, RowError, SessionError
from onceward.db.session import DbSession

if TYPE_CHECKING:
    from onceward.db.session_asyncio import AsyncDbSession

__all__ = [
    "AsyncDbSession",
    "DbSession",
    "LockTimeoutError",
    "OptimisticConflict",
    "RetryRefusedError",
    "RowError",
    "SessionError",
]


def __getattr__(name: str) -> Any:
    # Imported lazily: SQLAlchemy's asyncio part needs greenlet, which comes with the extra onceward[asyncio].
    if name == "AsyncDbSession":
        from onceward.db.session_asyncio import AsyncDbSession

        return AsyncDbSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
