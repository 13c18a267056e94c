"""What user code saw: every visit of a step, in order. The model compares it with what the engine reports."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from onceward import ExceptionCategory, Postponed, Transaction, TransactionException
from onceward.task.exceptions import AttemptInterrupted


@dataclass
class Visit:
    """One call of a step's method."""

    step: str
    began: float
    ended: float | None = None
    how: str = "running"
    """`returned`, a category, `postponed` or `cut`."""

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self.ended is None else self.ended) - self.began


@dataclass
class Delivery:
    """One delivery of a transaction: its visits, and the verdicts its source was reported."""

    id: str
    number: int
    visits: list[Visit] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)

    def of(self, step: str) -> list[Visit]:
        return [visit for visit in self.visits if visit.step == step]


class Diary:
    """All deliveries of a round."""

    def __init__(self) -> None:
        self.deliveries: dict[tuple[str, int], Delivery] = {}
        self.entered: dict[str, int] = {}
        """How often the main step of an id was entered."""
        self._lock = threading.Lock()

    def deliver(self, id: str, number: int) -> None:
        self.deliveries[id, number] = Delivery(id, number)

    def find(self, transaction: Transaction) -> Delivery:
        return self.deliveries[transaction.id, transaction.metadata["delivery"]]

    def count(self, id: str) -> int:
        """Count an entry of the main step, and return how many there were before."""
        with self._lock:
            self.entered[id] = self.entered.get(id, 0) + 1
            return self.entered[id] - 1

    @contextmanager
    def visit(self, step: str, transaction: Transaction) -> Iterator[None]:
        visit = Visit(step, time.monotonic())
        self.find(transaction).visits.append(visit)
        try:
            yield
        except BaseException as error:
            visit.how = describe(error)
            raise
        else:
            visit.how = "returned"
        finally:
            visit.ended = time.monotonic()


def describe(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError | AttemptInterrupted):
        return "cut"
    if isinstance(error, Postponed):
        return "postponed"
    category: Any = error.category if isinstance(error, TransactionException) else ExceptionCategory.SYSTEM
    return str(ExceptionCategory(category))
