"""Count what a source delivers and settles: that is progress, not that a process runs."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from itertools import repeat
from typing import Any, TypeVar

from onceward.middleware import SourceCalls, StepInfo
from onceward.task.attempts.observers import ObservingMiddleware, StepObserver
from onceward.task.exceptions import postponement_of
from onceward.telemetry.tallies import Attempt, AttemptTally
from onceward.transaction import Settlement, Transaction, Verdict

T = TypeVar("T")

DONE = Verdict.DONE
ORDER = (DONE, Verdict.FAILED, Verdict.RETURNED)
"""The order of the counts in a row of a `Scoreboard`. The number in flight comes last."""

_now = time.perf_counter


class Progress(ObservingMiddleware, StepObserver):
    """Counts deliveries and settlements of one consumer over all its calls, for health and the final summary.

    Written by the engine's threads, read by the one that reports.
    """

    name = "progress"

    def __init__(
        self,
        on_answer: Callable[[], None],
        row: MutableSequence[int] | None = None,
        tally: AttemptTally | None = None,
    ) -> None:
        """`row` is where the counts are kept, if others read them. `tally` counts attempts that no inbox counts."""
        self.row: MutableSequence[int] = array("q", (0, 0, 0, 0)) if row is None else row
        self._tally = tally
        self._done: list[float] = []
        """Seconds of the attempts that did it at once. They are not counted yet, nor are the others: counting them one
        by one would cost more than a quick handler."""
        self._attempts: deque[Attempt] = deque()
        self._failed: dict[int, int] = {}
        """Failed attempts of each delivery that is not settled."""
        self.progress_at = time.monotonic()
        self.asking_since: float | None = None
        self._fetched_at: dict[int, tuple[float, Transaction]] = {}
        """When each delivery that is not settled was fetched."""
        self._lock = threading.Lock()
        self._draining = threading.Lock()
        self._on_answer = on_answer
        self.source: Any = None
        """The connector. One whose deliveries stand for several messages says how these ended: `outcome_of`."""

    def wrap_source(self, source: SourceCalls) -> SourceCalls:
        self.source = source.connector

        async def fetch(size: int, **extra: Any) -> Sequence[Transaction]:
            self.asking_since = time.monotonic()
            batch = await source.fetch(size, **extra)
            self._note_fetched(batch)
            return batch

        async def settle(settlements: Sequence[Settlement]) -> None:
            assert source.settle is not None
            await source.settle(settlements)
            self._note_settled(settlements)

        return source.replace(fetch=fetch, settle=None if source.settle is None else settle)

    def observer(self, step: StepInfo) -> StepObserver | None:
        return None if self._tally is None or step.name != "process" else self

    def returned(self, transaction: Transaction, note: float, result: Any) -> None:
        seconds = _now() - note
        if self._failed and (retries := self._failed.get(id(transaction), 0)):
            self._attempts.append(("done", seconds, retries))
        else:
            self._done.append(seconds)

    def raised(self, transaction: Transaction, note: float, error: Exception) -> Exception:
        postponed = postponement_of(error) is not None
        self._attempts.append(("postponed" if postponed else "failed", _now() - note, None))
        if not postponed:
            self._failed[id(transaction)] = self._failed.get(id(transaction), 0) + 1
        return error

    def count_attempts(self) -> None:
        """Count the attempts that have ended. From any thread."""
        if self._tally is not None:
            if self._done:
                with self._draining:
                    number = len(self._done)  # other threads add to them meanwhile
                    done = self._done[:number]
                    del self._done[:number]
                self._tally.count_done(done)
            if self._attempts:
                self._tally.count_all(_drain(self._attempts))

    def _note_fetched(self, batch: Sequence[Transaction]) -> None:
        now = time.monotonic()
        self.asking_since = None
        if batch:
            with self._lock:
                self._fetched_at.update(zip(map(id, batch), zip(repeat(now), batch), strict=False))
            self.progress_at = now
        self.row[3] = len(self._fetched_at)
        self.count_attempts()
        self._on_answer()

    def _note_settled(self, settlements: Sequence[Settlement]) -> None:
        self.count_attempts()
        transactions = [each.transaction for each in settlements]
        counts = self._messages(settlements)
        with self._lock:
            _remove(self._fetched_at, transactions)
            if self._failed:
                _remove(self._failed, transactions)
            for at, number in enumerate(counts):
                self.row[at] += number
            self.row[3] = len(self._fetched_at)
        self.progress_at = time.monotonic()

    def _messages(self, settlements: Sequence[Settlement]) -> Sequence[int]:
        """How many messages were done, failed and returned."""
        verdicts = [each.verdict for each in settlements]
        outcome_of = getattr(self.source, "outcome_of", None)
        if outcome_of is None:
            return [verdicts.count(each) for each in ORDER]
        counts = [0] * len(ORDER)
        for settlement in settlements:
            messages = outcome_of(settlement.transaction)
            if messages is None:
                counts[ORDER.index(settlement.verdict)] += 1
                continue
            for at, number in enumerate(messages):
                counts[at] += number
        return counts

    @property
    def handled(self) -> int:
        """How many messages were done or failed."""
        return self.row[0] + self.row[1]

    def call_ended(self) -> int:
        """Forget what is not settled and return how many; the row has it until the next fetch."""
        self.count_attempts()
        self.asking_since = None
        with self._lock:
            left = len(self._fetched_at)
            self._fetched_at.clear()
            self._failed.clear()
        return left

    def in_flight(self) -> tuple[int, float | None]:
        """How many deliveries are in flight, and when the oldest was fetched."""
        self.count_attempts()
        with self._lock:
            first = next(iter(self._fetched_at.values()), None)
            return len(self._fetched_at), None if first is None else first[0]

    def deliveries(self) -> list[tuple[Transaction, float]]:
        """The deliveries in flight, and when each was fetched; the oldest first."""
        with self._lock:
            return [(transaction, since) for since, transaction in self._fetched_at.values()]


def _remove(noted: dict[int, Any], transactions: Sequence[Transaction]) -> None:
    """Forget what is noted of these."""
    deque(map(noted.pop, map(id, transactions), repeat(None)), maxlen=0)


def _drain(ended: deque[T]) -> list[T]:
    """Take all there are. Other threads may add to them, or take some."""
    taken: list[T] = []
    with suppress(IndexError):
        while True:
            taken.append(ended.popleft())
    return taken
