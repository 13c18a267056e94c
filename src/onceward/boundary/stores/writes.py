"""What waits for the writer of the embedded store, and how its callers get their answers."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onceward.boundary.errors import BoundaryError
from onceward.boundary.store import NewFact


class Write:
    """A job for the writer, and the future of its caller; None if that waits for another one."""

    __slots__ = ("done", "fact", "is_statement", "operation", "outcome")

    def __init__(
        self,
        fact: NewFact | None,
        operation: Callable[[sqlite3.Cursor], Any] | None = None,
        done: asyncio.Future[Any] | None = None,
        *,
        is_statement: bool = False,
    ) -> None:
        """`is_statement` if the operation is one statement: its own transaction, unless more is written with it."""
        self.fact = fact
        self.operation = operation
        self.done = done
        self.is_statement = is_statement
        self.outcome: Any = None


def wake(writes: list[Write]) -> None:
    """Wake the callers, with one call to their event loop."""
    with suppress(RuntimeError):  # the loop is closed: no one is waiting
        waiting = next(write.done for write in writes if write.done)
        waiting.get_loop().call_soon_threadsafe(resolve, writes)


def resolve(writes: list[Write]) -> None:
    """Give the callers their outcomes, in their event loop."""
    for write in writes:
        if write.done is None or write.done.done():
            continue
        if isinstance(write.outcome, BoundaryError):
            write.done.set_exception(write.outcome)
            write.done.exception()  # marks it as seen, in case the caller was canceled
        else:
            write.done.set_result(write.outcome)
